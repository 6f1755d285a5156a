package stream

import (
	"errors"
	"time"

	"golang.org/x/sys/unix"
)

// pathInfo is what the kernel knows of the way that a TCP connection leads.
type pathInfo struct {
	trip, leastTrip time.Duration // round trips: smoothed, and the shortest
	rate            uint64        // bytes a second that have arrived of late; 0: not known
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

// lost reports whether the kernel has ended the connection, or gets no answer to what it
// sends again and again.
func lost(fd uintptr) bool {
	info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
	return err == nil && isLost(info)
}

func isLost(info *unix.TCPInfo) bool {
	if info.State == unix.BPF_TCP_CLOSE {
		return true
	}
	// An answer sets either back to none. Probes are those of keepalive, or of a closed window.
	unanswered := info.Unacked > 0 && info.Retransmits > 0 || info.Probes > 1
	return unanswered && time.Duration(info.Last_ack_recv)*time.Millisecond > lostAfter
}
