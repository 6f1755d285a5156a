package podnet

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/cni"
)

// The rules are in the kernel once, whatever is done twice; others' rules stay.
func TestRules(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	c, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	c.AddTable(&nftables.Table{Family: nftables.TableFamilyIPv4, Name: "foreign"})
	if err := c.Flush(); err != nil {
		t.Skipf("the kernel has no nftables: %v", err)
	}
	table := &nftables.Table{Family: nftables.TableFamilyINet, Name: tableName}
	chain := &nftables.Chain{Name: chainName, Table: table}
	handles := func() (all []uint64) {
		rules, err := c.GetRules(table, chain)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range rules {
			all = append(all, r.Handle)
		}
		return all
	}
	both := []netip.Prefix{net4, net6}
	for range 2 {
		if err := (linux{}).masquerade("tunnel0", both, nil); err != nil {
			t.Fatal(err)
		}
	}
	first := handles()
	if len(first) != 2 {
		t.Errorf("the rules are %v, want 2", first)
	}
	if err := (linux{}).masquerade("tunnel0", both, nil); err != nil || handles()[0] != first[0] {
		t.Errorf("rules that are right are written again: %v, %v, %v", first, handles(), err)
	}
	if err := (linux{}).masquerade("tunnel0", both[:1], nil); err != nil || len(handles()) != 1 {
		t.Errorf("with one network, the rules are %v, %v", handles(), err)
	}
	c.FlushTable(table)
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}
	if err := (linux{}).masquerade("tunnel0", both, nil); err != nil || len(handles()) != 2 {
		t.Errorf("after somebody flushed the table, the rules are %v, %v", handles(), err)
	}
	if tables, err := c.ListTablesOfFamily(nftables.TableFamilyIPv4); err != nil || len(tables) != 1 {
		t.Errorf("others' tables are %v, %v", tables, err)
	}
}

// A pod is seen outside under the node's address, and by the node under its own; also a pod of networks that the
// node had before.
func TestMasquerade(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	conf, err := cni.NewConf([]netip.Prefix{net4, net6})
	if err != nil {
		t.Fatal(err)
	}
	k := linux{}
	for range 2 {
		if err := k.bridge(conf); err != nil {
			t.Fatal(err)
		}
	}
	// The node gets other networks; its pods keep their addresses.
	other, err := cni.NewConf([]netip.Prefix{netip.MustParsePrefix("10.99.1.0/24"),
		netip.MustParsePrefix("fd00:99:1::/64")})
	if err != nil {
		t.Fatal(err)
	}
	if err := k.bridge(other); err != nil {
		t.Fatal(err)
	}
	if err := k.masquerade(conf.Bridge, other.Subnets, nil); err != nil {
		t.Skipf("the kernel has no nftables: %v", err)
	}
	outside, pod, later := newHost(t), newHost(t), newHost(t)
	// The node has uplink0 to the outside; the pod is on the bridge.
	outside.connect("uplink0", "", "192.0.2.1/24", "192.0.2.2/24", "2001:db8::1/64", "2001:db8::2/64")
	pod.connect("vethpod", conf.Bridge, "", "10.88.1.2/24", "", "fd00:88:1::2/64")
	pod.defaultRoutes("10.88.1.1", "fd00:88:1::1")
	later.connect("vethlater", conf.Bridge, "", "10.99.1.2/24", "", "fd00:99:1::2/64")
	later.defaultRoutes("10.99.1.1", "fd00:99:1::1")
	for _, c := range []struct{ server, seen string }{
		{"192.0.2.2", "192.0.2.1"}, {"2001:db8::2", "2001:db8::1"},
	} {
		for name, from := range map[string]*host{"the pod": pod, "the pod of the new networks": later} {
			if got := seenAs(t, outside, from, c.server); got != c.seen {
				t.Errorf("%s sees %s as %s, want %s", c.server, name, got, c.seen)
			}
		}
	}
	for _, c := range []struct{ server, seen string }{
		{"10.88.1.1", "10.88.1.2"}, {"fd00:88:1::1", "fd00:88:1::2"},
	} {
		if got := seenAs(t, nil, pod, c.server); got != c.seen {
			t.Errorf("the node sees the pod as %s, want %s", got, c.seen)
		}
	}
}

