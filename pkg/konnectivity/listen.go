package konnectivity

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"

	ports "tunnel/pkg/listen"
)

// agentTransport is a connection at the agents' port. gRPC hands it to every stream that
// arrives on it, so a stream finds its own, and no other.
type agentTransport struct {
	credentials.TLSInfo
	conn  *ports.Conn
	tried atomic.Bool // somebody has tried to join
}

// agentCreds are TLS whose AuthInfo is an *agentTransport. Whoever has shaken hands is a
// stranger until it has joined.
type agentCreds struct {
	credentials.TransportCredentials
}

// ServerHandshake implements credentials.TransportCredentials.
func (c agentCreds) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := c.TransportCredentials.ServerHandshake(raw)
	if err != nil {
		return nil, nil, err
	}
	tlsInfo, ok := info.(credentials.TLSInfo)
	s, ok2 := raw.(*ports.Conn)
	if !ok || !ok2 {
		conn.Close()
		return nil, nil, errors.New("not a TLS connection of this listener")
	}
	return conn, &agentTransport{TLSInfo: tlsInfo, conn: s}, nil
}

// Clone implements credentials.TransportCredentials.
func (c agentCreds) Clone() credentials.TransportCredentials {
	return agentCreds{c.TransportCredentials.Clone()}
}

// agentTransportOf returns the connection that a stream arrived on.
func agentTransportOf(ctx context.Context) (*agentTransport, error) {
	if p, ok := peer.FromContext(ctx); ok {
		if t, ok := p.AuthInfo.(*agentTransport); ok {
			return t, nil
		}
	}
	return nil, errors.New("a stream without TLS")
}

// closeSoon closes the connection when a status has had time to leave. It may be stuck
// behind what the other side does not read.
func (t *agentTransport) closeSoon() {
	time.AfterFunc(time.Second, func() { t.conn.Close() }) //nolint:errcheck // it is being thrown away
}
