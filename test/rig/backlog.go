package rig

import (
	"errors"
	"net"
	"strconv"
	"syscall"
	"time"
)

// FullBacklog returns the address of a listener whose backlog is full: the kernel
// answers no SYN, so whoever connects waits until they give up.
func FullBacklog() (addr string, closeAll func(), err error) {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return "", nil, err
	}
	var waiting []net.Conn
	closeAll = func() {
		for _, c := range waiting {
			c.Close()
		}
		syscall.Close(fd)
	}
	err = errors.Join(
		syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}),
		syscall.Listen(fd, 0),
	)
	name, nameErr := syscall.Getsockname(fd)
	if err = errors.Join(err, nameErr); err != nil {
		closeAll()
		return "", nil, err
	}
	addr = net.JoinHostPort("127.0.0.1", strconv.Itoa(name.(*syscall.SockaddrInet4).Port))
	for range 8 {
		c, err := net.DialTimeout("tcp", addr, 300*time.Millisecond)
		if err != nil {
			return addr, closeAll, nil
		}
		waiting = append(waiting, c)
	}
	closeAll()
	return "", nil, errors.New("the backlog does not fill up")
}
