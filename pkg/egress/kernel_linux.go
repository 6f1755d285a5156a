package egress

import (
	"errors"

	"golang.org/x/sys/unix"
)

// hasEnded reports whether a socket has a FIN or a reset next. It is not known while nothing
// is there.
func hasEnded(fd uintptr) (ended, known bool) {
	n, _, err := unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_PEEK|unix.MSG_DONTWAIT)
	for errors.Is(err, unix.EINTR) {
		n, _, err = unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_PEEK|unix.MSG_DONTWAIT)
	}
	return n <= 0, !errors.Is(err, unix.EAGAIN)
}

// driverOf asks the kernel (ethtool -i). Who made a device chose its name, and sysfs does not
// say of every kind what it is.
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
