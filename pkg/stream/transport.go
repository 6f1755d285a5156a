package stream

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"

	"tunnel/pkg/listen"
	"tunnel/pkg/tunnel"
)

// transport is one accepted connection of an edge. gRPC hands it to every stream
// that arrives on it (peer.Peer.AuthInfo), so a Connect finds the session whose own
// connection it came on, and no other.
type transport struct {
	credentials.TLSInfo
	conn    *joiningConn
	joining atomic.Bool                  // it has had a control stream, or a first certificate: there is one at most
	session atomic.Pointer[cloudSession] // set once, when the edge has joined
	refused atomic.Bool                  // a stream was refused: no other is served
}

// refuse makes the stream that is being refused the last one that is served on the
// connection, and closes it when a status has had time to leave. first says that none was
// refused before.
func (t *transport) refuse() (first bool) {
	if t.refused.Swap(true) {
		return false
	}
	t.conn.closeSoon()
	return true
}

// serverCreds is TLS whose AuthInfo is a *transport. A connection that is to be a data
// connection is attached to its session, and gRPC does not see it.
type serverCreds struct {
	credentials.TransportCredentials
	attach func(*tls.Conn, *joiningConn) error
	frames func(t *transport, frames int) bool // has counted frames that carry nothing; true: they are too many
}

// ServerHandshake implements credentials.TransportCredentials.
func (c serverCreds) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := c.TransportCredentials.ServerHandshake(raw)
	if err != nil {
		return nil, nil, err
	}
	tlsInfo, ok := info.(credentials.TLSInfo)
	joining, ok2 := raw.(*joiningConn)
	if !ok || !ok2 {
		conn.Close()
		return nil, nil, errors.New("not a TLS connection of this listener")
	}
	if own, ok := conn.(*tls.Conn); ok && tlsInfo.State.NegotiatedProtocol == dataProtocol {
		if err := c.attach(own, joining); err != nil {
			conn.Close()
			return nil, nil, err
		}
		return nil, nil, credentials.ErrConnDispatched
	}
	t := &transport{TLSInfo: tlsInfo, conn: joining}
	return newMeteredConn(conn, func(frames int) bool { return c.frames(t, frames) }), t, nil
}

// Clone implements credentials.TransportCredentials.
func (c serverCreds) Clone() credentials.TransportCredentials {
	return serverCreds{c.TransportCredentials.Clone(), c.attach, c.frames}
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

// joinListener bounds what strangers cost: a connection that has not become a
// session after Limits.JoinTimeout is closed, or is silent for listen.FirstByte, and
// [listen.Strangers] bounds how many there are.
type joinListener struct {
	net.Listener
	counters  *tunnel.Counters
	timeout   time.Duration
	bytes     int // that one may send before it has a session
	farTrip   time.Duration
	strangers *listen.Strangers
	refused   func(net.Addr) // told of a connection that was one too many for its source
}

func newJoinListener(ln net.Listener, l Limits, trip time.Duration, counters *tunnel.Counters, refused func(net.Addr)) *joinListener {
	return &joinListener{
		Listener:  ln,
		counters:  counters,
		timeout:   l.JoinTimeout,
		bytes:     l.joiningBytes(),
		farTrip:   trip,
		strangers: listen.NewStrangers(l.Joining, l.JoiningPerAddress),
		refused:   refused,
	}
}

// Accept implements net.Listener. It closes a connection for which there is no place, and never
// waits for one: the next connection may have a place.
func (l *joinListener) Accept() (net.Conn, error) {
	for {
		raw, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		conn, isFar := carry(raw, l.farTrip)
		if p := l.admit(conn); p != nil {
			return &joiningConn{Conn: conn, far: isFar, probation: p}, nil
		}
		raw.Close()
	}
}

// admit takes a new connection on probation, or returns nil if there is no place.
func (l *joinListener) admit(c net.Conn) *listen.Probation {
	p, full := l.strangers.Probation(c, listen.Terms{
		Time:    l.timeout,
		Bytes:   l.bytes,
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

// joiningConn is an accepted connection.
type joiningConn struct {
	net.Conn
	ours      atomic.Bool // gRPC has nothing to do with it any more
	far       far
	probation *listen.Probation // until it has a session
}

// Read implements net.Conn.
func (c *joiningConn) Read(b []byte) (int, error) { return c.probation.Read(b) }

// joined lifts the deadline: the connection has a session.
func (c *joiningConn) joined() { c.probation.Met() }

// dispatched says that gRPC does not serve the connection.
func (c *joiningConn) dispatched() {
	c.ours.Store(true)
	c.Conn.SetDeadline(time.Time{}) //nolint:errcheck // it fails when c is closed
	c.joined()
}

// SetDeadline implements net.Conn. gRPC calls it once more after a connection has been
// dispatched.
func (c *joiningConn) SetDeadline(t time.Time) error {
	if c.ours.Load() {
		return nil
	}
	return c.Conn.SetDeadline(t)
}

// extend puts the deadline off for a connection that has done its part and now waits for
// us. It keeps its place among those that join.
func (c *joiningConn) extend(d time.Duration) { c.probation.Extend(d) }

// Close implements net.Conn.
func (c *joiningConn) Close() error {
	c.probation.Release()
	return c.Conn.Close()
}

// lastWords is how long a status has to leave.
const lastWords = time.Second

// closeSoon closes the connection after time enough for a last status to leave.
func (c *joiningConn) closeSoon() {
	time.AfterFunc(lastWords, func() { c.Close() })
}
