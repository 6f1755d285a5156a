package relay

import (
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// mark is a bit in the mark of packets of this process that the rules must not redirect. No other program may set or
// read this bit. 0x1000 is free. kube-proxy has 0x4000 (to masquerade) and 0x8000 (to drop), which flannel and kubelet
// use as well. The CNI plugin portmap has 0x2000 (its key markMasqBit). Calico has 0xffff0000, Cilium reads 0x0f00,
// Tailscale has 0xff0000, and the AWS VPC CNI has 0x80. Istio's 0x539 and WireGuard's 0xca6c do not contain it.
const mark = 0x1000

// markMasquerade is on packets that the rules masquerade, in mode full. kube-proxy, which then does not run, uses the
// same bit for the same purpose. Programs that treat such packets specially know this bit.
const markMasquerade = 0x4000

// Unredirected is for net.Dialer.Control: the rules of Services do not redirect the connection. The edge uses it for
// connections to the cloud, which must not depend on the tunnel, and to endpoints, whose addresses may be redirected.
func Unredirected(_, _ string, c syscall.RawConn) error {
	return c.Control(func(fd uintptr) {
		// It fails without CAP_NET_ADMIN. Such a process has no rules either.
		unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, mark) //nolint:errcheck // as said above
	})
}

// boundSilence is for net.Dialer.Control and net.ListenConfig.Control of connections between edges. Such a connection
// ends if sent bytes stay unacknowledged for nearSilence (TCP_USER_TIMEOUT, which accepted connections inherit).
func boundSilence(_, _ string, c syscall.RawConn) error {
	return c.Control(func(fd uintptr) { setUserTimeout(fd, nearSilence) })
}

// unboundSilence undoes boundSilence.
func unboundSilence(c syscall.Conn) {
	if raw, err := c.SyscallConn(); err == nil {
		raw.Control(func(fd uintptr) { setUserTimeout(fd, 0) })
	}
}

func setUserTimeout(fd uintptr, d time.Duration) {
	//nolint:errcheck // on failure, only the default of the kernel counts
	unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(d.Milliseconds()))
}

// resendsOf asks the kernel about the acknowledgements of a connection without Multipath TCP (TCP_INFO). resends says
// that the kernel resends, and that no answer has come since. ago is the time since the last acknowledgement.
func resendsOf(c syscall.Conn) (ago time.Duration, resends bool) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, false
	}
	raw.Control(func(fd uintptr) {
		if info, failed := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); failed == nil {
			ago, resends = time.Duration(info.Last_ack_recv)*time.Millisecond, isResending(info)
		}
	})
	return ago, resends
}

// isResending returns the result resends of resendsOf.
func isResending(i *unix.TCPInfo) bool {
	if i.State == unix.BPF_TCP_CLOSE {
		return false // the next read or write reports it
	}
	// A peer that reads nothing may drop what it has no room for. Then the kernel resends for ever. The peer answers each
	// resent packet, but acknowledges no byte of it.
	unanswered := i.Unacked > 0 && i.Retransmits > 0 && i.Last_data_sent < i.Last_ack_recv
	// An answer sets Probes to zero. Probes are sent by keepalive or for a closed window.
	return unanswered || i.Probes > 1
}
