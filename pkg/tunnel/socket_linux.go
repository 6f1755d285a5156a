package tunnel

import (
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// rawConn returns the socket of c, or nil where c is none.
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

// unacked returns how many bytes of a socket its peer has not acknowledged, a FIN included;
// -1: the socket is of a kind that cannot tell.
func unacked(fd uintptr) int {
	n, err := unix.IoctlGetInt(int(fd), unix.SIOCOUTQ)
	if err != nil {
		return -1
	}
	return n
}

// hungUp reports whether a socket is over in both directions, for whatever reason. It does not
// take the socket's error, which the kernel tells once (POLLHUP and POLLERR in poll(2)).
func hungUp(fd uintptr) bool { return polled(fd) != 0 }

func polled(fd uintptr) int16 {
	fds := []unix.PollFd{{Fd: int32(fd)}} //nolint:gosec // a descriptor
	if n, err := unix.Poll(fds, 0); err != nil || n == 0 {
		return 0
	}
	return fds[0].Revents & (unix.POLLHUP | unix.POLLERR)
}

// pollHangUp reports whether a socket is over in both directions, and whether it has an error
// that neither a read nor a write has been told yet.
func pollHangUp(raw syscall.RawConn) (over, failed bool) {
	raw.Control(func(fd uintptr) { //nolint:errcheck // closed: whoever closed it knows why
		events := polled(fd)
		over, failed = events != 0, events&unix.POLLERR != 0
	})
	return over, failed
}

// pendingError takes the error of a socket that neither a read nor a write has been told yet;
// nil: there is none, or the socket is closed. SO_ERROR alone would also show soft errors,
// such as those of a link that is away for a moment, which TCP survives (RFC 1122 section
// 4.2.3.9).
func pendingError(raw syscall.RawConn) error {
	var code int
	raw.Control(func(fd uintptr) { //nolint:errcheck // closed: whoever closed it knows why
		if polled(fd)&unix.POLLERR != 0 {
			code, _ = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
		}
	})
	if code == 0 {
		return nil
	}
	return syscall.Errno(code) //nolint:gosec // an errno
}
