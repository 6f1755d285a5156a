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

	"tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/tunnel"
)

const (
	// idleTimeout ends a connection without requests. It is longer than the 90 s for which
	// kube-apiserver pools a connection, so that the caller closes it first.
	idleTimeout = 3 * time.Minute
)

// An HTTP/2 connection's window, in bytes, has room for what all its streams may send. So a target
// that does not read stops its own upload only.
const (
	maxStreams   = 256
	streamWindow = 256 << 10
	connWindow   = maxStreams * streamWindow
)

// serverTLS returns the TLS configuration for the next caller.
func (c *Config) serverTLS() *tls.Config {
	roots := c.ClientCA()
	return &tls.Config{
		MinVersion:   tls.VersionTLS12,
		Certificates: []tls.Certificate{*c.Certificate()},
		// VerifyShown verifies, also the key usage client auth, after it has looked at the size of the chain.
		ClientAuth: tls.RequireAnyClientCert, ClientCAs: roots, VerifyPeerCertificate: listen.VerifyShown(roots),
		NextProtos: []string{"h2", "http/1.1"},
		// A resumed session would bring a client certificate that was verified earlier, by an
		// authority that may have been removed since.
		SessionTicketsDisabled: true,
	}
}

// terminate does the TLS handshake with a caller and gives the connection to web. If the caller may
// call, terminate releases its place among the strangers. If the caller has a valid certificate but may
// not call, it keeps its place: it can still send a request, whose answer says what is wrong. terminate
// then returns when the connection has ended.
func (f *FrontDoor) terminate(ctx, live context.Context, web *web, c *clientConn, place *listen.Stranger,
	log *slog.Logger) {
	hctx, cancel := context.WithTimeout(ctx, f.cfg.Limits.HandshakeTimeout)
	defer cancel()
	tc := tls.Server(c, f.cfg.serverTLS())
	c.left = maxHandshake
	err := tc.HandshakeContext(hctx)
	c.left = 0
	if err != nil {
		if hctx.Err() == context.DeadlineExceeded {
			f.cfg.Counters.Limited(tunnel.LimitHandshakeTimeout)
		}
		f.warnHandshake(c, err)
		c.lingeringClose() // the TLS alert that says why must arrive
		return
	}
	mayCall := len(f.classesOf(callerOf(tc.ConnectionState()))) > 0
	if mayCall {
		place.Met()
		f.cfg.OnePort.Met(c.RemoteAddr())
	}
	log.Debug("https connection terminated", "remote", c.RemoteAddr().String())
	// Reset at the end of the grace period: net/http's Close would wait for each caller that does not read.
	c.stopWatch = context.AfterFunc(live, func() { c.Reset() })
	var nc net.Conn = tc // net/http speaks HTTP/2 only with a *tls.Conn
	if tc.ConnectionState().NegotiatedProtocol != "h2" {
		c.framed = &framedConn{
			Conn: tc, counters: f.cfg.Counters,
			frame: framing{maxHead: f.cfg.Limits.maxHeaderBytes()},
		}
		nc = c.framed
	}
	c.done = make(chan struct{})
	handedOver := time.Now()
	if !web.handoff.Give(nc, 0) {
		c.stopWatch()
		c.Close() // the front door is closing
		return
	}
	if !mayCall {
		t := time.AfterFunc(f.strangerTimeout, func() { c.Reset() })
		defer t.Stop()
		<-c.done
		if time.Since(handedOver) >= f.strangerTimeout { // net/http may have closed it because of its own timeout
			f.cfg.Counters.Limited(tunnel.LimitHandshakeTimeout)
		}
	}
}

// warnHandshake warns that the handshake with a caller has failed. If the SNI names a node that the front door could
// not reach, the warning says so. Then the caller has got our certificate in place of the kubelet's, and its own error
// only says that the certificate is for another name.
func (f *FrontDoor) warnHandshake(c *clientConn, err error) {
	node, cause := f.unreached(c)
	if cause != nil {
		f.cfg.Counters.Doors[tunnel.DoorHTTPS].Failed(tunnel.CodeOf(cause))
		err = fmt.Errorf("%w; %w, so the caller was shown the certificate of this cloud", err, cause)
	}
	f.warn(denyHandshake, "https handshake failed", "frontend", c.LocalAddr().String(),
		"remote", c.RemoteAddr().String(), "node", string(node), "err", shown(err.Error()))
}

