package listen

import (
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// unread reports whether the kernel holds received bytes of c that this process has not read yet. A
// busy process reads late. If unread cannot find out, it returns false.
func unread(c net.Conn) bool {
	socket, ok := c.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := socket.SyscallConn()
	if err != nil {
		return false
	}
	n := 0
	raw.Control(func(fd uintptr) {
		n, err = unix.IoctlGetInt(int(fd), unix.SIOCINQ)
	})
	return err == nil && n > 0
}
