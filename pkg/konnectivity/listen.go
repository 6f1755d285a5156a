package konnectivity

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"

	"tunnel.example/tunnel/pkg/balancer"
	ports "tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/tunnel"
)

// agentTransport is a connection at the agents' port. gRPC passes it to every stream on that
// connection, so that a stream finds its own connection.
type agentTransport struct {
	credentials.TLSInfo
	conn      *ports.Conn
	attempted atomic.Bool // a stream has tried to join; there is one attempt per connection
}

// agentCreds are TLS credentials whose AuthInfo is an *agentTransport. After the handshake the
// connection still counts as a stranger, until an agent has joined on it.
type agentCreds struct {
	credentials.TransportCredentials
	balancers *balancer.Balancers // logs an unexpected PROXY header
	// flooded is called when a connection has begun too many streams, or sent too many frames without data.
	flooded func(remote string, limit tunnel.Limit)
}

// A connection may begin ownStreams streams in its whole life: gRPC may keep an answer of its own for each. An agent
// needs one. It may send ownFrames HTTP/2 frames without data a second, in bursts of two seconds: unlike an edge, an
// agent measures the link by two frames for each round trip while it receives data (grpc-go's estimator).
const ownStreams, ownFrames = 8, 64_000

// ServerHandshake implements credentials.TransportCredentials.
func (c agentCreds) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := c.TransportCredentials.ServerHandshake(raw)
	if err != nil {
		c.balancers.UnexpectedIn(raw, err)
		return nil, nil, err
	}
	tlsInfo, ok := info.(credentials.TLSInfo)
	accepted, ok2 := raw.(*ports.Conn)
	if !ok || !ok2 {
		conn.Close()
		return nil, nil, errors.New("not a TLS connection of this listener")
	}
	t := &agentTransport{TLSInfo: tlsInfo, conn: accepted}
	streams, frames := 0, rate.NewLimiter(ownFrames, 2*ownFrames)
	return ports.NewMetered(conn, 0, func(newStreams, newFrames int) bool {
		limit := tunnel.LimitStreams
		streams += newStreams
		switch {
		case streams > ownStreams:
		case !frames.AllowN(time.Now(), newFrames):
			limit = tunnel.LimitFrames
		default:
			return false
		}
		c.flooded(accepted.RemoteAddr().String(), limit)
		return true
	}), t, nil
}

// Clone implements credentials.TransportCredentials.
func (c agentCreds) Clone() credentials.TransportCredentials {
	return agentCreds{c.TransportCredentials.Clone(), c.balancers, c.flooded}
}

// agentTransportOf returns the connection of a stream, from the stream's context.
func agentTransportOf(ctx context.Context) (*agentTransport, error) {
	if p, ok := peer.FromContext(ctx); ok {
		if t, ok := p.AuthInfo.(*agentTransport); ok {
			return t, nil
		}
	}
	return nil, errors.New("a stream without TLS")
}

// closeSoon closes the connection after a second, in which gRPC can send the final status. If the
// peer does not read, the status may not have left by then.
func (t *agentTransport) closeSoon() {
	time.AfterFunc(time.Second, func() { t.conn.Close() }) // nothing uses the connection any more
}
