package egress

import (
	"cmp"
	"errors"
	"net"
	"sync"

	"google.golang.org/grpc/credentials"

	"tunnel/pkg/auth"
	"tunnel/pkg/tunnel"
)

// Callers over TLS are strangers until their handshake is done. One that is one too many is
// reset at once: nothing waits for a place.
const (
	// DefaultStrangers is how many there may be at a listener.
	DefaultStrangers = 1024
	// DefaultStrangersPerAddress is how many of them may come from one source (auth.Group).
	DefaultStrangersPerAddress = 256
)

// strangerListener counts the strangers among what it accepts.
type strangerListener struct {
	net.Listener
	places   chan struct{} // one token for each
	groups   *auth.Groups
	counters *tunnel.Counters
}

func newStrangerListener(ln net.Listener, cfg Config) *strangerListener {
	return &strangerListener{
		Listener: ln,
		places:   make(chan struct{}, cmp.Or(cfg.Strangers, DefaultStrangers)),
		groups:   auth.NewGroups(cmp.Or(cfg.StrangersPerAddress, DefaultStrangersPerAddress)),
		counters: cfg.Counters,
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
		release, ok := l.groups.Admit(auth.GroupOf(raw.RemoteAddr()))
		if !ok {
			l.reset(raw, tunnel.LimitStrangersPerAddress)
			continue
		}
		select {
		case l.places <- struct{}{}:
			return &stranger{TCPConn: tcp, known: func() {
				release()
				<-l.places
			}}, nil
		default:
			release()
			l.reset(raw, tunnel.LimitStrangers)
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
	forget sync.Once
	known  func() // gives back its place
}

// met is called when it is none any more.
func (s *stranger) met() { s.forget.Do(s.known) }

// Close implements net.Conn.
func (s *stranger) Close() error {
	s.met()
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
