package egress

import (
	"cmp"
	"errors"
	"net"
	"time"

	"google.golang.org/grpc/credentials"

	ports "tunnel/pkg/listen"
	"tunnel/pkg/tunnel"
)

// Callers over TLS are strangers until their handshake is done, agents until they have
// joined. A connection for which there is no place is reset at once: nothing waits.
const (
	// DefaultStrangers is how many there may be at a listener.
	DefaultStrangers = 1024
	// DefaultStrangersPerAddress is how many of them may come from one source.
	DefaultStrangersPerAddress = 256
	// strangerBytes is how much one may send: a handshake with certificates, and the header
	// of an agent's stream.
	strangerBytes = 32<<10 + 2*proxyHeaders
)

// strangerListener counts the strangers among what it accepts.
type strangerListener struct {
	net.Listener
	strangers       *ports.Strangers
	counters        *tunnel.Counters
	all, perAddress tunnel.Limit  // as they are counted
	late            tunnel.Limit  // as one is counted that stays one for too long
	timeout         time.Duration // how long one may stay one
}

func newStrangerListener(ln net.Listener, most, perAddress int, counters *tunnel.Counters) *strangerListener {
	return &strangerListener{
		Listener: ln, counters: counters,
		all: tunnel.LimitStrangers, perAddress: tunnel.LimitStrangersPerAddress, late: tunnel.LimitHandshakeTimeout, timeout: requestTimeout,
		strangers: ports.NewStrangers(cmp.Or(most, DefaultStrangers), cmp.Or(perAddress, DefaultStrangersPerAddress)),
	}
}

// Accept implements net.Listener.
func (l *strangerListener) Accept() (net.Conn, error) {
	for {
		raw, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		tcp, ok := raw.(*net.TCPConn)
		if !ok {
			raw.Close()
			return nil, errors.New("not a TCP connection")
		}
		p, full := l.strangers.Probation(tcp, ports.Terms{
			Time: l.timeout, Bytes: strangerBytes,
			Late: func() { l.counters.Limited(l.late) },
			Evicted: func() {
				l.counters.Limited(l.all)
				tunnel.Reset(tcp)
			},
		})
		switch {
		case p != nil:
			return &stranger{TCPConn: tcp, probation: p}, nil
		case full.Source:
			l.reset(raw, l.perAddress)
		default:
			l.reset(raw, l.all)
		}
	}
}

func (l *strangerListener) reset(raw net.Conn, limit tunnel.Limit) {
	l.counters.Limited(limit)
	tunnel.Reset(raw)
}

// stranger is an accepted connection.
type stranger struct {
	*net.TCPConn
	probation *ports.Probation // until the other side has proven who it is
}

// Read implements net.Conn.
func (s *stranger) Read(b []byte) (int, error) { return s.probation.Read(b) }

// met is called when the other side has proven who it is.
func (s *stranger) met() { s.probation.Met() }

// Close implements net.Conn.
func (s *stranger) Close() error {
	s.probation.Release()
	return s.TCPConn.Close()
}

// strangerCreds are TLS for gRPC: who has shaken hands is no stranger.
type strangerCreds struct {
	credentials.TransportCredentials
}

// ServerHandshake implements credentials.TransportCredentials.
func (c strangerCreds) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := c.TransportCredentials.ServerHandshake(raw)
	if s, ok := raw.(*stranger); ok && err == nil {
		s.met()
	}
	return conn, info, err
}

// Clone implements credentials.TransportCredentials.
func (c strangerCreds) Clone() credentials.TransportCredentials {
	return strangerCreds{c.TransportCredentials.Clone()}
}
