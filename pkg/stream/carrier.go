package stream

import (
	"errors"
	"math"
	"net"
	"sync/atomic"
	"syscall"
	"time"

	"tunnel.example/tunnel/pkg/conn"
	"tunnel.example/tunnel/pkg/dial"
	"tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/tunnel"
	"tunnel.example/tunnel/pkg/wsconn"
)

// A session has one TCP connection of its own, and may have data connections beside it. The round
// trip of a TCP connection is known once TCP is connected, before gRPC gets the connection.

// farTrip is the round trip from which a link counts as far. A near link with a round trip just
// below farTrip allows 100 MB/s per conn.
const farTrip = 10 * time.Millisecond

// far says whether a link has a long round trip. gRPC needs the window sizes, which depend on far,
// before a connection begins.
type far bool

// linkSizes are the sizes that depend on far, in bytes unless a field says otherwise.
type linkSizes struct {
	// streamWindow is how many bytes a conn may have in flight. A stalled reader costs about as
	// much memory.
	streamWindow int32
	// sessionWindow bounds the bytes in flight of all conns together. grpc-go opens this window
	// again when bytes arrive, even if no reader has taken them, so a stalled reader uses none of
	// it.
	sessionWindow int32
	// unsent bounds the bytes that wait in the kernel to be sent. Without a bound the kernel would
	// accept megabytes of one conn, and a keystroke of another conn would wait behind all of them.
	// The other bytes wait in gRPC, where the conns take turns.
	unsent int
	// firstRate is the assumed rate of a link after a pause, in bytes a second. A lower rate that
	// the kernel reports takes precedence.
	firstRate int64
	// writeBuffer is how many bytes grpc-go gathers before a write. grpc-go holds the buffer
	// while there is something to write.
	writeBuffer int
}

// sizes returns the sizes for a link. The sizes of a far link give a conn 40 MB/s over 100 ms.
// Linux' own limits allow one TCP connection as much (tcp_rmem and tcp_wmem in tcp(7)).
func (f far) sizes() linkSizes {
	if f {
		return linkSizes{
			streamWindow: 4 << 20, sessionWindow: 32 << 20, unsent: 8 << 10, firstRate: 256 << 10, writeBuffer: 4 << 10,
		}
	}
	return linkSizes{
		streamWindow: 1 << 20, sessionWindow: 16 << 20, unsent: 128 << 10, firstRate: 2 << 20, writeBuffer: 32 << 10,
	}
}

// carrier is the network connection of a session, or a data connection.
type carrier struct {
	net.Conn
	tcp     *net.TCPConn    // the TCP connection below Conn; nil in tests with a network of their own
	raw     syscall.RawConn // the socket of tcp
	control *Congestion     // nil: the system's choice
	paths   bool            // the socket has Multipath TCP, so there may be several paths to the peer
	trip    time.Duration   // round trip from which the link counts as far
	// indirect: tcp ends at a proxy or at the server of a WebSocket. So its round trips say nothing about the
	// link to the peer, and the kernel's counts of waiting and lost bytes describe only the part up to that box.
	indirect bool
	far      far // owned by Write once the connection is in use
	since    time.Time
	heard    atomic.Int64 // when bytes last came, in nanoseconds after since

	losses losses // for judge; owned by Write in a session's own connection, guarded by pacer.mu in a data connection

	// Only for a session's own connection.
	turns  conn.Turns
	narrow atomic.Bool // see narrowRate

	pacer *pacer // only for a data connection; set before its first conn

	// Owned by Write. TLS makes one call of Write at a time.
	isAlone bool
	sampled time.Time // when the kernel was last asked for the rate
	wrote   int       // bytes written since sampled
	isThin  bool
	unsent  int // the bound that the kernel was given, in bytes
}

// carry prepares a new connection for a session. trip is the round trip from which the link
// counts as far. carry compares trip with the round trip of TCP's own handshake. control chooses
// the congestion control; nil: the system's choice.
func carry(c net.Conn, trip time.Duration, control *Congestion) (*carrier, far) {
	all := &carrier{Conn: c, trip: trip, control: control, since: time.Now()}
	var measured time.Duration
	measured, all.indirect = indirect(c)
	if all.indirect {
		all.far = far(measured >= trip)
	}
	tcp, ok := bottom(c)
	if !ok {
		return all, all.far
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return all, all.far
	}
	all.tcp, all.raw = tcp, raw
	raw.Control(func(fd uintptr) {
		if path, ok := pathOf(fd); ok && !all.indirect {
			all.far = far(path.trip >= trip)
		}
		all.boundUnsent(fd, all.far.sizes().unsent)
		boundBackoff(fd, sessionBackoff)
		userTimeout(fd, keepaliveTotal) //nolint:errcheck // see sessionBackoff
		control.begin(fd)
		all.paths = isMultipath(fd) && !all.indirect
	})
	return all, all.far
}

