package konnectivity

import "golang.org/x/sys/unix"

// limitSocketBuffer makes a socket accept only few bytes that its reader has not read. For a socket that
// is not TCP, it sets the size of the send buffer.
func limitSocketBuffer(fd uintptr) {
	if unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, socketBuffer) != nil {
		//nolint:errcheck // without this setting, progress of a slow reader is seen later
		unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_SNDBUF, socketBuffer)
	}
}
