package stream

import (
	"errors"
	"time"

	"golang.org/x/sys/unix"
)

// pathInfo is what the kernel knows about the network path of a TCP connection.
type pathInfo struct {
	trip, leastTrip time.Duration // round trips: smoothed, and the shortest
	rate            uint64        // recent delivery rate in bytes a second; 0: not known
	unsent          int           // bytes that the kernel holds and cannot send yet
}

// pathOf asks the kernel about the path of a socket (TCP_INFO). ok is false if the kernel does not
// answer.
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

// boundUnsent bounds how many bytes the kernel accepts that it cannot send yet.
func boundUnsent(fd uintptr, n int) {
	unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, n) //nolint:errcheck // on failure, other conns only wait longer
}

// hasRoom reports whether the kernel accepts bytes. If the kernel accepts none now, it notifies Go's
// poller when it does.
func hasRoom(fd uintptr) bool {
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}, 0) //nolint:gosec // a descriptor
	return n > 0 || err != nil && !errors.Is(err, unix.EINTR)
}

// userTimeout sets TCP_USER_TIMEOUT (tcp(7)).
func userTimeout(fd uintptr, d time.Duration) error {
	return unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(d.Milliseconds()))
}

// boundBackoff bounds the kernel's retransmission intervals (TCP_RTO_MAX_MS).
func boundBackoff(fd uintptr, d time.Duration) {
	unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_RTO_MAX_MS, int(d.Milliseconds())) //nolint:errcheck // an older kernel fails
}

// acks is what the kernel knows about the other end's acknowledgements.
type acks struct {
	ended    bool          // the kernel has ended the connection
	underWay bool          // sent bytes have no acknowledgement yet
	missing  bool          // the kernel resends what has no acknowledgement
	last     time.Duration // time since the last acknowledgement
}

// acksOf asks the kernel about the acknowledgements of a socket (TCP_INFO). ok is false if the kernel
// does not answer.
func acksOf(fd uintptr) (a acks, ok bool) {
	info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil {
		return acks{}, false
	}
	return acksIn(info), true
}

// acksIn reads the acknowledgements from the kernel's answer.
func acksIn(info *unix.TCPInfo) acks {
	return acks{
		ended:    info.State == unix.BPF_TCP_CLOSE,
		underWay: info.Unacked > 0,
		// An acknowledgement resets either counter to zero. Probes are sent by keepalive or for a
		// closed window.
		missing: info.Unacked > 0 && info.Retransmits > 0 || info.Probes > 1,
		last:    time.Duration(info.Last_ack_recv) * time.Millisecond,
	}
}

// sending is what the kernel knows about the data that a TCP connection sends.
type sending struct {
	arrived            int64         // bytes that the other end's kernel has; estimated behind a lost packet
	busy               time.Duration // how long bytes were in flight, without the time in which the reader took none
	unsent             int           // bytes that the kernel holds and cannot send yet
	retries            int           // how often in a row the oldest packet was resent in vain
	trip, shortestTrip time.Duration // round trips: smoothed, and the shortest
}

// sendingOf asks the kernel about the data that a socket sends (TCP_INFO). ok is false if the kernel
// does not answer.
func sendingOf(fd uintptr) (s sending, ok bool) {
	info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil {
		return sending{}, false
	}
	return sending{
		arrived:      int64(info.Bytes_acked) + int64(info.Sacked)*int64(info.Snd_mss),                       //nolint:gosec // less than 63 bits
		busy:         time.Duration(info.Busy_time-info.Rwnd_limited-info.Sndbuf_limited) * time.Microsecond, //nolint:gosec // parts of Busy_time
		unsent:       int(info.Notsent_bytes),
		retries:      int(info.Retransmits),
		trip:         time.Duration(info.Rtt) * time.Microsecond,
		shortestTrip: time.Duration(info.Min_rtt) * time.Microsecond,
	}, true
}

// boundRate bounds how fast a connection sends, in bytes a second (SO_MAX_PACING_RATE in
// socket(7)); 0: no bound.
func boundRate(fd uintptr, rate int64) {
	value := int(rate)
	if rate == 0 {
		value = -1 // the kernel's value for no bound
	}
	unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE, value) //nolint:errcheck // on failure, other conns only wait longer
}
