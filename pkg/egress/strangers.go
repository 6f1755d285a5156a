package egress

import (
	"cmp"
	"errors"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc/credentials"

	"tunnel/pkg/auth"
	"tunnel/pkg/tunnel"
)

// Callers over TLS are strangers until their handshake is done, agents until they have
// joined. One that is one too many is reset at once: nothing waits for a place.
const (
	// DefaultStrangers is how many there may be at a listener.
	DefaultStrangers = 1024
	// DefaultStrangersPerAddress is how many of them may come from one source (auth.Group).
	DefaultStrangersPerAddress = 256
)

// strangerListener counts the strangers among what it accepts.
type strangerListener struct {
	net.Listener
	places          chan struct{} // one token for each
	groups          *auth.Groups
	counters        *tunnel.Counters
	all, perAddress tunnel.Limit  // as they are counted
	timeout         time.Duration // how long one may stay one; 0: it ends in another way
}

func newStrangerListener(ln net.Listener, most, perAddress int, counters *tunnel.Counters) *strangerListener {
	return &strangerListener{
		Listener: ln, counters: counters, all: tunnel.LimitStrangers, perAddress: tunnel.LimitStrangersPerAddress,
		places: make(chan struct{}, cmp.Or(most, DefaultStrangers)),
		groups: auth.NewGroups(cmp.Or(perAddress, DefaultStrangersPerAddress)),
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
			l.reset(raw, l.perAddress)
			continue
		}
		select {
		case l.places <- struct{}{}:
			s := &stranger{TCPConn: tcp, known: func() {
				release()
				<-l.places
			}}
			if l.timeout > 0 {
				s.late = time.AfterFunc(l.timeout, func() {
					l.counters.Limited(tunnel.LimitJoinTimeout)
					raw.Close()
				})
			}
			return s, nil
		default:
			release()
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
	forget sync.Once
	known  func()      // gives back its place
	late   *time.Timer // closes it; nil: nothing does
}

// met is called when it is none any more.
func (s *stranger) met() {
	s.forget.Do(func() {
		if s.late != nil {
			s.late.Stop()
		}
		s.known()
	})
}

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
