package stream

import (
	"net"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A session's conns share one TCP connection. How far it leads is known when it has been
// made, and before gRPC has it.

// farTrip is the round trip from which a link is far. One that is just near can have
// 100 MB/s a conn.
const farTrip = 10 * time.Millisecond

// far says whether a link is. gRPC wants to know windows before a connection begins.
type far bool

// streamWindow is how many bytes a conn may have in flight, and so about what a stalled
// reader costs. A far link gives a conn 40 MB/s over 100 ms, which is what Linux' own limits
// let one TCP connection have (tcp_rmem and tcp_wmem in tcp(7)).
func (f far) streamWindow() int32 {
	if f {
		return 4 << 20
	}
	return 1 << 20
}

// sessionWindow bounds all conns together. grpc-go gives it back on receipt, so a stalled
// reader takes none of it.
func (f far) sessionWindow() int32 {
	if f {
		return 32 << 20
	}
	return 16 << 20
}

// unsent is how many bytes the kernel takes that it can't send yet. By itself it would take
// megabytes, and a keystroke would wait behind all of them; what waits with gRPC instead
// takes turns, conn by conn.
func (f far) unsent() int {
	if f {
		return 32 << 10
	}
	return 128 << 10
}

// carry readies a new TCP connection to carry a session, and reports whether the link is
// far: by the round trip of TCP's own handshake.
func carry(c net.Conn, trip time.Duration) (is far) {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return false
	}
	raw.Control(func(fd uintptr) { //nolint:errcheck // then c is closed, and gRPC will see that
		if info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			is = time.Duration(info.Rtt)*time.Microsecond >= trip
		}
		unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, is.unsent()) //nolint:errcheck // others wait longer, no more
	})
	return is
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