// Where /proc/sys is read-only, the bridge is made, and its settings are left to the plugin, until there are pods.
func TestBridgeInAContainer(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	runtime.LockOSThread() // never unlocked: the thread ends with its own mounts
	err := unix.Unshare(unix.CLONE_NEWNS)
	if err == nil {
		err = unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
	}
	if err == nil {
		err = unix.Mount("/proc/sys", "/proc/sys", "", unix.MS_BIND, "")
	}
	if err == nil {
		err = unix.Mount("", "/proc/sys", "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, "")
	}
	if err != nil {
		t.Skipf("no mounts of its own: %v", err)
	}
	conf, err := cni.NewConf([]netip.Prefix{net4})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := (linux{}).bridge(conf); err != nil {
			t.Fatalf("without pods: %v", err)
		}
	}
	bridge, err := netlink.LinkByName(conf.Bridge)
	if err != nil {
		t.Fatal(err)
	}
	addrs, err := netlink.AddrList(bridge, netlink.FAMILY_V4)
	if err != nil || len(addrs) != 1 || bridge.Attrs().Flags&net.FlagUp == 0 {
		t.Errorf("the bridge has %v, flags %v, %v", addrs, bridge.Attrs().Flags, err)
	}
	newHost(t).connect("vethpod", conf.Bridge, "", "10.88.1.2/24", "", "")
	err = (linux{}).bridge(conf)
	if _, ok := errors.AsType[readOnlyError](err); !ok || !strings.Contains(err.Error(), "ipv4.ip_forward to 1") {
		t.Errorf("with a pod: %v", err)
	}
}

// An edge whose networks for pods are those of its LAN says so, and the LAN stays reachable.
func TestNetworkOfTheLAN(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	lan := newHost(t)
	lan.connect("uplink0", "", "10.88.1.77/24", "10.88.1.1/24", "", "")
	n, _ := newNode(t, net4)
	n.kernel = linux{}
	err := n.apply(t.Context())
	if err == nil || !strings.Contains(err.Error(), "overlaps with 10.88.1.77/24 of link uplink0") {
		t.Errorf("the edge says %v", err)
	}
	wantWritten(t, n, "no file")
	if seen := seenAs(t, nil, lan, "10.88.1.77"); seen != "10.88.1.1" {
		t.Errorf("the node sees its router as %s", seen)
	}
}

// A link that appears after forwarding is on, or is started again, keeps its default route by advertisements. The
// bridge and the links of pods accept none.
func TestAdvertisements(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	conf, err := cni.NewConf([]netip.Prefix{net4, net6})
	if err != nil {
		t.Fatal(err)
	}
	acceptRA := func(link, value, want string) {
		t.Helper()
		file := filepath.Join("/proc/sys/net/ipv6/conf", link, "accept_ra")
		if value != "" {
			if err := os.WriteFile(file, []byte(value), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := (linux{}).bridge(conf); err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(file); err != nil || strings.TrimSpace(string(got)) != want {
			t.Errorf("accept_ra of %s is %s, %v, want %s", link, got, err, want)
		}
	}
	acceptRA("default", "1", "2")
	modem := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "modem0"}}
	if err := netlink.LinkAdd(modem); err != nil {
		t.Fatal(err)
	}
	acceptRA("modem0", "", "2")
	acceptRA("modem0", "1", "2") // as the tools of a distribution do when they start a link
	acceptRA("modem0", "0", "0")
	newHost(t).connect("vethpod", conf.Bridge, "", "10.88.1.2/24", "", "")
	acceptRA("vethpod", "1", "1")
	acceptRA(conf.Bridge, "1", "0")
	acceptRA("default", "1", "1") // the owner of the node has decided otherwise
	acceptRA("modem0", "1", "1")
}

// A link that is no bridge is left alone.
func TestNameIsTaken(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	link := netlink.NewVeth(netlink.LinkAttrs{Name: cni.DefaultBridge})
	link.PeerName = "peer0"
	if err := netlink.LinkAdd(link); err != nil {
		t.Fatal(err)
	}
	conf, err := cni.NewConf([]netip.Prefix{net4})
	if err != nil {
		t.Fatal(err)
	}
	if err := (linux{}).bridge(conf); err == nil || !strings.Contains(err.Error(), "link tunnel0 is a veth") {
		t.Errorf("another link with the bridge's name: %v", err)
	}
}
