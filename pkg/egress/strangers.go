package egress

import (
	"net"

	"google.golang.org/grpc/credentials"

	"tunnel.example/tunnel/pkg/balancer"
	ports "tunnel.example/tunnel/pkg/listen"
)

// strangerCreds are TLS credentials for gRPC. A caller stops being a stranger when its TLS handshake
// is done, since the handshake verifies the caller's certificate.
type strangerCreds struct {
	credentials.TransportCredentials
	balancers *balancer.Balancers // logs an unexpected PROXY header
}

// ServerHandshake implements credentials.TransportCredentials.
func (c strangerCreds) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := c.TransportCredentials.ServerHandshake(raw)
	if err != nil {
		c.balancers.UnexpectedIn(raw, err)
	} else if s, ok := raw.(*ports.Conn); ok {
		s.Met()
	}
	return conn, info, err
}

// Clone implements credentials.TransportCredentials.
func (c strangerCreds) Clone() credentials.TransportCredentials {
	return strangerCreds{c.TransportCredentials.Clone(), c.balancers}
}
