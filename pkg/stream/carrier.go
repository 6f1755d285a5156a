package stream

import (
	"errors"
	"math"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"tunnel/pkg/conn"
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
	// firstRate is what a link has after a pause, in bytes a second, if it has not less.
	firstRate int64
	// writeBuffer is what grpc-go gathers before a write. It holds the buffer while there
	// is something to write.
	writeBuffer int
}

// sizes of a far link give a conn 40 MB/s over 100 ms, which is what Linux' own limits let
// one TCP connection have (tcp_rmem and tcp_wmem in tcp(7)).
func (f far) sizes() linkSizes {
	if f {
		return linkSizes{streamWindow: 4 << 20, sessionWindow: 32 << 20, unsent: 8 << 10, firstRate: 256 << 10, writeBuffer: 4 << 10}
	}
	return linkSizes{streamWindow: 1 << 20, sessionWindow: 16 << 20, unsent: 128 << 10, firstRate: 2 << 20, writeBuffer: 32 << 10}
}

// carrier is a connection that carries a session, or that is a data connection.
type carrier struct {
	net.Conn
	tcp   *net.TCPConn    // the same; nil in tests with a network of their own
	raw   syscall.RawConn // of tcp
	trip  time.Duration   // from where it is far
	far   far             // owned by Write, once it is in use
	since time.Time
	heard atomic.Int64 // when bytes last came: nanoseconds after since

	// Of the connection that carries a session.
	turns  conn.Turns
	narrow atomic.Bool // see narrowRate

	pacer *pacer // of a data connection; set before its first conn

	// Owned by Write, which TLS calls one at a time.
	isAlone bool
	asked   time.Time
	wrote   int // bytes since then
	isThin  bool
	unsent  int // what the kernel was told
}

// carry readies a new connection to carry a session. trip is from where it is far, by the round
// trip of TCP's own handshake.
func carry(c net.Conn, trip time.Duration) (*carrier, far) {
	all := &carrier{Conn: c, trip: trip, since: time.Now()}
	tcp, ok := c.(*net.TCPConn)
	if !ok {
		return all, false
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return all, false
	}
	all.tcp, all.raw = tcp, raw
	raw.Control(func(fd uintptr) { //nolint:errcheck // then c is closed, and gRPC will see that
		if path, ok := pathOf(fd); ok {
			all.far = far(path.trip >= trip)
		}
		all.boundUnsent(fd, all.far.sizes().unsent)
		boundBackoff(fd, sessionBackoff)
		userTimeout(fd, keepaliveTotal) //nolint:errcheck // see sessionBackoff
	})
	return all, all.far
}

// What was sent while a link was cut is sent again, at intervals that the kernel doubles up to two
// minutes: a link that is back after 10 s would not be tried before some 13 s, or 20 s. So the
// intervals are bounded. Linux before 6.15 cannot do that.
//
// The same bound shortens how long the kernel tries at all: it works that out from the bound and
// net.ipv4.tcp_retries2.
const (
	// sessionBackoff alone would have it give up after 15 s, and after 9 s where tcp_retries2 is
	// 8. A user timeout takes the place of that.
	sessionBackoff = time.Second
	// dataBackoff stands without a user timeout, which would also end a connection whose reader is
	// stalled. It is long enough that the kernel tries for 16 s with a tcp_retries2 of 6, for 26 s
	// with 8 and for a minute with 15, the default; with less than 6 it hardly changes anything.
	dataBackoff = 5 * time.Second
)

// alone readies the connection to carry nothing but one conn at a time, which waits for no
// other. It comes before its first conn.
func (c *carrier) alone() {
	c.far, c.isAlone = false, true
	if c.tcp == nil {
		return
	}
	c.raw.Control(func(fd uintptr) { //nolint:errcheck // it fails when c is closed
		c.boundUnsent(fd, c.far.sizes().unsent)
		boundBackoff(fd, dataBackoff)
		userTimeout(fd, 0) //nolint:errcheck // see dataBackoff
	})
}

