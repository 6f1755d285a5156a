// Package admin is what operators look at: health, metrics, and gRPC's own view of
// its connections.
//
//	reg := admin.NewRegistry(version, counters, directory.Sessions)
//	health := admin.New(":7000", []admin.Check{
//		{Name: "stream", Ready: server.Ready},
//		{Name: "tcp", Ready: door.Ready},
//	}, reg, log)
//	err := health.Run(ctx)
//
// [Server] answers on every interface, to anybody, so it shows nothing secret and
// nothing that names a node:
//
//	/healthz   200 while the process is alive
//	/readyz    200 when every check passes, else 503; which ones do not, and which
//	           have something to say, is listed. ?verbose lists them always
//	/metrics   Prometheus
//
// [Channelz] shows every connection, so it answers on loopback alone. [Debug] has pprof
// and the log level besides, on a unix socket that is our own user's.
//
// While the other modules drain, /readyz says 503 by their checks and /metrics is of
// interest still: give Run a context that ends after theirs have returned.
//
// The package counts nothing itself, and the local API of the command line tools is not
// here.
package admin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"tunnel/pkg/listen"
	"tunnel/pkg/tunnel"
)

// Strangers may connect, so everything they can hold is bounded. A kubelet's probe
// and a scrape need little of it.
const (
	maxHeader      = 64 << 10 // bytes
	maxScrapes     = 4        // at a time; more are answered 503
	headerTimeout  = 2 * time.Second
	readTimeout    = 10 * time.Second // headers and a body, which nobody needs to send
	scrapeTimeout  = 10 * time.Second // Prometheus' own default
	writeTimeout   = 30 * time.Second
	idleTimeout    = 10 * time.Second // a scraper may have to connect again; that costs it little
	shutdownWithin = time.Second
)

// DefaultConns is how many connections the health port serves at once.
const DefaultConns = 256

// Check is one line of /readyz. Its functions may be nil. They answer at once, for any
// goroutine, and what they say holds no secret and names no node: everybody can read it.
type Check struct {
	Name string
	// Ready returns nil, or why not.
	Ready func() error
	// Note says what is degraded and needs somebody, though not so that clients should
	// be sent elsewhere; "" when nothing is.
	Note func() string
	// Status says how well it goes when all is well.
	Status func() string
}

// line returns the check's line, and whether it passes and has nothing to note.
func (c Check) line() (line string, passed, quiet bool) {
	if c.Ready != nil {
		if err := c.Ready(); err != nil {
			return "[-]" + c.Name + " " + oneLine(err.Error()), false, false
		}
	}
	if c.Note != nil {
		if note := c.Note(); note != "" {
			return "[~]" + c.Name + " " + oneLine(note), true, false
		}
	}
	line = "[+]" + c.Name + " ok"
	if c.Status != nil {
		if status := c.Status(); status != "" {
			line += ": " + oneLine(status)
		}
	}
	return line, true, true
}

// oneLine joins the lines of what errors.Join, for one, has put below each other.
func oneLine(s string) string {
	lines := strings.FieldsFunc(s, func(r rune) bool { return r == '\n' || r == '\r' })
	return strings.Join(lines, "; ")
}

// Server serves health and metrics. It is the module "admin".
type Server struct {
	// Set once.
	listen  string
	checks  []Check
	metrics http.Handler
	log     *slog.Logger

	// Set before Run.
	Conns    int              // connections at once, an eighth of them of one source, see listen.Strangers; 0: DefaultConns
	Counters *tunnel.Counters // counts further ones, which are closed; nil: nobody looks

	addr atomic.Pointer[net.Addr] // nil while not listening
}

var _ tunnel.Module = (*Server)(nil)

// New returns a server for the address listen, such as ":7000".
func New(listen string, checks []Check, reg prometheus.Gatherer, log *slog.Logger) *Server {
	return &Server{
		listen: listen,
		checks: checks,
		metrics: promhttp.HandlerFor(reg, promhttp.HandlerOpts{
			ErrorLog:            slog.NewLogLogger(log.Handler(), slog.LevelWarn),
			ErrorHandling:       promhttp.ContinueOnError, // one bad number hides no other
			MaxRequestsInFlight: maxScrapes,
			Timeout:             scrapeTimeout,
		}),
		log: log,
	}
}

// Name implements tunnel.Module.
func (s *Server) Name() string { return "admin" }

// Routes implements tunnel.Module. No peer may ask for any of this.
func (s *Server) Routes() map[string]tunnel.Handler { return nil }

// Addr returns the address the server listens on, nil while it does not.
func (s *Server) Addr() net.Addr {
	if a := s.addr.Load(); a != nil {
		return *a
	}
	return nil
}