// indirect reports whether TCP ends at a box between this end and the peer. trip is then how long the box took to
// reach the peer when the connection was made; 0: not known, which is always so at the cloud.
func indirect(c net.Conn) (trip time.Duration, is bool) {
	switch c := c.(type) {
	case *dial.Conn:
		return c.IsIndirect()
	case *wsconn.Conn:
		return 0, true
	}
	return 0, false
}

// bottom returns the TCP connection below all layers of c. A layer gives access to the TCP connection
// (listen.Socketed), or to the next layer (NetConn of tls.Conn and dial.Conn).
func bottom(c net.Conn) (*net.TCPConn, bool) {
	for {
		if tcp, ok := listen.Socket(c); ok {
			return tcp, true
		}
		layer, ok := c.(interface{ NetConn() net.Conn })
		if !ok {
			return nil, false
		}
		c = layer.NetConn()
	}
}

// The kernel resends the bytes that were sent while a link was cut. It doubles the interval
// between retries up to two minutes. If the link comes back after 10 s, the next retry would come
// only after some 13 s or 20 s. So the intervals are bounded, on Linux 6.15 or later.
//
// The bound also shortens how long the kernel retries in total: it computes that time from the bound and
// net.ipv4.tcp_retries2. The time begins with the first lost packet, and ends only when everything that was in flight
// then has arrived. Several cuts in a row, or steady loss, can therefore add up. A user timeout, which begins at the
// same time, replaces that limit.
const (
	// sessionBackoff is the bound for the connection of a session. Its user timeout is keepaliveTotal.
	sessionBackoff = time.Second
	// dataBackoff is the bound for a data connection.
	dataBackoff = 5 * time.Second
	// dataTimeout is the user timeout of a data connection that carries a conn: about as long as Linux tries without our
	// bound. The session notices a lost peer much earlier (dropLost), also where keepalive would have noticed it: with a
	// user timeout, the kernel no longer counts the probes of keepalive.
	dataTimeout = 15 * time.Minute
)

// alone prepares a data connection. A data connection serves one conn at a time, so no conn waits for
// another. The caller calls alone before the first conn.
func (c *carrier) alone() {
	c.far, c.isAlone = false, true
	if c.tcp == nil {
		return
	}
	c.raw.Control(func(fd uintptr) {
		c.boundUnsent(fd, c.far.sizes().unsent)
		boundBackoff(fd, dataBackoff)
		userTimeout(fd, dataTimeout) //nolint:errcheck // without it, net.ipv4.tcp_retries2 counts
	})
}

// boundUnsent tells the kernel how many unsent bytes it may accept.
func (c *carrier) boundUnsent(fd uintptr, n int) {
	if n != c.unsent {
		c.unsent = n
		boundUnsent(fd, n)
	}
}

// Socket implements listen.Socketed.
func (c *carrier) Socket() *net.TCPConn { return c.tcp }

// HasUnread implements listen.Holder.
func (c *carrier) HasUnread() bool {
	h, ok := c.Conn.(listen.Holder)
	return ok && h.HasUnread()
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

// Paths returns the paths of a connection with Multipath TCP. It returns nil for any other connection.
func (c *carrier) Paths() (paths []tunnel.Path) {
	if c.paths {
		c.raw.Control(func(fd uintptr) { paths = pathsOf(fd) })
	}
	return paths
}

// isMultipath reports whether the connection has Multipath TCP now. A box in between may strip its option
// while the connection begins.
func (c *carrier) isMultipath() bool { return c.Paths() != nil }

// lost is how long the other side may be silent before it counts as lost.
func (c *carrier) lost() time.Duration {
	if c.isMultipath() {
		return multipathLost
	}
	return lostAfter
}

// total is how long no byte may come on the session's own connection.
func (c *carrier) total() time.Duration {
	if c.isMultipath() {
		return multipathTotal
	}
	return keepaliveTotal
}

// silence returns the time since bytes last came on the connection.
func (c *carrier) silence() time.Duration { return time.Since(c.since) - time.Duration(c.heard.Load()) }

// acknowledges reports whether sent bytes wait for an acknowledgement, and the other end's kernel
// has acknowledged other bytes within lostAfter.
func (c *carrier) acknowledges() (is bool) {
	if c.tcp == nil {
		return false
	}
	c.raw.Control(func(fd uintptr) {
		acks, ok := acksOf(fd)
		is = ok && acks.underWay && acks.last < lostAfter
	})
	return is
}

// HasRoom reports whether the kernel takes some KiB at once. Systems other than Linux do not say, and HasRoom returns
// true there.
func (c *carrier) HasRoom() (has bool) {
	if c.raw != nil {
		c.raw.Control(func(fd uintptr) { has = hasRoom(fd) })
	}
	return has
}

// Write implements net.Conn. The kernel always fills its last packet, of up to 64 KiB, even beyond the bound
// for unsent bytes. Over a thin link such a packet takes half a second. So on a thin link Write waits until
// the kernel has fewer unsent bytes than the bound.
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
		// A write that would block makes the kernel report when there is room again. hasRoom calls
		// poll(2), which has the same effect.
		if err := c.raw.Write(hasRoom); err != nil {
			return 0, err
		}
	}
	c.wrote += len(b)
	return c.Conn.Write(b)
}

