package konnectivity

import "golang.org/x/sys/unix"

// limitSocketBuffer bounds the bytes that a socket accepts from us and its reader has not read. For
// a socket that is not TCP it sets the send buffer.
func limitSocketBuffer(fd uintptr) {
	if unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, socketBuffer) != nil {
		//nolint:errcheck // without it, progress of a slow reader is seen later
		unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUF, socketBuffer)
	}
}
