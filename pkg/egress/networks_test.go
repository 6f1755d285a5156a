package egress

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/konnectivity"
	"tunnel.example/tunnel/pkg/tunnel"
)

func prefixes(all ...string) []netip.Prefix {
	var ps []netip.Prefix
	for _, s := range all {
		ps = append(ps, netip.MustParsePrefix(s))
	}
	return ps
}

func FuzzNetworks(f *testing.F) {
	f.Add(encodeNetworks(prefixes("10.88.1.0/24", "fd00::/64")))
	f.Add([]byte{0x0a, 0x01, 'x'})
	f.Fuzz(func(t *testing.T, b []byte) {
		all, err := decodeNetworks(b)
		if err != nil {
			return
		}
		again, err := decodeNetworks(encodeNetworks(all))
		if err != nil || !slices.Equal(all, again) || len(all) > maxNetworks {
			t.Fatalf("%v became %v: %v", all, again, err)
		}
	})
}

// testLinks are the names of the devices in testRoutes, by index less 1.
var testLinks = []string{"eth0", "cni0", "cali1", "cil", "tun0", "eth1"}

// linkOf returns the index of a device in testLinks.
func linkOf(name string) int { return slices.Index(testLinks, name) + 1 }

// nameOfLink returns the name of a device in testLinks, or "".
func nameOfLink(link int) string {
	if link == 0 {
		return ""
	}
	return testLinks[link-1]
}

// testRoutes are routing tables of real kernels: flannel's bridge and calico's host routes.
func testRoutes() ([]route, error) {
	all := []netlink.Route{
		entry("0.0.0.0/0", "eth0", "192.0.2.1"),
		entry("192.0.2.0/24", "eth0", ""),
		entry("10.88.1.0/24", "cni0", ""),
		entry("10.88.2.5/32", "cali1", ""),
		entry("10.88.3.0/24", "cil", "10.88.3.1"),
		entry("10.88.4.0/24", "tun0", "10.88.5.9"),
		entry("10.88.5.0/24", "eth1", ""),
		{Dst: network("10.88.6.0/24"), Type: unix.RTN_UNREACHABLE},
		{Dst: network("10.88.6.0/25"), Type: unix.RTN_PROHIBIT},
		entry("fd00:1::/64", "cni0", ""),
		entry("::/0", "eth0", "fe80::1"),
	}
	own := map[netip.Addr]bool{netip.MustParseAddr("10.88.3.1"): true}
	return routesOf(all, own), nil
}

// entry returns a route as the kernel reports it.
func entry(to, device, gateway string) netlink.Route {
	return netlink.Route{Dst: network(to), LinkIndex: linkOf(device), Gw: net.ParseIP(gateway), Type: unix.RTN_UNICAST}
}

// network parses a network.
func network(cidr string) *net.IPNet {
	_, n, err := net.ParseCIDR(cidr)
	if err != nil {
		panic(err)
	}
	return n
}

