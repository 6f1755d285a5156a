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
func hungUp(fd uintptr) bool {
	fds := []unix.PollFd{{Fd: int32(fd)}} //nolint:gosec // a descriptor
	n, err := unix.Poll(fds, 0)
	return err == nil && n > 0 && fds[0].Revents&(unix.POLLHUP|unix.POLLERR) != 0
}

// pendingError takes the error of a socket that neither a read nor a write has been told yet;
// nil: there is none, or the socket is closed.
func pendingError(raw syscall.RawConn) error {
	var code int
	raw.Control(func(fd uintptr) { //nolint:errcheck // closed: whoever closed it knows why
		code, _ = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
	})
	if code == 0 {
		return nil
	}
	return syscall.Errno(code) //nolint:gosec // an errno
}
