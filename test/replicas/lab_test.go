package replicas

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"

	"tunnel/test/rig"
)

// ownNetwork marks a test process that runs in a network of its own.
const ownNetwork = "TUNNEL_TEST_OWN_NETWORK"

// inOwnNetwork runs the calling test again in a network that has nothing but loopback,
// and reports whether this is that run. Root needs nothing for it; others need user
// namespaces, and skip without them.
func inOwnNetwork(t *testing.T) bool {
	t.Helper()
	if os.Getenv(ownNetwork) != "" {
		return true
	}
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skipf("networks are made with ip(8), of iproute2: %v", err)
	}
	again := func(args ...string) *exec.Cmd {
		cmd := exec.Command(os.Args[0], args...)
		cmd.Env = append(os.Environ(), ownNetwork+"=1", programKey+"="+program)
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
		if os.Getuid() != 0 {
			cmd.SysProcAttr.Cloneflags |= syscall.CLONE_NEWUSER
			cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
			cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
		}
		return cmd
	}
	// Pdeathsig is about the thread that has started the child.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := again("-test.list=^$").Run(); err != nil {
		t.Skipf("this machine gives no network of its own to a process: %v", err)
	}
	out, err := again("-test.run=^"+t.Name()+"$", "-test.v", "-test.timeout=5m").CombinedOutput()
	if err != nil {
		t.Errorf("in a network of its own: %v", err)
	}
	t.Logf("%s", out)
	return false
}

// lab is hosts around a router, which is where the test runs. What passes between two
// hosts can be dropped.
type lab struct {
	t     *testing.T
	hosts int
}

func newLab(t *testing.T) *lab {
	t.Helper()
	l := &lab{t: t}
	l.ip("link set lo up")
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil {
		t.Fatal(err)
	}
	return l
}

// ip runs ip(8) in the router.
func (l *lab) ip(format string, args ...any) {
	l.t.Helper()
	if err := (*rig.Network)(nil).IP(fmt.Sprintf(format, args...)); err != nil {
		l.t.Fatal(err)
	}
}

// host makes a host.
func (l *lab) host() rig.Host {
	l.t.Helper()
	network, err := rig.NewNetwork()
	if err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(network.Close)
	l.hosts++
	router, self := fmt.Sprintf("10.77.%d.1", l.hosts), fmt.Sprintf("10.77.%d.2", l.hosts)
	l.ip("link add port%d type veth peer name uplink%d", l.hosts, l.hosts)
	l.ip("link set uplink%d netns %s", l.hosts, network.Path())
	l.ip("addr add %s/24 dev port%d", router, l.hosts)
	l.ip("link set port%d up", l.hosts)
	for _, command := range []string{
		fmt.Sprintf("addr add %s/24 dev uplink%d", self, l.hosts),
		fmt.Sprintf("link set uplink%d up", l.hosts),
		"route add default via " + router,
	} {
		if err := network.IP(command); err != nil {
			l.t.Fatal(err)
		}
	}
	return rig.Host{IP: self, Network: network}
}

// cut drops every packet between two hosts, without a word to either, until mend.
func (l *lab) cut(a, b rig.Host) (mend func()) {
	l.t.Helper()
	for _, way := range [][2]string{{a.IP, b.IP}, {b.IP, a.IP}} {
		l.ip("rule add from %s to %s blackhole", way[0], way[1])
	}
	return func() {
		l.t.Helper()
		for _, way := range [][2]string{{a.IP, b.IP}, {b.IP, a.IP}} {
			l.ip("rule del from %s to %s blackhole", way[0], way[1])
		}
	}
}