// testDevices are the devices of testRoutes. The bridge cni0 has the ports veth1 and cni0port.
func testDevices(t *testing.T, cni0port string) devices {
	t.Helper()
	d := devices{sysfs: t.TempDir(), name: nameOfLink, driver: func(device string) string {
		return map[string]string{"eth0": "e1000e", "eth1": "igb", "cni0": "bridge", "cali1": "veth", "cil": "veth",
			"veth1": "veth", "netkit1": "netkit", "tun0": "tun",
			"eth0.100": "802.1Q VLAN Support", "bond0": "bonding", "wg0": "wireguard", "vxlan1": "vxlan", "tap1": "tun"}[device]
	}}
	ports := filepath.Join(d.sysfs, "cni0", "brif")
	if err := os.MkdirAll(ports, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{"veth1", cni0port} {
		if err := os.WriteFile(filepath.Join(ports, p), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return d
}

// Only virtual pairs, and bridges of them, lead to containers. Most of the other devices have no hardware
// in sysfs, and still lead out of the machine.
func TestLeadInside(t *testing.T) {
	d := testDevices(t, "netkit1")
	for device, want := range map[string]bool{
		"cali1": true, "netkit1": true, "cni0": true,
		"eth0": false, "eth0.100": false, "bond0": false, "wg0": false, "tun0": false, "vxlan1": false, "": false,
		"unknown": false,
	} {
		if d.leadsToContainers(device) != want {
			t.Errorf("%s: %v", device, !want)
		}
	}
	for _, port := range []string{"eth1", "eth0.100", "bond0", "vxlan1", "tap1", "unknown"} {
		if testDevices(t, port).leadsToContainers("cni0") {
			t.Errorf("a bridge with %s leads inside", port)
		}
	}
}

// driverOf asks the kernel correctly: loopback has no driver, and hardware is no virtual pair.
func TestDriver(t *testing.T) {
	all, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range all {
		_, err := os.Stat(filepath.Join("/sys/class/net", i.Name, "device"))
		if hardware := err == nil; hardware && (driverOf(i.Name) == "" || systemDevices().leadsToContainers(i.Name)) ||
			i.Flags&net.FlagLoopback != 0 && systemDevices().leadsToContainers(i.Name) {
			t.Errorf("%s is driven by %q", i.Name, driverOf(i.Name))
		}
	}
}

func TestOnThisMachine(t *testing.T) {
	routes, _ := testRoutes()
	devices := testDevices(t, "cali1")
	if len(routes) != 9 {
		t.Fatalf("%d routes: %+v", len(routes), routes)
	}
	for addr, want := range map[string]bool{
		"10.88.1.7": true,  // on a bridge
		"10.88.2.5": true,  // a host route
		"10.88.2.6": false, // no route but the default route
		"10.88.3.9": true,  // the gateway is our own address
		"10.88.4.9": false, // the gateway is another machine
		"10.88.5.9": false, // a hardware device
		"10.88.6.9": false, // a reject route
		"192.0.2.9": false, // a neighbour on our network
		"8.8.8.8":   false,
		"fd00:1::7": true,
		"fd00:2::7": false,
		"10.88.1.0": true,
		"127.0.0.1": false, // permitted by rules only
	} {
		if got := routedToContainers(netip.MustParseAddr(addr), routes, devices.linkLeadsToContainers); got != want {
			t.Errorf("%s: %v", addr, got)
		}
	}
}

// The routing tables of this machine can be read, and no other machine is a container.
func TestReadRoutes(t *testing.T) {
	routes, err := readRoutes()
	if err != nil {
		t.Fatal(err)
	}
	if routedToContainers(netip.MustParseAddr("198.51.100.1"), routes, systemDevices().linkLeadsToContainers) {
		t.Errorf("a documentation address is on this machine: %+v", routes)
	}
}

// An edge dials an address only if the cloud has named its network, and it is routed to containers here.
func TestPods(t *testing.T) {
	policy, err := auth.ParsePolicy([]string{"127.0.0.1:1"})
	if err != nil {
		t.Fatal(err)
	}
	log, text := testkit.NewLog()
	e := NewEdge(policy, log)
	e.pods.routes, e.pods.devices = testRoutes, testDevices(t, "cali1")
	permits := func(addr string) bool { return e.policy.Permits(netip.MustParseAddrPort(addr)) }
	if permits("10.88.1.7:80") {
		t.Error("a pod is dialled before the cloud has named its network")
	}
	hear := e.Routes()[typeNetworks]
	named := encodeNetworks(prefixes("10.88.1.0/24", "192.0.2.0/24", "fd00:1::/64"))
	if err := hear(t.Context(), networksMessage(named)); err != nil {
		t.Fatal(err)
	}
	for addr, want := range map[string]bool{
		"10.88.1.7:80": true, "[fd00:1::7]:80": true, "[::ffff:10.88.1.7]:80": true,
		"10.88.3.9:80": false, // routed to containers, but not named
		"192.0.2.9:80": false, // named, but not routed to containers
		"127.0.0.1:1":  true,
		"127.0.0.1:2":  false,
	} {
		if permits(addr) != want {
			t.Errorf("%s: %v", addr, !want)
		}
	}
	if policy.Permits(netip.MustParseAddrPort("10.88.1.7:80")) {
		t.Error("other modules may dial pods, too")
	}
	e.pods.routes = func() ([]route, error) { return nil, errors.New("a route without sense") }
	if permits("10.88.1.7:80") || permits("10.88.1.8:80") {
		t.Error("a pod is dialled although the routes cannot be read")
	}
	if n := len(text.Lines("level=WARN", "cannot be read", "a route without sense")); n != 1 {
		t.Errorf("%d warnings, want one:\n%s", n, text)
	}
	e.pods.routes = testRoutes
	if err := hear(t.Context(), networksMessage(encodeNetworks(nil))); err != nil || permits("10.88.1.7:80") {
		t.Error("a network stays that the cloud has taken back")
	}
	if err := hear(t.Context(), networksMessage([]byte{0x0a, 1, 'x'})); err == nil {
		t.Error("nonsense is accepted")
	}
}

// networksMessage returns a received message with that data.
func networksMessage(data []byte) *tunnel.Incoming {
	return &tunnel.Incoming{Message: &tunnel.Message{Data: data}}
}

// link is the transport of a session that records the messages sent to it.
type link struct {
	tunnel.Link
	sent chan *tunnel.Message
}

func newLink() link { return link{sent: make(chan *tunnel.Message, 9)} }

func (l link) Send(m *tunnel.Message) error {
	l.sent <- m
	return nil
}

// teller runs announceNetworks of a front door until end is called.
func teller(t *testing.T, kubernetes bool, n *nodes, dir *tunnel.Directory) (end func()) {
	t.Helper()
	door, err := New(Config{Identifiers: n, Kubernetes: kubernetes, Sessions: dir}, n, n, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		door.announceNetworks(ctx)
	}()
	return func() {
		cancel()
		<-done
	}
}

// is waits for the next message to an edge.
func (l link) is(t *testing.T, why string, networks []netip.Prefix) {
	t.Helper()
	m := <-l.sent
	if got, err := decodeNetworks(m.Data); err != nil || m.Category != "egress" || m.Type != "networks" ||
		!slices.Equal(got, networks) {
		t.Errorf("%s: %+v, %v", why, m, err)
	}
}

func TestTell(t *testing.T) {
	dir := new(tunnel.Directory)
	n := &nodes{unknown: true, changed: make(chan struct{})}
	end := teller(t, true, n, dir)
	a, b := newLink(), newLink()
	dir.Attach(&tunnel.Session{Node: "b", Link: b})
	dir.Attach(&tunnel.Session{Node: "a", Link: a})
	change := func(networks []netip.Prefix) {
		n.mu.Lock()
		n.unknown, n.reach = false, map[tunnel.NodeName]konnectivity.Identifiers{"a": {Networks: networks}, "b": {}}
		before := n.changed
		n.changed = make(chan struct{})
		n.mu.Unlock()
		close(before)
	}
	change(prefixes("10.88.1.0/24"))
	a.is(t, "it has joined, and its networks are known", prefixes("10.88.1.0/24"))
	b.is(t, "it has joined, and was told of some before", nil)
	change(prefixes("10.88.9.0/24"))
	a.is(t, "it has another network", prefixes("10.88.9.0/24"))
	change(nil)
	a.is(t, "it has none any more", nil)
	a2 := newLink()
	change(prefixes("10.88.9.0/24"))
	a.is(t, "it has one again", prefixes("10.88.9.0/24"))
	dir.Attach(&tunnel.Session{Node: "a", Link: a2})
	a2.is(t, "it has joined again", prefixes("10.88.9.0/24"))
	end()
	if len(b.sent)+len(a.sent)+len(a2.sent) > 0 {
		t.Error("somebody was told what he knows")
	}
}

// Networks that an edge claims are never announced to it.
func TestClaimsAreNotAnnounced(t *testing.T) {
	dir := new(tunnel.Directory)
	n := &nodes{reach: map[tunnel.NodeName]konnectivity.Identifiers{"a": {Networks: prefixes("10.88.1.0/24")}},
		changed: make(chan struct{})}
	end := teller(t, false, n, dir)
	a := newLink()
	dir.Attach(&tunnel.Session{Node: "a", Link: a})
	a.is(t, "it has joined", nil)
	end()
}
