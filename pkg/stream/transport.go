package stream

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"runtime"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"

	"tunnel.example/tunnel/pkg/balancer"
	"tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/tunnel"
)

// transport is one accepted connection of an edge. gRPC passes the transport to every stream of the
// connection (peer.Peer.AuthInfo). So a Connect finds only the session that owns its connection.
type transport struct {
	credentials.TLSInfo
	conn    *joiningConn
	joining atomic.Bool                  // a control stream or first certificate was requested; a second one is refused
	session atomic.Pointer[cloudSession] // set once, when the edge has joined
	refused atomic.Bool                  // a stream was refused; no further stream is served
	early   int                          // how many streams began before the session; owned by Server.count
	// unserved is how many streams have begun, less those that have had a handler; see maxUnserved.
	unserved atomic.Int64
}

// refuse makes the server refuse every further stream on the connection. It closes the connection when the status has
// left, see closeSoon. first reports whether this is the first refusal.
func (t *transport) refuse() (first bool) {
	if t.refused.Swap(true) {
		return false
	}
	t.conn.closeSoon()
	return true
}

// serverCreds are TLS credentials that return a *transport as AuthInfo. They attach a data connection to
// its session, so that gRPC never sees this connection.
type serverCreds struct {
	credentials.TransportCredentials
	attach func(*tls.Conn, *joiningConn) error // makes a connection a data connection of its session
	// count counts streams and frames without data; true: they are too many.
	count func(t *transport, streams, frames int) bool
	// balancers logs connections that begin with a PROXY header and do not come from a balancer.
	balancers *balancer.Balancers
}

// ServerHandshake implements credentials.TransportCredentials.
func (c serverCreds) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := c.TransportCredentials.ServerHandshake(raw)
	if err != nil {
		c.balancers.UnexpectedIn(raw, err)
		return nil, nil, err
	}
	tlsInfo, ok := info.(credentials.TLSInfo)
	joining, ok2 := raw.(*joiningConn)
	if !ok || !ok2 {
		conn.Close()
		return nil, nil, errors.New("not a TLS connection of this listener")
	}
	if own, ok := conn.(*tls.Conn); ok && tlsInfo.State.NegotiatedProtocol == DataProtocol {
		if err := c.attach(own, joining); err != nil {
			conn.Close()
			return nil, nil, err
		}
		return nil, nil, credentials.ErrConnDispatched
	}
	t := &transport{TLSInfo: tlsInfo, conn: joining}
	count := func(streams, frames int) bool { return c.count(t, streams, frames) }
	return listen.NewMetered(conn, lastWords, count), t, nil
}

// Clone implements credentials.TransportCredentials.
func (c serverCreds) Clone() credentials.TransportCredentials {
	return serverCreds{c.TransportCredentials.Clone(), c.attach, c.count, c.balancers}
}

// giveWay pauses if t begins streams faster than their handlers start. Without the pause, all goroutines of the process
// would wait behind these handlers; and the Go scheduler seldom looks at the network while goroutines wait to run.
func (t *transport) giveWay() {
	if t.unserved.Load() > manyUnserved {
		time.Sleep(unservedPause)
	}
}

// waitForHandlers waits while more than most streams of t have no handler. It returns false if they get none, or if
// ended is closed meanwhile.
func (t *transport) waitForHandlers(most int64, ended <-chan struct{}) bool {
	if t.unserved.Load() > most {
		runtime.Gosched() // the handlers run
	}
	for range unservedPauses {
		if t.unserved.Load() <= most {
			return true
		}
		select {
		case <-time.After(unservedPause):
		case <-ended:
			return false
		}
	}
	return false
}

// transportOf returns the connection that a stream arrived on.
func transportOf(ctx context.Context) (*transport, error) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return nil, errors.New("stream without a peer")
	}
	t, ok := p.AuthInfo.(*transport)
	if !ok {
		return nil, errors.New("stream without TLS")
	}
	return t, nil
}

// joinListener bounds what strangers cost. It closes a connection that has no session after
// Limits.JoinTimeout, and one that is silent for listen.FirstByte. [listen.Strangers] bounds the
// number of such connections.
type joinListener struct {
	net.Listener
	onePort   *listen.Handover // the same listener if the one port has accepted its connections; else nil
	counters  *tunnel.Counters
	timeout   time.Duration     // Limits.JoinTimeout
	bytes     int               // how many bytes a connection may send before it has a session
	farTrip   time.Duration     // round trip from which a link is far
	control   *Congestion       // congestion control of the accepted connections
	strangers *listen.Strangers // counts the connections that have not joined
	refused   func(net.Addr)    // called with the source of a connection that its source has too many of
}

