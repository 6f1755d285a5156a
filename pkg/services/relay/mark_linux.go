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

// boundSilence is for net.Dialer.Control and net.ListenConfig.Control: a connection to another edge, or from one, ends
// if sent bytes stay unacknowledged for nearSilence (TCP_USER_TIMEOUT, which accepted connections inherit).
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

// resendsOf asks the kernel about the acknowledgements of a connection without Multipath TCP (TCP_INFO). resends: the
// kernel resends, and has no answer since. ago is the time since the last acknowledgement.
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

// isResending decides for resendsOf.
func isResending(i *unix.TCPInfo) bool {
	if i.State == unix.BPF_TCP_CLOSE {
		return false // the next read or write reports it
	}
	// A peer that reads nothing may drop what it has no room for. Then the kernel resends for ever, and each resent
	// packet has an answer, but no byte of it is acknowledged.
	unanswered := i.Unacked > 0 && i.Retransmits > 0 && i.Last_data_sent < i.Last_ack_recv
	// An answer sets Probes to zero. Probes are sent by keepalive or for a closed window.
	return unanswered || i.Probes > 1
}
