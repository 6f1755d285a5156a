package egress

import (
	"errors"

	"golang.org/x/sys/unix"
)

// hasEnded reports whether a FIN or a reset is next to be read from a socket. While the socket has
// nothing to read, known is false.
func hasEnded(fd uintptr) (ended, known bool) {
	n, _, err := unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_PEEK|unix.MSG_DONTWAIT)
	for errors.Is(err, unix.EINTR) {
		n, _, err = unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_PEEK|unix.MSG_DONTWAIT)
	}
	return n <= 0, !errors.Is(err, unix.EAGAIN)
}

// driverOf returns the driver of a network device, from the kernel (as ethtool -i does), or "". Names of
// devices are chosen freely, and sysfs does not show every kind of device.
func driverOf(device string) string {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return ""
	}
	defer unix.Close(fd) //nolint:errcheck // nothing was written
	info, err := unix.IoctlGetEthtoolDrvinfo(fd, device)
	if err != nil {
		return ""
	}
	return unix.ByteSliceToString(info.Driver[:])
}
