// Package admin serves health, metrics and gRPC's channelz to operators.
//
//	reg := admin.NewRegistry(version, counters, directory.Sessions)
//	health := admin.New(":7000", []admin.Check{
//		{Name: "stream", Ready: server.Ready},
//		{Name: "tcp", Ready: door.Ready},
//	}, reg, log)
//	err := health.Run(ctx)
//
// [Server] usually listens on every interface and answers any caller, so it shows no secret and no
// node's name:
//
//	/healthz   200 while the process is alive
//	/readyz    200 when every check passes, else 503; lists the checks if one
//	           fails or has a note. ?verbose always lists them
//	/metrics   Prometheus
//
// [Channelz] shows every connection, so it listens on loopback only. [Debug] also serves pprof and
// the log level, on a unix socket of our own user.
//
// While the other modules drain, operators still need /readyz, which answers 503, and /metrics. So
// give Run a context that ends after the other modules have returned.
//
// The package counts nothing itself. Package api is the API of the commands; Debug serves it.
package admin

import (
	"cmp"
	"context"
	"crypto/tls"
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

	"tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/tunnel"
)

// Any caller may connect, so there is a limit for everything that a caller can use. A kubelet's probe
// and a scrape need much less.
const (
	maxHeader      = 8 << 10 // bytes
	maxScrapes     = 4       // at a time; further ones wait
	headerTimeout  = 2 * time.Second
	readTimeout    = 10 * time.Second // header and body; no request here needs a body
	scrapeTimeout  = 10 * time.Second // Prometheus' own default
	writeTimeout   = 30 * time.Second
	idleTimeout    = 10 * time.Second // a scraper may then have to connect again, which is cheap
	shutdownWithin = time.Second      // after this time, the server cuts off responses
)

// DefaultConns is how many connections the health port serves at once.
const DefaultConns = 256

// Check is one line of /readyz. Each of its functions may be nil. They return at once, may be
// called by any goroutine, and return no secret and no node's name: everybody can read the result.
type Check struct {
	Name string
	// Ready returns nil when the module can serve, or the reason why it cannot.
	Ready func() error
	// Note says what needs an operator's attention although the module still serves: see degraded in
	// docs/words.md. It returns "" when nothing is degraded.
	Note func() string
	// Status says how well the module works while nothing is wrong.
	Status func() string
	// Off reports that the module has nothing to do now. Then it has no line.
	Off func() bool
}

// State is the verdict of a check.
type State string

// The states of a check.
const (
	StateOK       State = "ok"
	StateDegraded State = "degraded" // there is a note
	StateFailed   State = "failed"   // not ready
)

// Result returns the state of the check, and a line of text about it, which may be empty.
func (c Check) Result() (State, string) {
	if c.Ready != nil {
		if err := c.Ready(); err != nil {
			return StateFailed, oneLine(err.Error())
		}
	}
	if c.Note != nil {
		if note := c.Note(); note != "" {
			return StateDegraded, oneLine(note)
		}
	}
	if c.Status != nil {
		return StateOK, oneLine(c.Status())
	}
	return StateOK, ""
}

// line returns the check's line. passed reports whether Ready returned nil. quiet reports whether the check
// passed and has no note.
func (c Check) line() (line string, passed, quiet bool) {
	switch state, text := c.Result(); {
	case state == StateFailed:
		return "[-]" + c.Name + " " + text, false, false
	case state == StateDegraded:
		return "[~]" + c.Name + " " + text, true, false
	case text != "":
		return "[+]" + c.Name + " ok: " + text, true, true
	}
	return "[+]" + c.Name + " ok", true, true
}

// oneLine replaces line breaks, such as those of errors.Join, by semicolons.
func oneLine(s string) string {
	lines := strings.FieldsFunc(s, func(r rune) bool { return r == '\n' || r == '\r' })
	return strings.Join(lines, "; ")
}

// Server serves health and metrics. It is the module "admin".
type Server struct {
	// Set once.
	listen  string
	checks  func() []Check
	metrics http.Handler // answers /metrics; nil: the server is public, see NewPublic
	log     *slog.Logger
	public  net.Listener // of a public server
	tls     *tls.Config  // of a public server

	// Set before Run.
	// Conns is how many connections may be open; 0: DefaultConns. One source gets an eighth of them, see
	// listen.Strangers.
	Conns int
	// Counters counts the connections that were closed because of this limit; nil: nobody counts them.
	Counters *tunnel.Counters
	// Sockets opens the port; nil: nobody can take it over.
	Sockets *listen.Sockets

	addr atomic.Pointer[net.Addr] // nil while not listening
}

var _ tunnel.Module = (*Server)(nil)

// New returns a server for the address listen, such as ":7000".
func New(listen string, checks []Check, reg prometheus.Gatherer, log *slog.Logger) *Server {
	return &Server{
		listen: listen,
		checks: func() []Check { return checks },
		metrics: inTurn(promhttp.HandlerFor(reg, promhttp.HandlerOpts{
			ErrorLog:      slog.NewLogLogger(log.Handler(), slog.LevelWarn),
			ErrorHandling: promhttp.ContinueOnError, // one bad metric does not hide the others
		})),
		log: log,
	}
}

