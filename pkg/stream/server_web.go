package stream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"

	"tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/wsconn"
)

// WebSocketPath is the path of the WebSockets in which edges reach a cloud behind an HTTP ingress.
const WebSocketPath = "/tunnel"

// maxWebHeader bounds the header of a request for a WebSocket, in bytes. net/http reads 4 KiB more.
const maxWebHeader = 16 << 10

// webListener accepts WebSockets from an HTTP ingress. Inside each WebSocket, an edge speaks the same TLS as on
// the port for edges, so the cloud need not trust the ingress.
//
// A connection is on probation from TCP accept until the edge has joined. It counts among the strangers of the
// port for edges, with the ingress as its source.
type webListener struct {
	joining *joinListener    // the listener of the port for WebSockets
	passed  *listen.Handover // hands the accepted WebSockets to gRPC
	http    *http.Server
	log     *slog.Logger
}

// listenWeb opens the port for WebSockets. Without such a port it returns nil, which has all methods.
func (s *Server) listenWeb() (*webListener, error) {
	if s.cfg.WebSocket == "" {
		return nil, nil
	}
	ln, err := s.openListener(s.cfg.WebSocket)
	if err != nil {
		return nil, fmt.Errorf("listening for WebSockets: %w "+
			"(is another process on that port? see websocket in [mode.cloud.stream.server])", err)
	}
	w := &webListener{
		joining: s.newJoinListener(listen.Steady(ln, s.log)), passed: listen.NewHandover(ln.Addr, nil), log: s.log,
	}
	mux := http.NewServeMux()
	mux.HandleFunc(WebSocketPath, w.upgrade)
	w.http = &http.Server{
		Handler: mux, DisableGeneralOptionsHandler: true,
		ReadHeaderTimeout: s.cfg.Limits.JoinTimeout, // the probation ends the whole connection by then
		WriteTimeout:      s.cfg.Limits.JoinTimeout, // bounds answers of HTTP, not WebSockets
		MaxHeaderBytes:    maxWebHeader,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(ctx, webConnKey{}, c)
		},
	}
	w.http.SetKeepAlivesEnabled(false) // one request per connection, since its probation covers only one
	return w, nil
}

// serve serves the port until close. It returns an error if the port accepts no more connections before.
func (w *webListener) serve() error {
	if err := w.http.Serve(w); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("accepting WebSockets at %s: %w", w.joining.Addr(), err)
	}
	return nil
}

// close closes the port. WebSockets that were accepted continue.
func (w *webListener) close() {
	if w == nil {
		return
	}
	w.passed.Close()
	w.http.Close()
	w.joining.Close() // if serve has not begun, http does not know the listener
}

// Accept implements net.Listener, for http.
func (w *webListener) Accept() (net.Conn, error) {
	for {
		raw, err := w.joining.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if p := w.joining.admit(raw, w.joining.bytes+maxWebHeader); p != nil {
			return &webConn{raw, p}, nil
		}
		raw.Close()
	}
}

// Addr implements net.Listener.
func (w *webListener) Addr() net.Addr { return w.joining.Addr() }

// Close implements net.Listener.
func (w *webListener) Close() error { return w.joining.Close() }

// webConnKey is the key of a request's *webConn in its context.
type webConnKey struct{}

// webConn is an accepted connection of the port for WebSockets, below the WebSocket.
type webConn struct {
	net.Conn
	probation *listen.Probation
}

// NetConn returns the connection below.
func (c *webConn) NetConn() net.Conn { return c.Conn }

// Read implements net.Conn.
func (c *webConn) Read(b []byte) (int, error) { return c.probation.Read(b) }

// Close implements net.Conn.
func (c *webConn) Close() error {
	c.probation.Release()
	return c.Conn.Close()
}

// upgrade opens the WebSocket that a request asks for, and hands it to gRPC.
func (w *webListener) upgrade(out http.ResponseWriter, r *http.Request) {
	raw, ok := r.Context().Value(webConnKey{}).(*webConn)
	if !ok {
		http.Error(out, "not a connection of this listener", http.StatusInternalServerError)
		return
	}
	ws, err := wsconn.Accept(out, r, raw)
	if err != nil {
		w.log.Debug("not a WebSocket", "remote", raw.RemoteAddr().String(), "err", err)
		return
	}
	below, isFar := carry(ws, never, w.joining.control)
	if !w.passed.Give(&joiningConn{Conn: below, far: isFar, probation: raw.probation, below: true}, 0) {
		below.Close()
	}
}
