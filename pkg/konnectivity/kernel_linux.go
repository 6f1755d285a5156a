package konnectivity

import "golang.org/x/sys/unix"

// boundQueue bounds how many bytes a socket takes that its reader has not.
func boundQueue(fd uintptr) {
	if unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, socketQueue) != nil {
		unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUF, socketQueue) //nolint:errcheck // it is slower to notice, then
	}
}
