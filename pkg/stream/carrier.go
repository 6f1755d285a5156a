package stream

import (
	"errors"
	"net"
	"sync"
	"syscall"
	"time"
)

// A session's conns share one TCP connection. How far it leads is known when it has been
// made, and before gRPC has it.

// farTrip is the round trip from which a link is far. One that is just near can have
// 100 MB/s a conn.
const farTrip = 10 * time.Millisecond

// far says whether a link is. gRPC wants to know windows before a connection begins.
type far bool

// linkSizes are what hangs on that, in bytes.
type linkSizes struct {
	// streamWindow is what a conn may have in flight, and so about what a stalled reader
	// costs.
	streamWindow int32
	// sessionWindow bounds all conns together. grpc-go gives it back on receipt, so a
	// stalled reader takes none of it.
	sessionWindow int32
	// unsent is what the kernel takes that it can't send yet. By itself it would take
	// megabytes, and a keystroke would wait behind all of them; what waits with gRPC
	// instead takes turns, conn by conn.
	unsent int
	// writeBuffer is what grpc-go gathers before a write. It holds the buffer while there
	// is something to write.
	writeBuffer int
}

// sizes of a far link give a conn 40 MB/s over 100 ms, which is what Linux' own limits let
// one TCP connection have (tcp_rmem and tcp_wmem in tcp(7)).
func (f far) sizes() linkSizes {
	if f {
		return linkSizes{streamWindow: 4 << 20, sessionWindow: 32 << 20, unsent: 8 << 10, writeBuffer: 4 << 10}
	}
	return linkSizes{streamWindow: 1 << 20, sessionWindow: 16 << 20, unsent: 128 << 10, writeBuffer: 32 << 10}
}

// carrier is a TCP connection that carries a session.
type carrier struct {
	*net.TCPConn
	raw  syscall.RawConn
	trip time.Duration // from where it is far
	far  far           // owned by Write, once it is in use

	// Owned by Write, which TLS calls one at a time.
	asked  time.Time
	isThin bool
}

// carry readies a new TCP connection to carry a session; one of another kind is left as it
// is. trip is from where it is far, by the round trip of TCP's own handshake.
func carry(c net.Conn, trip time.Duration) (net.Conn, far) {
	tcp, ok := c.(*net.TCPConn)
	if !ok {
		return c, false
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return c, false
	}
	all := &carrier{TCPConn: tcp, raw: raw, trip: trip}
	raw.Control(func(fd uintptr) { //nolint:errcheck // then c is closed, and gRPC will see that
		if path, ok := pathOf(fd); ok {
			all.far = far(path.trip >= trip)
		}
		all.boundUnsent(fd)
	})
	return all, all.far
}

// alone readies the connection to carry nothing but one conn at a time, which waits for no
// other. It comes before its first conn.
func (c *carrier) alone() {
	c.far = false
	c.raw.Control(c.boundUnsent) //nolint:errcheck // it fails when c is closed
}

// boundUnsent tells the kernel how much it may take.
func (c *carrier) boundUnsent(fd uintptr) { boundUnsent(fd, c.far.sizes().unsent) }

// Write implements net.Conn. The kernel fills its last packet, of up to 64 KiB, whatever it
// has been told to hold: over a thin link that is half a second. So a thin one gets nothing
// while it has enough.
func (c *carrier) Write(b []byte) (int, error) {
	if bool(c.far) && c.thin() {
		// poll(2) also has the kernel tell when there is room again, as a write in vain would.
		if err := c.raw.Write(hasRoom); err != nil {
			return 0, err
		}
	}
	return c.TCPConn.Write(b)
}

const (
	// thinRate is below what a link is thin, in bytes a second.
	thinRate = 2 << 20
	// rateInterval is how often its rate is asked for.
	rateInterval = 100 * time.Millisecond
)

// thin reports whether the link carries little, or is asked to.
func (c *carrier) thin() bool {
	if now := time.Now(); now.Sub(c.asked) >= rateInterval {
		c.asked = now
		c.raw.Control(func(fd uintptr) { //nolint:errcheck // then c is closed, and Write says so
			path, ok := pathOf(fd)
			if ok && path.leastTrip < c.trip {
				// A busy machine has made the handshake slow.
				c.far, c.isThin = false, false
				c.boundUnsent(fd)
				return
			}
			c.isThin = ok && path.rate > 0 && path.rate < thinRate
		})
	}
	return c.isThin
}

// setUserTimeout ends a connection whose peer has not acknowledged something for so long,
// where the kernel can do that.
func setUserTimeout(c *net.TCPConn, d time.Duration) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	cerr := raw.Control(func(fd uintptr) { err = userTimeout(fd, d) })
	return errors.Join(err, cerr)
}

// nearListener is a joinListener without the connections from far.
type nearListener struct {
	*joinListener
	far *farListener
}

// Accept implements net.Listener.
func (l nearListener) Accept() (net.Conn, error) {
	for {
		c, err := l.joinListener.Accept()
		if err != nil || !bool(c.(*joiningConn).far) {
			return c, err
		}
		select {
		case l.far.conns <- c:
		case <-l.far.closed:
			c.Close()
		}
	}
}

// farListener has those.
type farListener struct {
	addr   net.Addr
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func newFarListener(addr net.Addr) *farListener {
	return &farListener{addr: addr, conns: make(chan net.Conn), closed: make(chan struct{})}
}

// Accept implements net.Listener.
func (l *farListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

// Addr implements net.Listener.
func (l *farListener) Addr() net.Addr { return l.addr }

// Close implements net.Listener.
func (l *farListener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}
