// Package page serves the status page of a cloud: nodes, replicas and the last refusals, for a browser.
//
//	p := page.New("127.0.0.1:9790", api, log)   // api is an *api.Server
//	err := p.Run(ctx)
//
//	GET /              the page: HTML, CSS and a script, which are embedded in the program
//	GET /data.json     what the page shows, a [Data]
//
// The page changes nothing: it answers only GET and HEAD. It asks for no password, so it listens only on loopback, and
// answers only requests whose Host is loopback. Otherwise a foreign web page could read it by DNS rebinding. The
// browser sends requests only to this server, and runs only the embedded script (Content-Security-Policy). Names,
// versions and reasons come from nodes and callers: the script inserts them as text, never as HTML.
//
// data.go makes the data. The browser keeps the history of a node's round trip and throughput while it shows the page.
package page

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync/atomic"
	"time"

	"tunnel.example/tunnel/pkg/admin"
	"tunnel.example/tunnel/pkg/api"
	"tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/tunnel"
)

//go:embed assets
var files embed.FS // never changes

const (
	headerTimeout  = 5 * time.Second
	writeTimeout   = time.Minute // enough for the data of 10,000 nodes through ssh over a narrow link
	idleTimeout    = time.Minute
	maxHeader      = 16 << 10 // bytes
	shutdownWithin = time.Second
)

// policy permits the page to load files only from this server, and to run no script inside the HTML.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// Source knows what the page shows. *api.Server implements it.
type Source interface {
	// Nodes returns the nodes of all replicas.
	Nodes(ctx context.Context) *api.NodeList
	// Statuses returns the status of each replica, this replica first. incomplete says which replicas did not answer.
	Statuses(ctx context.Context) (all []*api.Status, incomplete []string)
}

// Server serves the page. It is the module "page".
type Server struct {
	// Set once.
	listen string
	source Source
	log    *slog.Logger

	// Sockets opens the port; nil: nobody can take it over. Set before Run.
	Sockets *listen.Sockets

	addr atomic.Pointer[net.Addr] // nil while not listening

	data cache
}

var _ tunnel.Module = (*Server)(nil)

// New returns a server for the address listen, such as "127.0.0.1:9790".
func New(listen string, source Source, log *slog.Logger) *Server {
	return &Server{listen: listen, source: source, log: log}
}

// Name implements tunnel.Module.
func (*Server) Name() string { return "page" }

// Addr returns the address the server listens on, nil while it does not.
func (s *Server) Addr() net.Addr {
	if a := s.addr.Load(); a != nil {
		return *a
	}
	return nil
}

// Run listens and serves until ctx is done. An address that is not on loopback is an error.
func (s *Server) Run(ctx context.Context) error {
	// Resolved here, so that the address checked below is the address that is opened.
	addr, err := net.ResolveTCPAddr("tcp", s.listen)
	if err != nil {
		return fmt.Errorf("page %q: %w; write an address and a port, such as 127.0.0.1:9790", s.listen, err)
	}
	if !addr.IP.IsLoopback() {
		return fmt.Errorf("page %q: the page shows every node without a password, so it is served on loopback only; "+
			"write 127.0.0.1:%d", s.listen, addr.Port)
	}
	ln, err := s.Sockets.Listen(ctx, listen.Operators, net.ListenConfig{}, "tcp", addr.String())
	if err != nil {
		return fmt.Errorf("listening on %s for the status page (page in [mode.cloud.admin]): %w", s.listen, err)
	}
	at := ln.Addr()
	s.addr.Store(&at)
	defer s.addr.Store(nil)

	srv := &http.Server{
		Handler: s.Handler(), DisableGeneralOptionsHandler: true, MaxHeaderBytes: maxHeader,
		ReadTimeout: headerTimeout, WriteTimeout: writeTimeout, IdleTimeout: idleTimeout,
		ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
	served := make(chan error, 1) // capacity 1: the goroutine ends even if the result is not read
	go func() { served <- srv.Serve(listen.Steady(ln, s.log)) }()
	select {
	case err = <-served:
		return fmt.Errorf("serving the status page on %s: %w", at, err)
	case <-ctx.Done():
	}
	shutdownCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownWithin)
	defer cancel()
	if srv.Shutdown(shutdownCtx) != nil {
		srv.Close() // a slow browser is cut off, which does no harm
	}
	if err = <-served; !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serving the status page on %s: %w", at, err)
	}
	return nil
}

// Handler returns the handler of the page.
func (s *Server) Handler() http.Handler {
	mux := http.NewServeMux()
	for path, file := range map[string]string{
		"/{$}": "index.html", "/style.css": "style.css", "/page.js": "page.js",
	} {
		mux.HandleFunc("GET "+path, func(w http.ResponseWriter, r *http.Request) {
			http.ServeFileFS(w, r, files, "assets/"+file)
		})
	}
	mux.HandleFunc("GET /data.json", s.serveData)
	return guard(mux)
}

// guard refuses requests that are not GET or HEAD or not for loopback, and sets the headers of every answer.
func guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", policy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		h.Set("Cross-Origin-Opener-Policy", "same-origin")
		h.Set("Cache-Control", "no-store")
		switch {
		case !admin.IsLocal(r.Host):
			http.Error(w, "the status page is for localhost: open it as http://127.0.0.1 or http://localhost, "+
				"through ssh -L or kubectl port-forward", http.StatusMisdirectedRequest)
		case r.Method != http.MethodGet && r.Method != http.MethodHead:
			h.Set("Allow", "GET, HEAD")
			http.Error(w, "the status page changes nothing: it answers GET only", http.StatusMethodNotAllowed)
		default:
			next.ServeHTTP(w, r)
		}
	})
}
