package check

import (
	"errors"
	"net"
	"syscall"

	"golang.org/x/sys/unix"
)

// canShorten says that shorten works on this system.
const canShorten = true

// shorten makes a socket send and ask for segments of shortSegment bytes (tcp(7), TCP_MAXSEG).
func shorten(_, _ string, raw syscall.RawConn) error {
	var failed error
	err := raw.Control(func(fd uintptr) {
		failed = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_MAXSEG, shortSegment)
	})
	return errors.Join(err, failed)
}

// pathMTU returns, in bytes, the MTU of a connection's path as the kernel knows it, and the size of the segments that
// the kernel sends.
func pathMTU(conn net.Conn) (mtu, segment int, ok bool) {
	for {
		under, is := conn.(interface{ NetConn() net.Conn })
		if !is {
			break
		}
		conn = under.NetConn()
	}
	tcp, is := conn.(*net.TCPConn)
	if !is {
		return 0, 0, false
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return 0, 0, false
	}
	var info *unix.TCPInfo
	var failed error
	err = raw.Control(func(fd uintptr) {
		info, failed = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
	})
	if err != nil || failed != nil {
		return 0, 0, false
	}
	return int(info.Pmtu), int(info.Snd_mss), true
}
