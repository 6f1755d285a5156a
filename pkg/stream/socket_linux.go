package stream

import (
	"errors"
	"math"
	"time"

	"golang.org/x/sys/unix"
)

// pathInfo is what the kernel knows about the network path of a TCP connection.
type pathInfo struct {
	trip, leastTrip time.Duration // round trips: smoothed, and the shortest
	rate            uint64        // recent delivery rate in bytes a second; 0: not known
	unsent          int           // bytes that the kernel holds and cannot send yet
	segments        segments
}

// segmentsIn adds up the kernel's counts of all paths. The round trip is that of the longest path.
func segmentsIn(infos []*unix.TCPInfo) (all segments) {
	for _, info := range infos {
		all.sent += info.Data_segs_out
		all.resent += info.Total_retrans
		all.trip = max(all.trip, time.Duration(info.Min_rtt)*time.Microsecond)
		all.smooth = max(all.smooth, time.Duration(info.Rtt)*time.Microsecond)
	}
	return all
}

// pathOf asks the kernel about the path of a socket (TCP_INFO). ok is false if the kernel does not
// answer. If there are several paths, the round trips are those of the shortest path, and the other values
// are sums.
func pathOf(fd uintptr) (p pathInfo, ok bool) {
	infos, ok := infosOf(fd)
	if !ok || len(infos) == 0 {
		return pathInfo{}, false
	}
	p = pathInfo{trip: math.MaxInt64, leastTrip: math.MaxInt64, segments: segmentsIn(infos)}
	for _, info := range infos {
		p.trip = min(p.trip, time.Duration(info.Rtt)*time.Microsecond)
		p.leastTrip = min(p.leastTrip, time.Duration(info.Min_rtt)*time.Microsecond)
		p.rate += info.Delivery_rate
		p.unsent += int(info.Notsent_bytes)
	}
	return p, true
}

// congestionOf returns the congestion control of a socket (TCP_CONGESTION in tcp(7)).
func congestionOf(fd uintptr) (string, error) {
	return unix.GetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION)
}

// setCongestion sets the congestion control of a socket. The error is ENOENT if the kernel has no such
// algorithm, and EPERM if only root may choose the algorithm.
func setCongestion(fd uintptr, name string) error {
	return unix.SetsockoptString(int(fd), unix.IPPROTO_TCP, unix.TCP_CONGESTION, name)
}

// tryCongestion returns nil if this process may choose the algorithm. For root, the kernel loads the
// module of the algorithm.
func tryCongestion(name string) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	if errors.Is(err, unix.EAFNOSUPPORT) { // a machine without IPv4
		fd, err = unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP)
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return setCongestion(uintptr(fd), name) //nolint:gosec // a descriptor
}

// boundUnsent bounds how many bytes the kernel accepts that it cannot send yet.
func boundUnsent(fd uintptr, n int) {
	//nolint:errcheck // on failure, other conns only wait longer
	unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, n)
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
	//nolint:errcheck // an older kernel fails
	unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_RTO_MAX_MS, int(d.Milliseconds()))
}

// acks is what the kernel knows about the other end's acknowledgements.
type acks struct {
	ended    bool          // the kernel has ended the connection
	underWay bool          // sent bytes have no acknowledgement yet
	missing  bool          // the kernel resends bytes that have no acknowledgement
	closed   bool          // the peer's window is closed, or the kernel holds bytes and has none in flight
	last     time.Duration // time since the last acknowledgement
}

// acksOf asks the kernel about the acknowledgements of a socket (TCP_INFO). ok is false if the kernel
// does not answer, and while a connection with Multipath TCP has no path.
func acksOf(fd uintptr) (a acks, ok bool) {
	infos, ok := infosOf(fd)
	if !ok || len(infos) == 0 {
		return acks{}, false
	}
	return acksIn(infos), true
}

// acksIn reads the acknowledgements from the kernel's answer. If one path works, the connection works.
func acksIn(infos []*unix.TCPInfo) acks {
	a := acks{ended: true, missing: true, closed: true, last: math.MaxInt64}
	for _, info := range infos {
		a.ended = a.ended && info.State == unix.BPF_TCP_CLOSE
		a.underWay = a.underWay || info.Unacked > 0
		// An acknowledgement resets either counter to zero. Probes are sent by keepalive or for a
		// closed window.
		a.missing = a.missing && (info.Unacked > 0 && info.Retransmits > 0 || info.Probes > 1)
		a.closed = a.closed && (info.Snd_wnd == 0 || info.Unacked == 0 && info.Notsent_bytes > 0)
		a.last = min(a.last, time.Duration(info.Last_ack_recv)*time.Millisecond)
	}
	return a
}

// sending is what the kernel knows about the data that a TCP connection sends.
type sending struct {
	arrived            int64         // bytes that the other end's kernel has; estimated behind a lost packet
	busy               time.Duration // how long bytes were in flight, without the time in which the peer's window was full
	unsent             int           // bytes that the kernel holds and cannot send yet
	retries            int           // how often in a row the oldest packet was resent in vain
	trip, shortestTrip time.Duration // round trips: smoothed, and the shortest
	segments           segments
}

// sendingOf asks the kernel about the data that a socket sends (TCP_INFO). ok is false if the kernel
// does not answer. Of several paths, the one that fares best counts, and bytes are added up.
func sendingOf(fd uintptr) (s sending, ok bool) {
	infos, ok := infosOf(fd)
	if !ok || len(infos) == 0 {
		return sending{}, false
	}
	s = sending{retries: math.MaxUint8, trip: math.MaxInt64, shortestTrip: math.MaxInt64, segments: segmentsIn(infos)}
	for _, info := range infos {
		s.arrived += int64(info.Bytes_acked) + int64(info.Sacked)*int64(info.Snd_mss) //nolint:gosec // less than 63 bits
		busy := info.Busy_time - info.Rwnd_limited - info.Sndbuf_limited
		s.busy = max(s.busy, time.Duration(busy)*time.Microsecond) //nolint:gosec // parts of Busy_time
		s.unsent += int(info.Notsent_bytes)
		s.retries = min(s.retries, int(info.Retransmits))
		s.trip = min(s.trip, time.Duration(info.Rtt)*time.Microsecond)
		s.shortestTrip = min(s.shortestTrip, time.Duration(info.Min_rtt)*time.Microsecond)
	}
	return s, true
}

// boundRate bounds how fast a connection sends, in bytes a second (SO_MAX_PACING_RATE in
// socket(7)); 0: no bound.
func boundRate(fd uintptr, rate int64) {
	value := int(rate)
	if rate == 0 {
		value = -1 // the kernel's value for no bound
	}
	//nolint:errcheck // on failure, other conns only wait longer
	unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE, value)
}