// boundUnsent tells the kernel how much it may take.
func (c *carrier) boundUnsent(fd uintptr, n int) {
	if n != c.unsent {
		c.unsent = n
		boundUnsent(fd, n)
	}
}

// SyscallConn implements syscall.Conn, for listen.Unread.
func (c *carrier) SyscallConn() (syscall.RawConn, error) {
	if c.raw == nil {
		return nil, errors.ErrUnsupported
	}
	return c.raw, nil
}

// Read implements net.Conn.
func (c *carrier) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 {
		c.heard.Store(int64(time.Since(c.since)))
	}
	return n, err
}

// silence returns for how long nothing has come.
func (c *carrier) silence() time.Duration { return time.Since(c.since) - time.Duration(c.heard.Load()) }

// acknowledges reports whether bytes are on their way to the other end, and its kernel has
// acknowledged something within lostAfter.
func (c *carrier) acknowledges() (is bool) {
	if c.tcp == nil {
		return false
	}
	c.raw.Control(func(fd uintptr) { //nolint:errcheck // it fails when c is closed
		acks, ok := acksOf(fd)
		is = ok && acks.underWay && acks.last < lostAfter
	})
	return is
}

// Write implements net.Conn. The kernel fills its last packet, of up to 64 KiB, whatever it
// has been told to hold: over a thin link that is half a second. So a thin one gets nothing
// while it has enough.
func (c *carrier) Write(b []byte) (int, error) {
	if c.tcp == nil || c.isAlone {
		if c.pacer != nil {
			c.pacer.sends()
		}
		return c.Conn.Write(b)
	}
	c.turns.SetBusy(true)
	defer c.turns.SetBusy(false)
	if c.thin(len(b)) {
		// poll(2) also has the kernel tell when there is room again, as a write in vain would.
		if err := c.raw.Write(hasRoom); err != nil {
			return 0, err
		}
	}
	c.wrote += len(b)
	return c.Conn.Write(b)
}

const (
	// thinRate is below what a link is thin, in bytes a second.
	thinRate = 2 << 20
	// narrowRate is below what a link is so narrow that no data connections are opened, in bytes
	// a second. TCP gives each as much as the session's own, which would be left too little for
	// a new conn to be open in time.
	narrowRate = 32 << 10
	// leastUnsent is what the kernel of a thin link may hold that it cannot send yet; unsentTime
	// is how long the link may take for that.
	leastUnsent = 2 << 10
	unsentTime  = 64 * time.Millisecond
	// growth is how much faster than in the last interval a link may be.
	growth = 2
	// rateInterval is how often its rate is asked for.
	rateInterval = 100 * time.Millisecond
)

// thin reports whether the link carries little, or is asked to. It has the turns, and the kernel,
// follow the link's rate, once more than a little has been written, n bytes now: pings and
// heartbeats are not worth the question.
func (c *carrier) thin(n int) bool {
	if now := time.Now(); c.wrote+n > leastUnsent && now.Sub(c.asked) >= rateInterval {
		wrote := int64(float64(c.wrote) / now.Sub(c.asked).Seconds())
		c.asked, c.wrote = now, 0
		c.raw.Control(func(fd uintptr) { //nolint:errcheck // then c is closed, and Write says so
			path, ok := pathOf(fd)
			if !ok {
				return
			}
			if path.leastTrip < c.trip {
				c.far = false // a busy machine has made the handshake slow
			}
			rate := int64(min(path.rate, math.MaxInt64)) //nolint:gosec // bounded
			c.isThin = rate > 0 && rate < thinRate
			// The kernel's rate may be of long ago, and the link may have become thin since. So
			// the turns' rate grows with what the link has taken.
			c.turns.SetRate(min(rate, max(c.far.sizes().firstRate, growth*wrote)))
			if path.unsent >= c.unsent/2 { // else the rate is what was asked of it
				c.narrow.Store(rate > 0 && rate < narrowRate)
			}
			unsent := c.far.sizes().unsent
			if c.isThin {
				unsent = int(min(max(leastUnsent, rate*int64(unsentTime)/int64(time.Second)), int64(far(true).sizes().unsent)))
			}
			c.boundUnsent(fd, unsent)
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
