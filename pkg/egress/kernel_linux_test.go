package egress

import (
	"errors"
	"net/netip"
	"os/exec"
	"syscall"
	"testing"

	testrig "tunnel.example/tunnel/test/rig"
)

// newNetwork makes a network with the devices and routes that commands of ip(8) add.
func newNetwork(t testing.TB, commands ...string) *testrig.Network {
	t.Helper()
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skipf("networks are made with ip(8), of iproute2: %v", err)
	}
	n, err := testrig.NewNetwork()
	if errors.Is(err, syscall.EPERM) {
		t.Skip("needs the right to make network namespaces (CAP_SYS_ADMIN)")
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.Close)
	for _, c := range commands {
		if err := n.IP(c); err != nil {
			t.Fatal(err)
		}
	}
	return n
}

// A kernel reports routes in the form that testRoutes has.
func TestRoutesOfKernel(t *testing.T) {
	n := newNetwork(t,
		"link add up0 type veth peer name far0", "link set up0 up", "link set far0 up",
		"link add pod1 type veth peer name far1", "link set pod1 up", "link set far1 up",
		"link add pod2 type veth peer name far2", "link set pod2 up", "link set far2 up",
		"link add cni0 type bridge", "link set far1 master cni0", "link set cni0 up",
		"addr add 192.0.2.2/24 dev up0", "route add default via 192.0.2.1 dev up0",
		"addr add 10.88.3.1/32 dev pod2", "route add 10.88.3.1 dev pod2 scope link",
		"addr add 10.88.1.1/24 dev cni0", "-6 addr add fd00:1::1/64 dev cni0 nodad",
		"route add 10.88.2.5 dev pod1",
		"route add 10.88.3.0/24 via 10.88.3.1 dev pod2",
		"route add 10.88.4.0/24 via 10.88.1.9 dev cni0",
		"route add unreachable 10.88.6.0/24",
		"route add blackhole 10.88.1.128/25",
		"route add prohibit 10.88.1.64/26",
		"route add 10.88.7.0/24 nexthop dev pod1 nexthop via 192.0.2.1 dev up0",
		"-6 route add fd00:2::7 dev pod2",
		"-6 route add fd00:2::/64 via fd00:1::9 dev cni0",
		"-6 route add unreachable fd00:3::/64",
		"-6 route add default via fe80::1 dev up0",
	)
	var routes []route
	devices := systemDevices()
	check := func(addr string) (inside bool) {
		err := n.Do(func() error {
			// sysfs shows the devices of the network in which it was mounted.
			inside = routedToContainers(netip.MustParseAddr(addr), routes, func(link int) bool {
				driver := devices.driver(devices.name(link))
				return driver == "veth" || driver == "bridge"
			})
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return inside
	}
	err := n.Do(func() (err error) {
		routes, err = readRoutes()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for addr, want := range map[string]bool{
		"10.88.1.7":   true,  // on a bridge
		"10.88.1.1":   false, // our own address on that bridge
		"10.88.1.70":  true,  // a prohibit route: the kernel refuses the dial
		"10.88.1.130": false, // a blackhole route
		"10.88.2.5":   true,  // a host route
		"10.88.2.6":   false, // no route but the default route
		"10.88.3.9":   true,  // the gateway is our own address
		"10.88.4.9":   false, // the gateway is another machine
		"10.88.6.9":   false, // an unreachable route
		"10.88.7.9":   true,  // the first of two next hops
		"192.0.2.9":   false, // on the device of the default route
		"8.8.8.8":     false,
		"fd00:1::7":   true,
		"fd00:1::1":   false, // our own address
		"fd00:2::7":   true,
		"fd00:2::8":   false, // the gateway is another machine
		"fd00:3::1":   false, // an unreachable route
		"2001:db8::1": false,
	} {
		if got := check(addr); got != want {
			t.Errorf("%s: %v\n%+v", addr, got, routes)
		}
	}
}

// What a dial to a pod costs on a node with 110 pods.
func BenchmarkReadRoutes(b *testing.B) {
	var commands []string
	for i := range 110 {
		name := "pod" + string(rune('a'+i/26)) + string(rune('a'+i%26))
		commands = append(commands, "link add "+name+" type veth peer name far"+name, "link set "+name+" up",
			"route add "+netip.AddrFrom4([4]byte{10, 88, 1, byte(i)}).String()+" dev "+name)
	}
	n := newNetwork(b, commands...)
	b.ReportAllocs()
	err := n.Do(func() error {
		for b.Loop() {
			if _, err := readRoutes(); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		b.Fatal(err)
	}
}
