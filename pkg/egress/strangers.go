package egress

import (
	"net"

	"google.golang.org/grpc/credentials"

	ports "tunnel.example/tunnel/pkg/listen"
)

// strangerCreds are TLS credentials for gRPC. A caller stops being a stranger when its TLS handshake
// is done, since the handshake verifies the caller's certificate.
type strangerCreds struct {
	credentials.TransportCredentials
}

// ServerHandshake implements credentials.TransportCredentials.
func (c strangerCreds) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := c.TransportCredentials.ServerHandshake(raw)
	if s, ok := raw.(*ports.Conn); ok && err == nil {
		s.Met()
	}
	return conn, info, err
}

// Clone implements credentials.TransportCredentials.
func (c strangerCreds) Clone() credentials.TransportCredentials {
	return strangerCreds{c.TransportCredentials.Clone()}
}
