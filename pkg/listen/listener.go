package listen

import (
	"cmp"
	"errors"
	"net"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

const (
	// DefaultMax is how many strangers a [Listener] has by default.
	DefaultMax = 1024
	// DefaultMaxPerSource is how many strangers of one source a [Listener] has by default.
	DefaultMaxPerSource = 256
)

// ListenerConfig bounds the strangers among the connections that a [Listener] accepts.
type ListenerConfig struct {
	Max, MaxPerSource int           // strangers, in all and of one source; 0: the default
	Timeout           time.Duration // how long a connection may stay a stranger
	Bytes             int           // how many bytes a stranger may send

	// Counters counts each rejected or expired connection under the limit that the connection has reached.
	Counters                           *tunnel.Counters
	OverMax, OverMaxPerSource, TooLate tunnel.Limit
}

// Listener accepts TCP connections. The peer of each connection is a stranger until it has proven who it is. If there
// is no place for another stranger, the Listener resets the connection at once: no connection waits for a place.
type Listener struct {
	net.Listener
	cfg       ListenerConfig
	strangers *Strangers
}

// NewListener returns a Listener that accepts from ln.
func NewListener(ln net.Listener, cfg ListenerConfig) *Listener {
	return &Listener{
		Listener: ln, cfg: cfg,
		strangers: NewStrangers(cmp.Or(cfg.Max, DefaultMax), cmp.Or(cfg.MaxPerSource, DefaultMaxPerSource)),
	}
}

// EvictAll closes the connections of all strangers.
func (l *Listener) EvictAll() { l.strangers.EvictAll() }

// Accept implements net.Listener. The connection is a [*Conn].
func (l *Listener) Accept() (net.Conn, error) {
	for {
		raw, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		tcp, ok := Socket(raw)
		if !ok {
			raw.Close()
			return nil, errors.New("not a TCP connection")
		}
		p, full := l.strangers.Probation(raw, Terms{
			Time: l.cfg.Timeout, Bytes: l.cfg.Bytes,
			Late:    func() { l.cfg.Counters.Limited(l.cfg.TooLate) },
			Evicted: func() { l.reset(tcp, l.cfg.OverMax) },
		})
		switch {
		case p != nil:
			return &Conn{TCPConn: tcp, caller: raw.RemoteAddr(), probation: p}, nil
		case full.Source:
			l.reset(raw, l.cfg.OverMaxPerSource)
		default:
			l.reset(raw, l.cfg.OverMax)
		}
	}
}

// Socketed is a connection that wraps a TCP connection, for instance to return bytes again that were read before.
type Socketed interface {
	// Socket returns the TCP connection, for its options and addresses; nil: there is none. Only the
	// wrapper reads and writes it.
	Socket() *net.TCPConn
}

// Socket returns the TCP connection that c is, or that it wraps.
func Socket(c net.Conn) (*net.TCPConn, bool) {
	if w, ok := c.(Socketed); ok {
		tcp := w.Socket()
		return tcp, tcp != nil
	}
	tcp, ok := c.(*net.TCPConn)
	return tcp, ok
}

func (l *Listener) reset(c net.Conn, limit tunnel.Limit) {
	l.cfg.Counters.Limited(limit)
	tunnel.Reset(c)
}

// Conn is a connection that a [Listener] has accepted.
type Conn struct {
	*net.TCPConn

	// Set once.
	caller    net.Addr   // the address of the peer; behind a balancer, the address of the balancer's caller
	probation *Probation // limits the peer until Met, when it has proven who it is
}

// RemoteAddr implements net.Conn. Behind a balancer it returns the address of the balancer's caller, if
// the balancer tells it.
func (c *Conn) RemoteAddr() net.Addr { return c.caller }

// Socket implements Socketed.
func (c *Conn) Socket() *net.TCPConn { return c.TCPConn }

// Read implements net.Conn.
func (c *Conn) Read(b []byte) (int, error) { return c.probation.Read(b) }

// Met tells the listener that the peer has proven who it is. From then on the limits for strangers do
// not apply to the connection.
func (c *Conn) Met() { c.probation.Met() }

// Extend gives a stranger the time d from now.
func (c *Conn) Extend(d time.Duration) { c.probation.Extend(d) }

// Close implements net.Conn.
func (c *Conn) Close() error {
	c.probation.Release()
	return c.TCPConn.Close()
}
