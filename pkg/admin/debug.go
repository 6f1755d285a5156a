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

	"tunnel/pkg/listen"
	"tunnel/pkg/socket"
	"tunnel/pkg/tunnel"
)

// What a client of the socket may hold. It is our own user or root, so this is against
// mistakes.
const (
	debugConns = 16
	maxLevel   = 16 // bytes of a log level
)

// Debug serves what is for the operator of this machine alone, on a unix socket:
//
//	curl --unix-socket /run/tunnel/cloud.sock http://localhost/loglevel
//	curl --unix-socket /run/tunnel/cloud.sock -X PUT -d debug http://localhost/loglevel
//	curl --unix-socket /run/tunnel/cloud.sock -o heap http://localhost/debug/pprof/heap
//
// and /healthz, /readyz and /metrics as [Server] does. Who may connect is decided by the
// socket's permissions: the user that the process runs as. It is the module "debug".
type Debug struct {
	// Set once.
	path   string
	health *Server // whose answers are served here, too; it need not run
	level  *slog.LevelVar
	log    *slog.Logger

	addr atomic.Pointer[net.Addr] // nil while not listening
}

var _ tunnel.Module = (*Debug)(nil)

// NewDebug returns a server for the socket path. level is that of the process's log.
func NewDebug(path string, health *Server, level *slog.LevelVar, log *slog.Logger) *Debug {
	return &Debug{path: path, health: health, level: level, log: log}
}

// Name implements tunnel.Module.
func (d *Debug) Name() string { return "debug" }

// Routes implements tunnel.Module. No peer may ask for any of this.
func (d *Debug) Routes() map[string]tunnel.Handler { return nil }

// Addr returns the socket the server listens on, nil while it does not.
func (d *Debug) Addr() net.Addr {
	if a := d.addr.Load(); a != nil {
		return *a
	}
	return nil
}

// Run listens and serves until ctx is done.
func (d *Debug) Run(ctx context.Context) error {
	ln, err := socket.Listen(ctx, d.path)
	if err != nil {
		return fmt.Errorf("listening for operators (socket in [mode.cloud.admin] or [mode.edge.admin]): %w", err)
	}
	addr := ln.Addr()
	d.addr.Store(&addr)
	defer d.addr.Store(nil)
	srv := &http.Server{
		Handler:           d.handler(),
		ReadHeaderTimeout: headerTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeader,
		// No write timeout: a profile takes as long as was asked for.
		ErrorLog: slog.NewLogLogger(d.log.Handler(), slog.LevelDebug),
	}
	served := make(chan error, 1) // one send, whether or not it is waited for
	go func() { served <- srv.Serve(netutil.LimitListener(listen.Steady(ln, d.log), debugConns)) }()
	select {
	case err := <-served:
		return fmt.Errorf("serving operators on %s: %w", d.path, err)
	case <-ctx.Done():
	}
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownWithin)
	defer cancel()
	if err := srv.Shutdown(last); err != nil {
		srv.Close() //nolint:errcheck // a profile is cut short; nothing is lost
	}
	if err := <-served; !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serving operators on %s: %w", d.path, err)
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
	mux.HandleFunc("GET /debug/pprof/", pprof.Index) // the named profiles as well
	mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	return mux
}

// setLevel changes what is logged from now on.
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
	was := d.level.Level()
	d.level.Set(level)
	d.log.Log(r.Context(), max(level, slog.LevelInfo), "log level changed", "from", was.String(), "to", level.String()) // it is to be seen at the new level
	answer(w, http.StatusOK, strings.ToLower(level.String())+"\n")
}
