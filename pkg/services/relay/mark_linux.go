package relay

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// mark is on packets of this process that the rules leave alone. kube-proxy has 0x4000 and 0x8000.
const mark = 0x2000

// Unredirected is for net.Dialer.Control: the rules of Services leave the connection alone. The way to the cloud must
// not depend on the tunnel, and an endpoint may have an address that is redirected.
func Unredirected(_, _ string, c syscall.RawConn) error {
	return c.Control(func(fd uintptr) {
		// It fails without CAP_NET_ADMIN. Then this process has no rules.
		unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, mark) //nolint:errcheck // as said above
	})
}
