//go:build unix

package listen

import (
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// duplicate returns a copy of a socket. The method File of package net does not serve: os/exec would then set the
// socket to blocking mode, and this process has the same socket.
func duplicate(c syscall.Conn) (*os.File, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	var copied int
	var failed error
	err = raw.Control(func(fd uintptr) { copied, failed = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0) })
	if err == nil {
		err = failed
	}
	if err != nil {
		return nil, os.NewSyscallError("fcntl", err)
	}
	return os.NewFile(uintptr(copied), "socket"), nil //nolint:gosec // the kernel returns no negative number here
}
