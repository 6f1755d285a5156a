package stream

import (
	"errors"
	"math"
	"time"

	"golang.org/x/sys/unix"
)

// pathInfo is what the kernel knows of the way that a TCP connection leads.
type pathInfo struct {
	trip, leastTrip time.Duration // round trips: smoothed, and the shortest
	rate            uint64        // bytes a second that have arrived of late; 0: not known
	unsent          int           // bytes that the kernel holds and cannot send yet
}

// pathOf asks the kernel (TCP_INFO). ok is false if it does not tell.
func pathOf(fd uintptr) (p pathInfo, ok bool) {
	info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil {
		return pathInfo{}, false
	}
	return pathInfo{
		trip:      time.Duration(info.Rtt) * time.Microsecond,
		leastTrip: time.Duration(info.Min_rtt) * time.Microsecond,
		rate:      info.Delivery_rate,
		unsent:    int(info.Notsent_bytes),
	}, true
}

// boundUnsent bounds how many bytes the kernel takes that it cannot send yet.
func boundUnsent(fd uintptr, n int) {
	unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, n) //nolint:errcheck // others wait longer, no more
}

// hasRoom reports whether the kernel takes bytes. If not, it tells the poller as soon as it
// does.
func hasRoom(fd uintptr) bool {
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}, 0) //nolint:gosec // a descriptor
	return n > 0 || err != nil && !errors.Is(err, unix.EINTR)
}

// userTimeout sets TCP_USER_TIMEOUT (tcp(7)).
func userTimeout(fd uintptr, d time.Duration) error {
	return unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(d.Milliseconds()))
}

// boundBackoff bounds the intervals at which the kernel sends again (TCP_RTO_MAX_MS).
func boundBackoff(fd uintptr, d time.Duration) {
	unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_RTO_MAX_MS, int(d.Milliseconds())) //nolint:errcheck // an older kernel
}

// acks is what the kernel knows of the other end's answers.
type acks struct {
	ended    bool          // the kernel has ended the connection
	underWay bool          // something is sent and has no answer yet
	missing  bool          // the kernel sends again what has no answer
	last     time.Duration // since the last answer
}

// acksOf asks the kernel (TCP_INFO).
func acksOf(fd uintptr) (a acks, ok bool) {
	info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil {
		return acks{}, false
	}
	return acksIn(info), true
}

func acksIn(info *unix.TCPInfo) acks {
	return acks{
		ended:    info.State == unix.BPF_TCP_CLOSE,
		underWay: info.Unacked > 0,
		// An answer sets either back to none. Probes are those of keepalive, or of a closed window.
		missing: info.Unacked > 0 && info.Retransmits > 0 || info.Probes > 1,
		last:    time.Duration(info.Last_ack_recv) * time.Millisecond,
	}
}

// sending is what the kernel knows of what a TCP connection sends.
type sending struct {
	acked           uint64        // bytes that have arrived
	waiting         time.Duration // how long it had something to send and waited for the network, not for its reader
	retries         int           // how often in a row the oldest packet was sent again in vain
	pending         bool          // it has something to send
	trip, leastTrip time.Duration // round trips: smoothed, and the shortest
}

// sendingOf asks the kernel (TCP_INFO). ok is false if it does not tell.
func sendingOf(fd uintptr) (s sending, ok bool) {
	info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil {
		return sending{}, false
	}
	return sending{
		acked:     info.Bytes_acked,
		waiting:   time.Duration(info.Busy_time-info.Rwnd_limited-info.Sndbuf_limited) * time.Microsecond, //nolint:gosec // parts of it
		retries:   int(info.Retransmits),
		pending:   info.Unacked > 0 || info.Notsent_bytes > 0,
		trip:      time.Duration(info.Rtt) * time.Microsecond,
		leastTrip: time.Duration(info.Min_rtt) * time.Microsecond,
	}, true
}

// boundRate bounds how fast a connection sends, in bytes a second (SO_MAX_PACING_RATE in
// socket(7)); 0: no bound.
func boundRate(fd uintptr, rate int64) {
	value := int(min(rate, math.MaxInt32))
	if rate == 0 {
		value = -1 // the kernel's word for no bound
	}
	unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE, value) //nolint:errcheck // others wait longer, no more
}
