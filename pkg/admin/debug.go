package admin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/pprof"
	"strings"
	"sync/atomic"

	"golang.org/x/net/netutil"

	"tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/socket"
	"tunnel.example/tunnel/pkg/tunnel"
)

// Limits of a client of the socket. The client is our own user or root, so the limits protect only
// against mistakes.
const (
	debugConns = 16 // at a time
	maxLevel   = 16 // bytes of a log level
)

// Debug serves only the operator of this machine, on a unix socket:
//
//	curl --unix-socket /run/tunnel-cloud/admin.sock http://localhost/loglevel
//	curl --unix-socket /run/tunnel-cloud/admin.sock -X PUT -d debug http://localhost/loglevel
//	curl --unix-socket /run/tunnel-cloud/admin.sock -o heap http://localhost/debug/pprof/heap
//
// and /healthz, /readyz and /metrics as [Server] does, and the API of the commands (package api) below
// /v1/. The socket's permissions decide who may connect: only the user that runs the process. Debug is the
// module "debug".
type Debug struct {
	// Set once.
	path   string
	health *Server        // its responses are served here, too; it need not run
	level  *slog.LevelVar // of the process's log
	log    *slog.Logger

	// API answers the paths below /v1/, such as an api.Server; nil: nothing does. Set before Run.
	API http.Handler

	// Handlers are further paths, by their pattern, such as "POST /v1/reload". Set before Run.
	Handlers map[string]http.Handler

	// Sockets opens the socket; nil: nobody can take it over. Set before Run.
	Sockets *listen.Sockets

	addr atomic.Pointer[net.Addr] // nil while not listening
}

var _ tunnel.Module = (*Debug)(nil)

// NewDebug returns a server for the socket path. level is the level of the process's log.
func NewDebug(path string, health *Server, level *slog.LevelVar, log *slog.Logger) *Debug {
	return &Debug{path: path, health: health, level: level, log: log}
}

// Name implements tunnel.Module.
func (d *Debug) Name() string { return "debug" }

// Addr returns the socket the server listens on, nil while it does not.
func (d *Debug) Addr() net.Addr {
	if a := d.addr.Load(); a != nil {
		return *a
	}
	return nil
}

// Run listens and serves until ctx is done.
func (d *Debug) Run(ctx context.Context) error {
	ln, err := d.Sockets.Open(listen.Operators, listen.Name{Network: "unix", Address: d.path},
		func() (net.Listener, error) { return socket.Listen(ctx, d.path) })
	if err != nil {
		return fmt.Errorf("opening the admin socket (socket in [mode.cloud.admin] or [mode.edge.admin]): %w", err)
	}
	addr := ln.Addr()
	d.addr.Store(&addr)
	defer d.addr.Store(nil)
	srv := &http.Server{
		Handler:           d.handler(),
		ReadHeaderTimeout: headerTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeader,
		// No write timeout: the client chooses how long a profile takes.
		ErrorLog: slog.NewLogLogger(d.log.Handler(), slog.LevelDebug),
	}
	served := make(chan error, 1) // capacity 1: the goroutine ends even if the result is not read
	go func() { served <- srv.Serve(netutil.LimitListener(listen.Steady(ln, d.log), debugConns)) }()
	select {
	case err := <-served:
		return fmt.Errorf("serving the admin socket %s: %w", d.path, err)
	case <-ctx.Done():
	}
	shutdownCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownWithin)
	defer cancel()
	if err := srv.Shutdown(shutdownCtx); err != nil {
		srv.Close() // a profile is cut short; nothing is lost
	}
	if err := <-served; !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serving the admin socket %s: %w", d.path, err)
	}
	return nil
}

func (d *Debug) handler() http.Handler {
	mux := http.NewServeMux()
	d.health.register(mux)
	mux.HandleFunc("GET /loglevel", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, http.StatusOK, strings.ToLower(d.level.Level().String())+"\n")
	})
	mux.HandleFunc("PUT /loglevel", d.setLevel)
	if d.API != nil {
		mux.Handle("/v1/", d.API)
	}
	for pattern, h := range d.Handlers {
		mux.Handle(pattern, h)
	}
	mux.HandleFunc("GET /debug/pprof/", pprof.Index) // also serves the named profiles
	mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	return mux
}

// setLevel changes the level of the process's log.
func (d *Debug) setLevel(w http.ResponseWriter, r *http.Request) {
	text, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxLevel))
	var level slog.Level
	if err == nil {
		err = level.UnmarshalText([]byte(strings.TrimSpace(string(text))))
	}
	if err != nil {
		answer(w, http.StatusBadRequest, "the body is debug, info, warn or error\n")
		return
	}
	previous := d.level.Level()
	d.level.Set(level)
	// Log at least at the new level, so that the new level does not hide this line.
	d.log.Log(r.Context(), max(level, slog.LevelInfo), "log level changed",
		"from", previous.String(), "to", level.String())
	answer(w, http.StatusOK, strings.ToLower(level.String())+"\n")
}
