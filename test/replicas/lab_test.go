package replicas

import (
	"fmt"
	"os"
	"testing"

	"tunnel.example/tunnel/test/rig"
)

// lab is hosts around a router, which is where the test runs. What passes between two
// hosts can be dropped.
type lab struct {
	t     *testing.T
	hosts int
}

func newLab(t *testing.T) *lab {
	t.Helper()
	l := &lab{t: t}
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