// inTurn serves maxScrapes requests at a time. Further ones wait, in the order in which they came: if they were
// refused, a stranger that asks all the time would keep Prometheus out. After scrapeTimeout the answer is 503.
func inTurn(h http.Handler) http.Handler {
	slots := make(chan struct{}, maxScrapes) // a request has sent one element; never closed
	return http.TimeoutHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case slots <- struct{}{}:
			defer func() { <-slots }()
			h.ServeHTTP(w, r)
		case <-r.Context().Done():
		}
	}), scrapeTimeout, "the metrics could not be collected in time")
}

// NewPublic returns a server for balancers and monitors outside of the network. Over TLS it serves
// /healthz and /readyz on ln, and no metrics. The answers have no list of the checks. checks is called
// for each request.
func NewPublic(ln net.Listener, conf *tls.Config, checks func() []Check, log *slog.Logger) *Server {
	return &Server{public: ln, tls: conf, checks: checks, log: log}
}

// Name implements tunnel.Module.
func (s *Server) Name() string {
	if s.public != nil {
		return "public-health"
	}
	return "admin"
}

// Addr returns the address the server listens on, nil while it does not.
func (s *Server) Addr() net.Addr {
	if a := s.addr.Load(); a != nil {
		return *a
	}
	return nil
}

// Run listens and serves until ctx is done.
func (s *Server) Run(ctx context.Context) error {
	ln := s.public
	if ln == nil {
		opened, err := openPort(ctx, s.Sockets, s.listen)
		if err != nil {
			return fmt.Errorf("listening on %s for health and metrics (logport): %w", s.listen, err)
		}
		ln = listen.Steady(opened, s.log)
	}
	addr := ln.Addr()
	s.addr.Store(&addr)
	defer s.addr.Store(nil)

	srv := &http.Server{
		Handler:                      s.handler(),
		DisableGeneralOptionsHandler: true,
		ReadHeaderTimeout:            headerTimeout, // also bounds a TLS handshake
		ReadTimeout:                  readTimeout,
		WriteTimeout:                 writeTimeout,
		IdleTimeout:                  idleTimeout,
		MaxHeaderBytes:               maxHeader,
		ConnState:                    noteState,
		ErrorLog:                     slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
		TLSConfig:                    s.tls,
	}
	served := make(chan error, 1) // capacity 1: the goroutine ends even if the result is not read
	go func() { served <- s.serve(srv, s.newStrangerListener(ln)) }()
	select {
	case err := <-served:
		return fmt.Errorf("serving health and metrics on %s: %w", addr, err)
	case <-ctx.Done():
	}
	shutdownCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownWithin)
	defer cancel()
	if err := srv.Shutdown(shutdownCtx); err != nil {
		srv.Close() // a slow client is cut off, which does no harm
	}
	if err := <-served; !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serving health and metrics on %s: %w", addr, err)
	}
	return nil
}

// serve serves ln, over TLS if the server is public.
func (s *Server) serve(srv *http.Server, ln net.Listener) error {
	if s.tls == nil {
		return srv.Serve(ln)
	}
	srv.Protocols = new(http.Protocols)
	srv.Protocols.SetHTTP1(true) // HTTP/1 only: HTTP/2 would need limits for streams, and a check does not need HTTP/2
	return srv.ServeTLS(ln, "", "")
}

// openPort opens addr. If that fails, the error says what to do.
func openPort(ctx context.Context, sockets *listen.Sockets, addr string) (net.Listener, error) {
	ln, err := sockets.Listen(ctx, listen.Operators, net.ListenConfig{}, "tcp", addr)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("%w; stop what listens there (ss -ltnp shows it), or choose another port", err)
	case errors.Is(err, syscall.EACCES):
		return nil, fmt.Errorf("%w; ports below 1024 need CAP_NET_BIND_SERVICE, choose a higher one", err)
	}
	return ln, err
}

// strangerListener bounds the open connections. Callers never authenticate, so all of them are
// strangers; a connection that waits for a request is silent. This machine's own connections count
// as known and have places of their own: a kubelet probes a pod in the host network from the same
// address.
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

// noteState is net/http's ConnState hook: it tells the place whether the connection is silent.
func noteState(c net.Conn, state http.ConnState) {
	if over, ok := c.(*tls.Conn); ok {
		c = over.NetConn()
	}
	switch state {
	case http.StateActive: // the first byte of a request has arrived
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

// register adds the handlers that Server and Debug share.
func (s *Server) register(mux *http.ServeMux) {
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		answer(w, http.StatusOK, "ok")
	})
	mux.HandleFunc("GET /readyz", s.ready)
	if s.metrics != nil {
		mux.Handle("GET /metrics", s.metrics)
	}
}

// ready answers as kube-apiserver does: "ok", or the list of checks if one of them fails or has a
// note, or if ?verbose asks for the list.
func (s *Server) ready(w http.ResponseWriter, r *http.Request) {
	var list strings.Builder
	ready, short := true, !r.URL.Query().Has("verbose")
	for _, c := range s.checks() {
		if c.Off != nil && c.Off() {
			continue
		}
		line, passed, quiet := c.line()
		ready, short = ready && passed, short && quiet
		list.WriteString(line + "\n")
	}
	switch {
	case s.public != nil && ready:
		answer(w, http.StatusOK, "ok")
	case s.public != nil:
		answer(w, http.StatusServiceUnavailable, "not ready")
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
	w.Write([]byte(body))
}
