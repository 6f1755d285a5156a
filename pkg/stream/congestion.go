package stream

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

// Settings of the key congestion. Any other setting is the name of an algorithm of the kernel.
const (
	// CongestionAuto leaves the system's algorithm, and switches connections that lose packets to bbr.
	CongestionAuto = "auto"
	// CongestionSystem leaves the system's algorithm on every connection.
	CongestionSystem = "system"
)

// lossControl is the algorithm for connections that lose packets. Reno and cubic take every lost
// packet for a full queue, and halve their rate or nearly so. BBR measures rate and round trip
// instead.
const lossControl = "bbr"

const (
	// A connection is switched if at least one of lossyPart segments was sent again: 0.3 %. At this rate
	// of loss, cubic and Reno send 0.3 MB/s over a round trip of 100 ms, however fast the link is (RFC
	// 9438 section 5.1).
	lossyPart = 1000. / 3
	// lossyTrip is the shortest round trip of a connection that is switched. Over a shorter round trip
	// cubic recovers soon.
	lossyTrip = 20 * time.Millisecond
	// lossTime is the shortest time over which lost segments are counted.
	lossTime = 2 * time.Second
	// lossLimit is the longest time over which lost segments are counted. Older losses say nothing.
	lossLimit = 30 * time.Second
	// leastLost is how many segments must be sent again at least for a switch. One or two such segments
	// may be probes at the end of a transfer (RFC 8985 section 7), and not lost.
	leastLost = 3
	// slowSegments is how many segments a second fill a slow link of 2 Mbit/s. deepQueue tells a deep
	// queue: the round trip is at least deepQueue times the shortest round trip. On a slow link with a
	// deep queue, packets are lost because the queue is full. A data connection with bbr would then take
	// most of the link from the session's own connection, and new conns would not open in time.
	slowSegments = (256 << 10) / 1400
	deepQueue    = 2
)

// Congestion chooses the congestion control of the connections between edges and clouds. The zero
// value and nil leave the choice to the system.
type Congestion struct {
	// Set once.
	fixed    string                  // every connection gets this algorithm at its start; "": the system's choice
	switches bool                    // connections that lose packets are switched to lossControl
	try      func(name string) error // asks the kernel for an algorithm
	counters *tunnel.Counters
	log      *slog.Logger

	missing atomic.Pointer[error] // why the kernel has refused lossControl; nil: it has not
}

// NewCongestion returns the congestion control of a setting of the key congestion, "" meaning
// CongestionAuto. It asks the kernel for the algorithm. It fails if the setting names an algorithm
// that the kernel refuses. If CongestionAuto cannot have bbr, Hint says so.
func NewCongestion(setting string, counters *tunnel.Counters, log *slog.Logger) (*Congestion, error) {
	c := &Congestion{try: tryCongestion, counters: counters, log: log.With("module", category)}
	switch setting {
	case "", CongestionAuto:
		c.switches = true
		if err := c.try(lossControl); err != nil {
			c.refused(err)
		}
	case CongestionSystem:
	default:
		if err := c.try(setting); err != nil {
			return nil, explainCongestion(setting, err)
		}
		c.fixed = setting
	}
	return c, nil
}

// refused notes that the kernel refuses lossControl.
func (c *Congestion) refused(err error) {
	err = explainCongestion(lossControl, err)
	c.missing.Store(&err)
}

// Hint returns what an operator could do to make connections that lose packets faster; "" if there is nothing
// to do.
func (c *Congestion) Hint() string {
	if c.missing.Load() != nil && c.try(lossControl) == nil {
		c.missing.Store(nil) // the module has been loaded since
	}
	if err := c.missing.Load(); err != nil {
		return "connections over long links that lose packets stay slow: " + (*err).Error()
	}
	return ""
}

// Status is for /readyz?verbose.
func (c *Congestion) Status() string {
	switch {
	case c.fixed != "":
		return "every connection has " + c.fixed
	case !c.switches:
		return "the system's choice"
	}
	if hint := c.Hint(); hint != "" {
		return hint
	}
	return fmt.Sprintf("%d connections that lost packets were switched to %s", c.counters.Switched.Load(), lossControl)
}

// available is the file with the algorithms that the kernel has loaded.
const available = "/proc/sys/net/ipv4/tcp_available_congestion_control"

