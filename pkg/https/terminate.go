package https

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"tunnel/pkg/tunnel"
)

const (
	// idleTimeout ends a connection without requests. It is longer than the 90 s
	// for which kube-apiserver pools one, so that the caller is who closes it.
	idleTimeout = 3 * time.Minute
)

// An HTTP/2 connection's window holds what all of its streams may send, so that a
// target that does not read stops its own upload and no other.
const (
	maxStreams   = 256
	streamWindow = 256 << 10
	connWindow   = maxStreams * streamWindow
)

// serverTLS is how we meet the next caller.
func (c *Config) serverTLS() *tls.Config {
	return &tls.Config{
		MinVersion:   tls.VersionTLS12,
		Certificates: []tls.Certificate{*c.Certificate()},
		ClientAuth:   tls.RequireAndVerifyClientCert, // for the usage client auth
		ClientCAs:    c.ClientCA(),
		NextProtos:   []string{"h2", "http/1.1"},
		// A resumed session would carry a client certificate that was verified once, by
		// an authority that may not be ours any more.
		SessionTicketsDisabled: true,
	}
}

// terminate does the TLS handshake with a caller and gives the connection to web.
// release is called when the caller has proven that it may call. One that has only
// proven who it is stays a stranger: it is heard, so that it can be told what is wrong,
// and terminate returns when its connection has ended.
func (f *FrontDoor) terminate(ctx, live context.Context, web *web, c *clientConn, release func(), log *slog.Logger) {
	hctx, cancel := context.WithTimeout(ctx, f.cfg.Limits.HandshakeTimeout)
	defer cancel()
	tc := tls.Server(c, f.cfg.serverTLS())
	if err := tc.HandshakeContext(hctx); err != nil {
		if hctx.Err() == context.DeadlineExceeded {
			f.cfg.Counters.Limited(tunnel.LimitHandshakeTimeout)
		}
		f.warn(denyHandshake, "https handshake failed", "frontend", c.LocalAddr().String(), "err", fmt.Errorf("%s: %w", c.RemoteAddr(), err))
		c.part() // the alert that says why must arrive
		return
	}
	known := len(f.may(callerOf(tc.ConnectionState()))) > 0
	if known {
		release()
	}
	log.Debug("https connection terminated", "err", c.refused)
	// A Close of net/http would wait for each caller that takes nothing.
	c.unwatch = context.AfterFunc(live, func() { c.Reset() }) //nolint:errcheck // it returns none
	var nc net.Conn = tc                                      // net/http takes HTTP/2 from a *tls.Conn only
	if tc.ConnectionState().NegotiatedProtocol != "h2" {
		c.framed = &framedConn{Conn: tc, counters: f.cfg.Counters, frame: framing{most: f.cfg.Limits.mostHeaders()}}
		nc = c.framed
	}
	c.ended = make(chan struct{})
	given := time.Now()
	if !web.handoff.give(nc) {
		c.unwatch()
		c.Close() //nolint:errcheck // the front door is closing
		return
	}
	if !known {
		t := time.AfterFunc(f.hearing, func() { c.Reset() }) //nolint:errcheck // it returns none
		defer t.Stop()
		<-c.ended
		if time.Since(given) >= f.hearing { // web may have been the one to hang up
			f.cfg.Counters.Limited(tunnel.LimitHandshakeTimeout)
		}
	}
}

// callerOf returns the name in a client certificate that TLS has verified.
func callerOf(s tls.ConnectionState) string { return s.PeerCertificates[0].Subject.CommonName }

// web is the HTTP server behind the connections that we terminate.
type web struct {
	server  *http.Server
	proxy   *proxy
	handoff *handoff
	serving sync.WaitGroup // the server's accept loop
	conns   sync.WaitGroup // connections that net/http owns
}

// startWeb starts the server. Everything that it serves ends with live.
func (f *FrontDoor) startWeb(live context.Context) *web {
	w := &web{
		proxy:   newProxy(live, f),
		handoff: &handoff{conns: make(chan net.Conn), closed: make(chan struct{})},
	}
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true)
	w.server = &http.Server{
		Handler:           w.proxy,
		Protocols:         protocols,
		HTTP2:             &http.HTTP2Config{MaxConcurrentStreams: maxStreams, MaxReceiveBufferPerStream: streamWindow, MaxReceiveBufferPerConnection: connWindow},
		ReadHeaderTimeout: f.cfg.Limits.HandshakeTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    f.cfg.Limits.mostHeaders(),
		// No read or write timeout: `kubectl logs -f` is quiet for hours.
		BaseContext: func(net.Listener) context.Context { return live },
		ConnContext: func(ctx context.Context, nc net.Conn) context.Context {
			return context.WithValue(ctx, connKey{}, clientOf(nc))
		},
		ConnState: func(nc net.Conn, s http.ConnState) {
			switch s {
			case http.StateNew:
				// Called by the accept loop, which ends before anyone waits.
				w.conns.Add(1)
			case http.StateClosed, http.StateHijacked:
				c := clientOf(nc)
				c.unwatch()
				close(c.ended)
				w.conns.Done()
			}
		},
		ErrorLog: slog.NewLogLogger(f.log.Handler(), slog.LevelDebug),
	}
	w.serving.Go(func() {
		if err := w.server.Serve(w.handoff); !errors.Is(err, http.ErrServerClosed) {
			f.log.Error("https server ended by itself", "module", Name, "err", err)
		}
	})
	return w
}

// stop lets what is in flight end. It returns when it has, or when live ends.
func (w *web) stop(live context.Context) {
	w.server.Shutdown(live) //nolint:errcheck // wait ends what is left
}

// wait returns when nothing of w runs any more. live has ended.
func (w *web) wait() {
	w.server.Close() //nolint:errcheck // its listener is closed already
	w.serving.Wait()
	w.conns.Wait()
	w.proxy.wait()
}

// connKey is the key of the *clientConn in a request's context.
type connKey struct{}

// clientOf returns what is under a conn that terminate gave to net/http.
func clientOf(nc net.Conn) *clientConn {
	return nc.(interface{ NetConn() net.Conn }).NetConn().(*clientConn)
}

// handoff is the listener through which connections reach net/http after their
// handshake.
type handoff struct {
	conns  chan net.Conn // sent by give, never closed; unbuffered, so that none is forgotten in it
	closed chan struct{} // closed by Close
	once   sync.Once
}

// give reports whether the server has taken c.
func (h *handoff) give(c net.Conn) bool {
	select {
	case h.conns <- c:
		return true
	case <-h.closed:
		return false
	}
}

func (h *handoff) Accept() (net.Conn, error) {
	select {
	case c := <-h.conns:
		return c, nil
	case <-h.closed:
		return nil, net.ErrClosed
	}
}

func (h *handoff) Close() error {
	h.once.Do(func() { close(h.closed) })
	return nil
}

func (h *handoff) Addr() net.Addr { return &net.TCPAddr{} }