// unreached returns the node that the SNI of c names, and why c was not passed through to the node. cause is nil if
// the SNI names no node, or the front door does not pass c through anyway.
func (f *FrontDoor) unreached(c *clientConn) (node tunnel.NodeName, cause error) {
	node, err := tunnel.ParseNodeName(c.sni)
	own := f.cfg.Certificate()
	switch {
	case err != nil || f.cfg.Mode != Auto:
		return "", nil
	case c.passErr != nil:
		return node, fmt.Errorf("node %s cannot be reached: %w", node, c.passErr)
	case own.Leaf != nil && own.Leaf.VerifyHostname(c.sni) == nil:
		return "", nil // the name is one of ours
	case f.nodes.Holds(node):
		return "", nil
	}
	return node, tunnel.Refusef(tunnel.NoSuchNode, "node %s is not connected", node)
}

// callerOf returns the common name of the client certificate that TLS has verified.
func callerOf(s tls.ConnectionState) string { return s.PeerCertificates[0].Subject.CommonName }

// web is the HTTP server behind terminated connections.
type web struct {
	server  *http.Server
	proxy   *proxy
	handoff *listen.Handover // passes connections from terminate to server
	serving sync.WaitGroup   // server's accept loop
	conns   sync.WaitGroup   // connections that net/http owns
}

// startWeb starts the server. When live is done, all requests that it serves end.
func (f *FrontDoor) startWeb(live context.Context) *web {
	w := &web{
		proxy:   newProxy(live, f),
		handoff: listen.NewHandover(func() net.Addr { return &net.TCPAddr{} }, nil),
	}
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true)
	w.server = &http.Server{
		Handler:   w.proxy,
		Protocols: protocols,
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams:          maxStreams,
			MaxReadFrameSize:              16 << 10, // net/http's default keeps 1 MiB for a frame that never comes
			MaxReceiveBufferPerStream:     streamWindow,
			MaxReceiveBufferPerConnection: connWindow,
		},
		ReadHeaderTimeout: f.cfg.Limits.HandshakeTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    f.cfg.Limits.maxHeaderBytes(),
		// No read or write timeout: `kubectl logs -f` may be idle for hours.
		BaseContext: func(net.Listener) context.Context { return live },
		ConnContext: func(ctx context.Context, nc net.Conn) context.Context {
			return context.WithValue(ctx, connKey{}, clientOf(nc))
		},
		ConnState: func(nc net.Conn, s http.ConnState) {
			switch s {
			case http.StateNew:
				// Called by the accept loop, which has ended before wait waits for conns.
				w.conns.Add(1)
			case http.StateClosed, http.StateHijacked:
				c := clientOf(nc)
				c.stopWatch()
				close(c.done)
				w.conns.Done()
			}
		},
		ErrorLog: slog.NewLogLogger(f.log.Handler(), slog.LevelDebug),
	}
	w.serving.Go(func() {
		if err := w.server.Serve(w.handoff); !errors.Is(err, http.ErrServerClosed) {
			f.log.Error("https server stopped unexpectedly", "module", Name, "err", err)
		}
	})
	return w
}

// stop lets requests and upgraded connections end. It returns when they have ended, or when live is done.
func (w *web) stop(live context.Context) {
	if w.server.Shutdown(live) == nil { // on an error, wait closes what is left
		w.proxy.handlers.Wait() // Shutdown does not wait for upgraded connections; live ends them
	}
}

// wait waits until all goroutines of w have ended. live must be done.
func (w *web) wait() {
	w.server.Close() // its listener is closed already
	w.serving.Wait()
	w.conns.Wait()
	w.proxy.wait()
}

// connKey is the context key of a request's *clientConn.
type connKey struct{}

// clientOf returns the clientConn under a conn that terminate gave to net/http.
func clientOf(nc net.Conn) *clientConn {
	return nc.(interface{ NetConn() net.Conn }).NetConn().(*clientConn)
}