const (
	// thinRate is the rate below which a link is thin, in bytes a second.
	thinRate = 2 << 20
	// narrowRate is the rate below which a link is narrow, in bytes a second. Over a narrow link no
	// data connections are opened. TCP gives each data connection the same share of the link as the
	// session's own connection. The share of the session's own connection would be too small to
	// open a new conn in time.
	narrowRate = 32 << 10
	// leastUnsent is the smallest bound for the unsent bytes in the kernel of a thin link.
	// unsentTime is how long a thin link may take to send the unsent bytes that the kernel holds.
	leastUnsent = 2 << 10
	unsentTime  = 64 * time.Millisecond
	// growth is the factor by which a link may be faster than in the last interval.
	growth = 2
	// rateInterval is how often the kernel is asked for the link's rate, at most.
	rateInterval = 100 * time.Millisecond
)

// thin reports whether the link counts as thin, because the rate that the kernel reports is below
// thinRate. The reported rate is also low if little was sent. thin adapts the turns and the kernel's bound
// for unsent bytes to the rate. n is how many bytes Write is about to write. thin asks the kernel only after
// more than leastUnsent bytes, since pings and heartbeats are not worth a system call.
func (c *carrier) thin(n int) bool {
	if now := time.Now(); c.wrote+n > leastUnsent && now.Sub(c.sampled) >= rateInterval {
		wrote := int64(float64(c.wrote) / now.Sub(c.sampled).Seconds())
		c.sampled, c.wrote = now, 0
		var path pathInfo
		c.raw.Control(func(fd uintptr) {
			var ok bool
			if path, ok = pathOf(fd); !ok {
				return
			}
			if path.leastTrip < c.trip && !c.indirect {
				c.far = false // a near link: a busy machine made TCP's handshake slow
			}
			rate := int64(min(path.rate, math.MaxInt64)) //nolint:gosec // bounded
			c.isThin = rate > 0 && rate < thinRate
			// The kernel's rate may be old, and the link may have become thin since. So the
			// turns' rate grows with what the link has accepted.
			c.turns.SetRate(min(rate, max(c.far.sizes().firstRate, growth*wrote)))
			switch {
			case rate >= narrowRate:
				c.narrow.Store(false)
			case path.unsent >= c.unsent/2: // otherwise a low rate only shows that little was sent
				c.narrow.Store(rate > 0)
			}
			unsent := c.far.sizes().unsent
			if c.isThin {
				unsent = int(min(max(leastUnsent, rate*int64(unsentTime)/int64(time.Second)), int64(far(true).sizes().unsent)))
			}
			c.boundUnsent(fd, unsent)
		})
		c.judge(path.segments)
	}
	return c.isThin
}

// setUserTimeout makes the kernel end a connection if the peer does not acknowledge sent bytes within d. It does
// nothing on systems without such a timeout.
func setUserTimeout(c *net.TCPConn, d time.Duration) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	cerr := raw.Control(func(fd uintptr) { err = userTimeout(fd, d) })
	return errors.Join(err, cerr)
}

// nearListener accepts the connections of a joinListener for the gRPC server of near links. It hands connections with
// Multipath TCP to multipath, and other connections over far links to far.
type nearListener struct {
	*joinListener
	far, multipath *listen.Handover
}

// Accept implements net.Listener.
func (l nearListener) Accept() (net.Conn, error) {
	for {
		c, err := l.joinListener.Accept()
		if err != nil {
			return nil, err
		}
		to := l.far
		switch j := c.(*joiningConn); { //nolint:forcetypeassert // joinListener makes it
		case j.Conn.(*carrier).paths: //nolint:forcetypeassert // joinListener wraps every connection in a carrier
			to = l.multipath
		case !bool(j.far):
			return c, nil
		}
		if !to.Give(c, 0) {
			c.Close()
		}
	}
}