// Run listens and serves until ctx is done.
func (s *Server) Run(ctx context.Context) error {
	ln, err := openPort(ctx, s.listen)
	if err != nil {
		return fmt.Errorf("listening on %s for health and metrics (logport): %w", s.listen, err)
	}
	addr := ln.Addr()
	s.addr.Store(&addr)
	defer s.addr.Store(nil)

	srv := &http.Server{
		Handler:                      s.handler(),
		DisableGeneralOptionsHandler: true,
		ReadHeaderTimeout:            headerTimeout,
		ReadTimeout:                  readTimeout,
		WriteTimeout:                 writeTimeout,
		IdleTimeout:                  idleTimeout,
		MaxHeaderBytes:               maxHeader,
		ConnState:                    noteState,
		ErrorLog:                     slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
	served := make(chan error, 1) // one send, whether or not it is waited for
	go func() { served <- srv.Serve(s.newStrangerListener(listen.Steady(ln, s.log))) }()
	select {
	case err := <-served:
		return fmt.Errorf("serving health and metrics on %s: %w", addr, err)
	case <-ctx.Done():
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownWithin)
	defer cancel()
	if err := srv.Shutdown(last); err != nil {
		srv.Close() //nolint:errcheck // somebody reads slowly; nothing is lost
	}
	if err := <-served; !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serving health and metrics on %s: %w", addr, err)
	}
	return nil
}

// openPort opens addr, or says what to do.
func openPort(ctx context.Context, addr string) (net.Listener, error) {
	ln, err := new(net.ListenConfig).Listen(ctx, "tcp", addr)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("%w; stop what listens there (ss -ltnp shows it), or choose another port", err)
	case errors.Is(err, syscall.EACCES):
		return nil, fmt.Errorf("%w; ports below 1024 need CAP_NET_BIND_SERVICE, choose a higher one", err)
	}
	return ln, err
}

// strangerListener bounds the connections. Who asks is never known, so all of them are
// strangers, and those that wait for a request are silent. This machine's own connections
// have places of their own: a kubelet probes a pod of the node's network from there.
type strangerListener struct {
	net.Listener
	strangers *listen.Strangers
	counters  *tunnel.Counters
}

func (s *Server) newStrangerListener(ln net.Listener) strangerListener {
	counters := s.Counters
	if counters == nil {
		counters = new(tunnel.Counters)
	}
	conns := cmp.Or(s.Conns, DefaultConns)
	return strangerListener{ln, listen.NewStrangers(conns, max(1, conns/8)), counters}
}

// Accept implements net.Listener.
func (l strangerListener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		from := listen.AddrOf(c.RemoteAddr())
		if from == listen.AddrOf(c.LocalAddr()) {
			l.strangers.Know(from)
		}
		place, _ := l.strangers.Admit(c, func() {
			l.counters.Limited(tunnel.LimitHealth)
			c.Close()
		})
		if place != nil {
			return strangerConn{c, place}, nil
		}
		l.counters.Limited(tunnel.LimitHealth)
		c.Close()
	}
}

// strangerConn is a connection that has a place until it is closed.
type strangerConn struct {
	net.Conn
	place *listen.Stranger
}

// noteState is told by net/http what a connection does.
func noteState(c net.Conn, state http.ConnState) {
	switch state {
	case http.StateActive: // the first byte of a request has come
		c.(strangerConn).place.Spoke()
	case http.StateIdle:
		c.(strangerConn).place.Silent()
	}
}

// Close implements net.Conn.
func (c strangerConn) Close() error {
	c.place.Release()
	return c.Conn.Close()
}

func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	s.register(mux)
	return mux
}

func (s *Server) register(mux *http.ServeMux) {
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, http.StatusOK, "ok")
	})
	mux.HandleFunc("GET /readyz", s.ready)
	mux.Handle("GET /metrics", s.metrics)
}

// ready answers as kube-apiserver does: "ok", or the list of checks when one fails or
// has a note, or ?verbose asks for it.
func (s *Server) ready(w http.ResponseWriter, r *http.Request) {
	var list strings.Builder
	ready, short := true, !r.URL.Query().Has("verbose")
	for _, c := range s.checks {
		line, passed, quiet := c.line()
		ready, short = ready && passed, short && quiet
		list.WriteString(line + "\n")
	}
	switch {
	case !ready:
		answer(w, http.StatusServiceUnavailable, list.String()+"readyz check failed\n")
	case short:
		answer(w, http.StatusOK, "ok")
	default:
		answer(w, http.StatusOK, list.String()+"readyz check passed\n")
	}
}

func answer(w http.ResponseWriter, status int, body string) {
	h := w.Header()
	h.Set("Content-Type", "text/plain; charset=utf-8")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	w.Write([]byte(body)) //nolint:errcheck // the caller has gone
}
