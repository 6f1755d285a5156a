package tunnel

import (
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// rawConn returns the socket of c, or nil if c is not a socket.
func rawConn(c net.Conn) syscall.RawConn {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return nil
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return nil
	}
	return raw
}

// unacked returns how many bytes that were written to a socket its peer has not acknowledged yet,
// a FIN included. It returns -1 if this kind of socket cannot tell.
func unacked(fd uintptr) int {
	n, err := unix.IoctlGetInt(int(fd), unix.SIOCOUTQ)
	if err != nil {
		return -1
	}
	return n
}

// inFlight reports whether bytes of a socket are on their way: the peer has not acknowledged them, or nobody has read
// them here.
func inFlight(fd uintptr) bool {
	unread, err := unix.IoctlGetInt(int(fd), unix.SIOCINQ)
	return err == nil && unread > 0 || unacked(fd) > 0
}

// hungUp reports whether both directions of a socket have ended, for any reason (POLLHUP and
// POLLERR in poll(2)). It does not consume the socket's error, which the kernel reports only once.
func hungUp(fd uintptr) bool { return polled(fd) != 0 }

// polled returns which of POLLHUP and POLLERR the socket has now.
func polled(fd uintptr) int16 {
	fds := []unix.PollFd{{Fd: int32(fd)}} //nolint:gosec // a descriptor
	if n, err := unix.Poll(fds, 0); err != nil || n == 0 {
		return 0
	}
	return fds[0].Revents & (unix.POLLHUP | unix.POLLERR)
}

// pollHangUp reports whether both directions of a socket have ended, and whether the socket has
// an error that the kernel has not yet reported to a read or a write.
func pollHangUp(raw syscall.RawConn) (over, failed bool) {
	raw.Control(func(fd uintptr) {
		events := polled(fd)
		over, failed = events != 0, events&unix.POLLERR != 0
	})
	return over, failed
}

// pendingError consumes the error of a socket that the kernel has not yet reported to a read or a
// write. It returns nil if there is none, or if the socket is closed. It checks POLLERR first:
// SO_ERROR alone would also show soft errors, for example of a link that is down for a moment.
// TCP survives soft errors (RFC 1122 section 4.2.3.9).
func pendingError(raw syscall.RawConn) error {
	var code int
	raw.Control(func(fd uintptr) {
		if polled(fd)&unix.POLLERR != 0 {
			code, _ = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
		}
	})
	if code == 0 {
		return nil
	}
	return syscall.Errno(code) //nolint:gosec // an errno
}