func (s *Server) newJoinListener(ln net.Listener) *joinListener {
	onePort, _ := ln.(*listen.Handover)
	return &joinListener{
		Listener:  ln,
		onePort:   onePort,
		counters:  s.cfg.Counters,
		timeout:   s.cfg.Limits.JoinTimeout,
		bytes:     s.cfg.Limits.joiningBytes(),
		farTrip:   s.cfg.farTrip,
		control:   s.cfg.Congestion,
		strangers: s.strangers,
		refused:   s.tooMany,
	}
}

// Accept implements net.Listener. It closes a connection for which there is no place. It never
// waits for a place, since the next connection may get one.
func (l *joinListener) Accept() (net.Conn, error) {
	for {
		raw, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		conn, isFar := carry(raw, l.farTrip, l.control)
		if p := l.admit(conn, l.bytes); p != nil {
			return &joiningConn{Conn: conn, far: isFar, onePort: l.onePort, probation: p}, nil
		}
		raw.Close()
	}
}

// admit takes a new connection on probation. It returns nil if there is no place. bytes is how many bytes the
// connection may send before it has a session.
func (l *joinListener) admit(c net.Conn, bytes int) *listen.Probation {
	p, full := l.strangers.Probation(c, listen.Terms{
		Time:    l.timeout,
		Bytes:   bytes,
		Late:    func() { l.counters.Limited(tunnel.LimitJoinTimeout) },
		Evicted: func() { l.counters.Limited(tunnel.LimitJoining) },
	})
	switch {
	case p != nil:
	case full.Source:
		l.refused(c.RemoteAddr())
	default:
		l.counters.Limited(tunnel.LimitJoining)
	}
	return p
}

// joiningConn is an accepted connection. gRPC reads and writes through it, before and after the join.
type joiningConn struct {
	net.Conn
	ours      atomic.Bool       // true: a data connection, which gRPC no longer serves
	far       far               // whether the link is far
	onePort   *listen.Handover  // the listener of the one port that accepted the connection; nil: a port of edges did
	probation *listen.Probation // limits the connection until it has a session
	below     bool              // true: Conn is a WebSocket, and probation reads from the connection below Conn
	// last closes the connection; nil: the connection stays, or has sent its last words. See closeSoon.
	last   atomic.Pointer[time.Timer]
	closed atomic.Bool
}

// Socket implements listen.Socketed.
func (c *joiningConn) Socket() *net.TCPConn {
	tcp, _ := listen.Socket(c.Conn)
	return tcp
}

// Read implements net.Conn.
func (c *joiningConn) Read(b []byte) (int, error) {
	if c.below {
		return c.Conn.Read(b)
	}
	return c.probation.Read(b)
}

// joined ends the probation, because the connection has a session. The deadline, the limit of bytes and
// the place among the strangers end, and the source becomes known.
func (c *joiningConn) joined() {
	c.probation.Met()
	c.onePort.Met(c.RemoteAddr())
}

// dispatched marks a connection that gRPC does not serve, and lifts its deadlines.
func (c *joiningConn) dispatched() {
	c.ours.Store(true)
	c.Conn.SetDeadline(time.Time{})
	c.joined()
}

// SetDeadline implements net.Conn. It does nothing for a dispatched connection, since gRPC calls
// SetDeadline once more after the dispatch.
func (c *joiningConn) SetDeadline(t time.Time) error {
	if c.ours.Load() {
		return nil
	}
	return c.Conn.SetDeadline(t)
}

// extend postpones the deadline of a connection that has sent its request and now waits for the cloud. The
// connection still counts as a stranger.
func (c *joiningConn) extend(d time.Duration) { c.probation.Extend(d) }

// Close implements net.Conn.
func (c *joiningConn) Close() error {
	c.closed.Store(true)
	if timer := c.last.Swap(nil); timer != nil {
		timer.Stop()
	}
	c.probation.Release()
	return c.Conn.Close()
}

// lastWords is how long a connection that is to be closed stays open, so that its last status reaches
// the edge.
const lastWords = time.Second

// closeSoon closes the connection when gRPC has had time to send a last status. A busy cloud may write this status
// late, so the time lastWords begins with the next write. If gRPC writes nothing, the connection is closed after
// joinTimeout.
func (c *joiningConn) closeSoon() {
	if !c.closed.Load() { // else the session has ended because the connection has
		c.last.Store(time.AfterFunc(joinTimeout, func() { c.Close() }))
	}
}

// Write implements net.Conn.
func (c *joiningConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	if c.last.Load() != nil {
		if timer := c.last.Swap(nil); timer != nil {
			timer.Reset(lastWords)
		}
	}
	return n, err
}