// explainCongestion says why the kernel refuses an algorithm, and what to do.
func explainCongestion(name string, err error) error {
	const sysctl = "net.ipv4.tcp_allowed_congestion_control"
	switch {
	case errors.Is(err, errors.ErrUnsupported):
		return fmt.Errorf("only Linux lets a program choose %s", name)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("only root may choose %s on this machine: run "+
			"`sysctl -w %s=\"$(sysctl -n %s) %s\"` on the host, outside of containers", name, sysctl, sysctl, name)
	case !errors.Is(err, syscall.ENOENT):
		return fmt.Errorf("choosing %s: %w", name, err)
	}
	has := ""
	if list, rerr := os.ReadFile(available); rerr == nil {
		has = fmt.Sprintf(" (net.ipv4.tcp_available_congestion_control: %s)", strings.TrimSpace(string(list)))
	}
	return fmt.Errorf("this kernel has no %s%s: run `modprobe tcp_%s` on the host, if it has that module", name, has, name)
}

// begin sets the algorithm of a new connection.
func (c *Congestion) begin(fd uintptr) {
	if c != nil && c.fixed != "" {
		setCongestion(fd, c.fixed) //nolint:errcheck // NewCongestion has set it before
	}
}

// switchOver gives a connection that loses packets lossControl. remote names the connection in the
// log. It returns false if the kernel refuses.
func (c *Congestion) switchOver(fd uintptr, remote string) bool {
	now, err := congestionOf(fd)
	if err != nil || strings.HasPrefix(now, lossControl) {
		return true // it has bbr, or a later version of it
	}
	if err := setCongestion(fd, lossControl); err != nil {
		c.refused(err)
		return false
	}
	c.missing.Store(nil) // the module has been loaded since
	level := slog.LevelDebug
	if c.counters.Switched.Add(1) == 1 {
		level = slog.LevelInfo
	}
	c.log.Log(context.Background(), level, "a connection loses packets, and was switched to bbr", "remote", remote)
	return true
}

// segments is what the kernel has counted of a connection.
type segments struct {
	sent   uint32        // segments with data; a segment that is sent again counts again
	resent uint32        // segments sent again
	trip   time.Duration // the shortest round trip
	smooth time.Duration // the smoothed round trip
}

// fillSlow reports whether sent segments within took may have filled a slow link with a deep queue.
func (s segments) fillSlow(sent uint32, took time.Duration) bool {
	return float64(sent) < slowSegments*took.Seconds() && s.smooth >= deepQueue*s.trip
}

// losses counts the segments of a connection that are sent again.
type losses struct {
	since   time.Time // when from was read; zero: never
	from    segments
	decided bool // the connection was switched
}

// many reports whether a connection loses so many packets that it should be switched. has is what the kernel
// has counted until now. Once the connection is switched, many returns false.
func (l *losses) many(has segments, now time.Time) bool {
	if l.decided {
		return false
	}
	took, sent, resent := now.Sub(l.since), has.sent-l.from.sent, has.resent-l.from.resent
	switch {
	case l.since.IsZero(), took > lossLimit:
	case int32(sent) < 0, int32(resent) < 0: //nolint:gosec // a path has ended, and its segments no longer count
	case took < lossTime:
		return false
	case resent >= leastLost && float64(resent)*lossyPart >= float64(sent):
		l.decided = has.trip >= lossyTrip && !has.fillSlow(sent, took)
		if l.decided {
			return true
		}
	case float64(sent) < leastLost*lossyPart:
		return false // too few to tell
	}
	l.since, l.from = now, has
	return false
}

// resume sets the start of the count to since; has is what the kernel had counted then. A count that began
// less than lossLimit before since stays. A transfer grows until a router's queue is full, so it often loses
// packets only in its first moments: these must count.
func (l *losses) resume(has segments, since time.Time) {
	if since.Sub(l.since) > lossLimit {
		l.since, l.from = since, has
	}
}

// judge switches the connection if it loses many packets. One goroutine at a time calls judge.
func (c *carrier) judge(has segments) {
	if c.control == nil || !c.control.switches || !c.losses.many(has, time.Now()) {
		return
	}
	// If the kernel refuses now, decided stays false: the kernel's module may be loaded later.
	c.raw.Control(func(fd uintptr) { c.losses.decided = c.control.switchOver(fd, c.RemoteAddr().String()) })
}
