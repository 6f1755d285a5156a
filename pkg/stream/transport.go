package stream

import (
	"context"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
)

// transport is one accepted connection of an edge. gRPC hands it to every stream
// that arrives on it (peer.Peer.AuthInfo), so a Connect finds the session whose own
// connection it came on, and no other.
type transport struct {
	credentials.TLSInfo
	conn    *joiningConn
	session atomic.Pointer[cloudSession] // set once, when the edge has joined
}

// serverCreds is TLS whose AuthInfo is a *transport.
type serverCreds struct {
	credentials.TransportCredentials
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
	return conn, &transport{TLSInfo: tlsInfo, conn: joining}, nil
}

// Clone implements credentials.TransportCredentials.
func (c serverCreds) Clone() credentials.TransportCredentials {
	return serverCreds{c.TransportCredentials.Clone()}
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
// session after joinTimeout is closed, and no more than maxJoining of them are open.
type joinListener struct {
	net.Listener
	slots chan struct{} // one token for each connection without a session

	closing chan struct{}
	once    sync.Once
}

func newJoinListener(ln net.Listener) *joinListener {
	return &joinListener{Listener: ln, slots: make(chan struct{}, maxJoining), closing: make(chan struct{})}
}

// Accept implements net.Listener. It waits while too many connections are joining.
func (l *joinListener) Accept() (net.Conn, error) {
	select {
	case l.slots <- struct{}{}:
	case <-l.closing:
		return nil, net.ErrClosed
	}
	raw, err := l.Listener.Accept()
	if err != nil {
		<-l.slots
		return nil, err
	}
	c := &joiningConn{Conn: raw, slots: l.slots}
	c.timer = time.AfterFunc(joinTimeout, func() { raw.Close() })
	return c, nil
}

// Close implements net.Listener.
func (l *joinListener) Close() error {
	l.once.Do(func() { close(l.closing) })
	return l.Listener.Close()
}

// joiningConn is an accepted connection.
type joiningConn struct {
	net.Conn
	timer *time.Timer
	slots chan struct{}
	once  sync.Once
}

// joined lifts the deadline: the connection has a session.
func (c *joiningConn) joined() {
	c.once.Do(func() {
		c.timer.Stop()
		<-c.slots
	})
}

// Close implements net.Conn.
func (c *joiningConn) Close() error {
	c.joined()
	return c.Conn.Close()
}

// closeSoon closes the connection after time enough for a last status to leave.
func (c *joiningConn) closeSoon() {
	time.AfterFunc(time.Second, func() { c.Close() })
}
