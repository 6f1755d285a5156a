package egress

import (
	"cmp"
	"errors"
	"net"
	"sync"
	"sync/atomic"
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
)

// strangerListener counts the strangers among what it accepts.
type strangerListener struct {
	net.Listener
	strangers       *ports.Strangers
	counters        *tunnel.Counters
	all, perAddress tunnel.Limit  // as they are counted
	late            tunnel.Limit  // how a connection is counted that has been silent, or a stranger, too long
	timeout         time.Duration // how long one may stay one; 0: it ends in another way
}

func newStrangerListener(ln net.Listener, most, perAddress int, counters *tunnel.Counters) *strangerListener {
	return &strangerListener{
		Listener: ln, counters: counters,
		all: tunnel.LimitStrangers, perAddress: tunnel.LimitStrangersPerAddress, late: tunnel.LimitHandshakeTimeout,
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
		place, full := l.strangers.Admit(ports.AddrOf(raw.RemoteAddr()), func() { l.reset(raw, l.all) })
		switch {
		case place != nil:
		case full.Source:
			l.reset(raw, l.perAddress)
			continue
		default:
			l.reset(raw, l.all)
			continue
		}
		s := &stranger{TCPConn: tcp, place: place, until: time.Now().Add(l.timeout), bounded: l.timeout > 0}
		first := ports.FirstByte
		if s.bounded {
			first = min(first, l.timeout)
		}
		s.late = time.AfterFunc(first, func() {
			s.forget.Do(func() {
				l.counters.Limited(l.late)
				place.Release()
			})
			raw.Close()
		})
		return s, nil
	}
}

func (l *strangerListener) reset(raw net.Conn, limit tunnel.Limit) {
	l.counters.Limited(limit)
	tunnel.Reset(raw)
}

// stranger is an accepted connection.
type stranger struct {
	*net.TCPConn
	// Set once.
	place   *ports.Stranger
	late    *time.Timer // closes it
	until   time.Time   // when late does so, once it has spoken
	bounded bool        // until counts

	spoken atomic.Bool // the other side has sent something
	forget sync.Once
}

// Read implements net.Conn. It notes the first byte.
func (s *stranger) Read(b []byte) (int, error) {
	n, err := s.TCPConn.Read(b)
	if n > 0 && !s.spoken.Load() && !s.spoken.Swap(true) {
		s.place.Spoke()
		if s.late.Stop() && s.bounded {
			s.late.Reset(time.Until(s.until))
		}
	}
	return n, err
}

// met is called when the other side has proven who it is.
func (s *stranger) met() { s.settle(s.place.Met) }

func (s *stranger) settle(how func()) {
	s.forget.Do(func() {
		s.late.Stop()
		how()
	})
}

// Close implements net.Conn.
func (s *stranger) Close() error {
	s.settle(s.place.Release)
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
