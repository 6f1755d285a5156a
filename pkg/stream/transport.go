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
// session after Limits.JoinTimeout is closed, or is silent for listen.FirstByte, and
// [listen.Strangers] bounds how many there are.
type joinListener struct {
	net.Listener
	counters  *tunnel.Counters
	timeout   time.Duration
	farTrip   time.Duration
	strangers *listen.Strangers
	refused   func(net.Addr) // told of a connection that was one too many for its source

	closing chan struct{}
	once    sync.Once
}

func newJoinListener(ln net.Listener, l Limits, trip time.Duration, counters *tunnel.Counters, refused func(net.Addr)) *joinListener {
	return &joinListener{
		Listener:  ln,
		counters:  counters,
		timeout:   l.JoinTimeout,
		farTrip:   trip,
		strangers: listen.NewStrangers(l.Joining, l.JoiningPerAddress),
		refused:   refused,
		closing:   make(chan struct{}),
	}
}

// Accept implements net.Listener. It waits while every place is held by another source;
// connections of a source that holds too many are closed at once.
func (l *joinListener) Accept() (net.Conn, error) {
	for {
		raw, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		conn, isFar := carry(raw, l.farTrip)
		c := &joiningConn{Conn: conn, far: isFar, accepted: time.Now(), timeout: l.timeout}
		if c.place, err = l.admit(raw); err != nil {
			raw.Close()
			return nil, err
		}
		if c.place == nil {
			raw.Close()
			continue
		}
		c.timer = time.AfterFunc(min(l.timeout, listen.FirstByte), func() {
			c.once.Do(func() {
				l.counters.Limited(tunnel.LimitJoinTimeout)
				c.place.Release()
			})
			raw.Close()
		})
		return c, nil
	}
}

// admit returns the place of a new connection, nil if it has none, or an error when the
// listener is being closed.
func (l *joinListener) admit(raw net.Conn) (*listen.Stranger, error) {
	for waited := false; ; waited = true {
		place, full := l.strangers.Admit(listen.AddrOf(raw.RemoteAddr()), func() {
			l.counters.Limited(tunnel.LimitJoining)
			raw.Close()
		})
		switch {
		case place != nil:
			return place, nil
		case full.Source:
			l.refused(raw.RemoteAddr())
			return nil, nil
		case !waited:
			l.counters.Limited(tunnel.LimitJoining)
		}
		if !full.Wait {
			return nil, nil
		}
		select {
		case <-l.strangers.Freed():
		case <-time.After(retryAdmit):
		case <-l.closing:
			return nil, net.ErrClosed
		}
	}
}

// retryAdmit is how often a connection that waits for a place looks for one that is silent.
const retryAdmit = 100 * time.Millisecond

// Close implements net.Listener.
func (l *joinListener) Close() error {
	l.once.Do(func() { close(l.closing) })
	return l.Listener.Close()
}

// joiningConn is an accepted connection.
type joiningConn struct {
	net.Conn
	ours     atomic.Bool // gRPC has nothing to do with it any more
	far      far
	accepted time.Time
	timeout  time.Duration // from then until there is a session
	place    *listen.Stranger
	spoken   atomic.Bool // the other side has sent something
	timer    *time.Timer
	once     sync.Once
}

// Read implements net.Conn. The first byte gives the other side the time to join.
func (c *joiningConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 && !c.spoken.Load() && !c.spoken.Swap(true) {
		c.place.Spoke()
		if c.timer.Stop() {
			c.timer.Reset(c.timeout - time.Since(c.accepted))
		}
	}
	return n, err
}

// joined lifts the deadline: the connection has a session.
func (c *joiningConn) joined() { c.settle(c.place.Met) }

func (c *joiningConn) settle(how func()) {
	c.once.Do(func() {
		c.timer.Stop()
		how()
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
	c.settle(c.place.Release)
	return c.Conn.Close()
}

// closeSoon closes the connection after time enough for a last status to leave.
func (c *joiningConn) closeSoon() {
	time.AfterFunc(time.Second, func() { c.Close() })
}
