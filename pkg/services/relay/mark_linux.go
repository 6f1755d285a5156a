package relay

import (
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// mark is on packets of this process that the rules leave alone. Nobody else may set or read this bit, since packets
// that have it are not redirected. 0x1000 is free: kube-proxy has 0x4000 (to masquerade) and 0x8000 (to drop), which
// flannel and kubelet use as well; the CNI plugin portmap has 0x2000 (its key markMasqBit); Calico has 0xffff0000;
// Cilium reads 0x0f00; Tailscale has 0xff0000; the AWS VPC CNI has 0x80; Istio's 0x539 and WireGuard's 0xca6c do not
// contain it.
const mark = 0x1000

// markMasquerade is on packets that are masqueraded, in mode full. It is kube-proxy's bit for the same purpose:
// programs that treat such packets in a way of their own know it, and kube-proxy does not run.
const markMasquerade = 0x4000

// Unredirected is for net.Dialer.Control: the rules of Services leave the connection alone. The way to the cloud must
// not depend on the tunnel, and an endpoint may have an address that is redirected.
func Unredirected(_, _ string, c syscall.RawConn) error {
	return c.Control(func(fd uintptr) {
		// It fails without CAP_NET_ADMIN. Then this process has no rules.
		unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, mark) //nolint:errcheck // as said above
	})
}

// silence is how long a connection to another edge, or from one, may wait for an acknowledgement. The kernel's default
// is some 15 minutes.
const silence = 30 * time.Second

// boundSilence is for net.Dialer.Control and net.ListenConfig.Control: a connection whose peer has vanished ends after
// silence (TCP_USER_TIMEOUT, which accepted connections inherit).
func boundSilence(_, _ string, c syscall.RawConn) error {
	return c.Control(func(fd uintptr) {
		//nolint:errcheck // on failure, only the default of the kernel counts
		unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(silence.Milliseconds()))
	})
}
