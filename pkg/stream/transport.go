package stream

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"

	"tunnel/pkg/auth"
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
	return conn, &transport{TLSInfo: tlsInfo, conn: joining}, nil
}

// Clone implements credentials.TransportCredentials.
func (c serverCreds) Clone() credentials.TransportCredentials {
	return serverCreds{c.TransportCredentials.Clone(), c.attach}
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
// session after Limits.JoinTimeout is closed, no more than Limits.Joining of them are
// open, and no more than Limits.JoiningPerAddress of one source.
type joinListener struct {
	net.Listener
	counters *tunnel.Counters
	timeout  time.Duration
	farTrip  time.Duration
	slots    chan struct{}  // one token for each connection without a session
	groups   *auth.Groups   // the same, by source
	refused  func(net.Addr) // told of a connection that was one too many for its source

	closing chan struct{}
	once    sync.Once
}

func newJoinListener(ln net.Listener, l Limits, trip time.Duration, counters *tunnel.Counters, refused func(net.Addr)) *joinListener {
	return &joinListener{
		Listener: ln,
		counters: counters,
		timeout:  l.JoinTimeout,
		farTrip:  trip,
		slots:    make(chan struct{}, l.Joining),
		groups:   auth.NewGroups(l.JoiningPerAddress),
		refused:  refused,
		closing:  make(chan struct{}),
	}
}

// Accept implements net.Listener. It waits while too many connections are joining,
// which takes several sources; what is too many of one is closed at once.
func (l *joinListener) Accept() (net.Conn, error) {
	select {
	case l.slots <- struct{}{}:
	default:
		l.counters.Limited(tunnel.LimitJoining)
		select {
		case l.slots <- struct{}{}:
		case <-l.closing:
			return nil, net.ErrClosed
		}
	}
	for {
		raw, err := l.Listener.Accept()
		if err != nil {
			<-l.slots
			return nil, err
		}
		release, ok := l.groups.Admit(auth.GroupOf(raw.RemoteAddr()))
		if !ok {
			raw.Close()
			l.refused(raw.RemoteAddr())
			continue
		}
		conn, isFar := carry(raw, l.farTrip)
		c := &joiningConn{Conn: conn, far: isFar, release: func() {
			release()
			<-l.slots
		}}
		c.timer = time.AfterFunc(l.timeout, func() {
			l.counters.Limited(tunnel.LimitJoinTimeout)
			raw.Close()
		})
		return c, nil
	}
}

// Close implements net.Listener.
func (l *joinListener) Close() error {
	l.once.Do(func() { close(l.closing) })
	return l.Listener.Close()
}

// joiningConn is an accepted connection.
type joiningConn struct {
	net.Conn
	ours    atomic.Bool // gRPC has nothing to do with it any more
	far     far
	timer   *time.Timer
	release func() // gives back its place among those that join
	once    sync.Once
}

// joined lifts the deadline: the connection has a session.
func (c *joiningConn) joined() {
	c.once.Do(func() {
		c.timer.Stop()
		c.release()
	})
}

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
func (c *joiningConn) extend(d time.Duration) { c.timer.Reset(d) }

// Close implements net.Conn.
func (c *joiningConn) Close() error {
	c.joined()
	return c.Conn.Close()
}

// closeSoon closes the connection after time enough for a last status to leave.
func (c *joiningConn) closeSoon() {
	time.AfterFunc(time.Second, func() { c.Close() })
}
