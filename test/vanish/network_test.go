package vanish

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/test/rig"
	"tunnel.example/tunnel/test/rig/rigtest"
)

const (
	insideIP   = "10.9.0.1"
	outsideIP  = "10.9.0.2"
	outsideMAC = "02:00:00:00:00:02"
)

// networks is the two networks of a test and the link between them.
type networks struct {
	t               *testing.T
	inside, outside *rig.Network
	far             *rig.Network // a third one, beyond inside; nil: none. See addFar
}

func newNetworks(t *testing.T) *networks {
	t.Helper()
	n := &networks{t: t, inside: rigtest.Network(t), outside: rigtest.Network(t)}
	n.ip(n.inside, "link add name veth0 type veth peer name veth0 address %s netns %s", outsideMAC, n.outside.Path())
	n.ip(n.inside, "addr add %s/24 dev veth0", insideIP)
	n.ip(n.outside, "addr add %s/24 dev veth0", outsideIP)
	n.ip(n.inside, "link set veth0 up")
	n.ip(n.outside, "link set veth0 up")
	// With 3 retries the kernel gives up some 3 s after the first lost segment; with the
	// default of 15 after a quarter of an hour.
	n.sysctl(n.inside, "tcp_retries2", "3")
	// Small buffers fill quickly. They are the link's, not the tunnel's.
	n.smallBuffers(n.inside)
	n.smallBuffers(n.outside)
	return n
}

func (n *networks) smallBuffers(network *rig.Network) {
	n.t.Helper()
	n.sysctl(network, "tcp_rmem", "4096 65536 262144")
	n.sysctl(network, "tcp_wmem", "4096 65536 262144")
}

// ip runs ip(8) in a network.
func (n *networks) ip(network *rig.Network, format string, args ...any) {
	n.t.Helper()
	if err := network.IP(fmt.Sprintf(format, args...)); err != nil {
		n.t.Fatal(err)
	}
}

// sysctl sets net.ipv4.NAME of a network. /proc/sys/net is that of the calling thread.
func (n *networks) sysctl(network *rig.Network, name, value string) {
	n.t.Helper()
	err := network.Do(func() error {
		return os.WriteFile(filepath.Join("/proc/sys/net/ipv4", name), []byte(value), 0)
	})
	if err != nil {
		n.t.Fatal(err)
	}
}

// silence is how the kernel inside learns of a vanished machine.
type silence string

const (
	// timeout: packets are lost without a word, so the kernel's error is ETIMEDOUT.
	timeout silence = "timeout"
	// unreachable: nobody answers ARP any more, so the kernel's error is EHOSTUNREACH.
	unreachable silence = "unreachable"
)

// cut takes the link down outside.
func (n *networks) cut(s silence) {
	n.t.Helper()
	if s == timeout {
		n.ip(n.inside, "neigh replace %s lladdr %s dev veth0 nud permanent", outsideIP, outsideMAC)
	} else {
		n.ip(n.inside, "neigh flush dev veth0 nud permanent")
	}
	n.ip(n.outside, "link set veth0 down")
}

// mend takes the link up again, and returns when the machine outside answers. For a second or more
// the kernel inside still drops packets, ARP requests among them, and a dial fails for it.
func (n *networks) mend() {
	n.t.Helper()
	n.ip(n.outside, "link set veth0 up")
	if n.far != nil {
		n.routeServices()
	}
	err := testkit.Poll(takes, func() error {
		c, err := n.inside.Dial(context.Background(), "tcp", outsideIP+":1")
		if err == nil {
			c.Close()
		}
		if errors.Is(err, syscall.ECONNREFUSED) {
			return nil // nobody listens there, so the machine has answered
		}
		return err
	})
	if err != nil {
		n.t.Fatalf("the link is up again and the machine outside does not answer: %v", err)
	}
}

// hurry lowers the keepalive times of the process's sockets that lead outside: the kernel
// ends a silent one after 3 s, not after 150.
func hurry(t *testing.T, p *rig.Process) {
	t.Helper()
	pidfd, err := unix.PidfdOpen(p.PID(), 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pidfd)
	dir := fmt.Sprintf("/proc/%d/fd", p.PID())
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		number, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		fd, err := unix.PidfdGetfd(pidfd, number, 0)
		if errors.Is(err, unix.EPERM) {
			t.Skip("needs the right to take sockets of the program (pidfd_getfd(2), CAP_SYS_PTRACE)")
		}
		if err != nil {
			continue // closed meanwhile
		}
		if peer, err := unix.Getpeername(fd); err == nil && leadsOutside(peer) {
			err = errors.Join(
				unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, 1),
				unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_KEEPCNT, 2),
				unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, 1))
			if err != nil {
				t.Errorf("setting the keepalive times of a socket: %v", err)
			}
		}
		unix.Close(fd)
	}
}

func leadsOutside(peer unix.Sockaddr) bool {
	switch peer := peer.(type) {
	case *unix.SockaddrInet4:
		return net.IP(peer.Addr[:]).String() == outsideIP
	case *unix.SockaddrInet6: // an IPv4 peer of a socket that takes both
		return net.IP(peer.Addr[:]).String() == outsideIP
	}
	return false
}

// tcpState returns the state of a TCP connection as its kernel has it, without a read
// or a write.
func tcpState(c net.Conn) (state uint8, err error) {
	raw, err := c.(syscall.Conn).SyscallConn()
	if err != nil {
		return 0, err
	}
	ctlErr := raw.Control(func(fd uintptr) {
		var info *unix.TCPInfo
		if info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			state = info.State
		}
	})
	return state, errors.Join(err, ctlErr)
}

// established is TCP_ESTABLISHED of include/net/tcp_states.h.
const established = 1
