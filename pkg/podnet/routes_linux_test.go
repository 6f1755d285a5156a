package podnet

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/vishvananda/netlink"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/cni"
)

// lan returns the links of a node at 192.168.7.2 and fd00:77::2.
func lan() []link {
	return []link{
		{2, netip.MustParseAddr("192.168.7.2"), netip.MustParsePrefix("192.168.7.0/24"), false},
		{2, netip.MustParseAddr("fd00:77::2"), netip.MustParsePrefix("fd00:77::/64"), false},
	}
}

// onBridge returns a link for the bridge of pods.
func onBridge(own, network string) link {
	return link{4, netip.MustParseAddr(own), netip.MustParsePrefix(network), true}
}

// neighbour returns a Neighbour with addresses, and networks of its pods; both are separated by blanks.
func neighbour(addresses, networks string) (n Neighbour) {
	for _, a := range strings.Fields(addresses) {
		n.Addresses = append(n.Addresses, netip.MustParseAddr(a))
	}
	for _, p := range strings.Fields(networks) {
		n.Networks = append(n.Networks, netip.MustParsePrefix(p))
	}
	return n
}

// routesOf returns routes as text: "NETWORK ADDRESS".
func (f *fake) routesOf() (all []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, r := range f.routed {
		all = append(all, r.to.String()+" "+r.by.String())
	}
	return all
}

func wantRoutes(t *testing.T, k *fake, why string, want ...string) {
	t.Helper()
	if got := k.routesOf(); !slices.Equal(got, want) {
		t.Errorf("%s: routes %q, want %q", why, got, want)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for i, r := range k.routed {
		if len(k.direct) != len(k.routed) || k.direct[i] != r.to {
			t.Errorf("%s: pods are hidden from %s: direct are %v", why, r.to, k.direct)
		}
	}
}

// routed returns a Node with routes and both families, at lan.
func routed(t *testing.T) (*Node, *fake) {
	t.Helper()
	n, k := newNode(t, net4, net6)
	n.cfg.Routes, k.here = true, lan()
	return n, k
}

// Others are told to which networks there are routes. Pods are hidden from all others.
func TestRoutedIsTold(t *testing.T) {
	n, k := routed(t)
	told := []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}
	n.cfg.Routed = func(networks []netip.Prefix) { told = networks }
	runs(t, n, func(t *testing.T) {
		if len(told) != 0 {
			t.Errorf("without neighbours: %v", told)
		}
		n.SetNeighbours([]Neighbour{neighbour("192.168.7.3", "10.88.2.0/24"), neighbour("192.168.9.3", "10.88.3.0/24"),
			neighbour("192.168.7.4", "10.88.4.0/24")})
		synctest.Wait()
		two, four := netip.MustParsePrefix("10.88.2.0/24"), netip.MustParsePrefix("10.88.4.0/24")
		check := func(why string, want ...netip.Prefix) {
			t.Helper()
			if !slices.Equal(told, want) || !slices.Equal(k.direct, want) {
				t.Errorf("%s: told are %v, and pods are not hidden from %v; want %v", why, told, k.direct, want)
			}
		}
		check("two neighbours are on a link", two, four)
		change := func(f func()) {
			k.mu.Lock()
			f()
			k.mu.Unlock()
			time.Sleep(interval)
			synctest.Wait()
		}
		change(func() { k.exists = errors.New("file exists") })
		check("the first route cannot be made", four)
		change(func() { k.exists, k.lost = nil, errors.New("no buffer space available") })
		check("the links cannot be read", four)
		wantRoutes(t, k, "the links cannot be read", "10.88.4.0/24 192.168.7.4")
		change(func() { k.lost = nil })
		check("all is well again", two, four)
	})
}

// The cloud tells neighbours, changes them, and is away at the next start.
func TestNeighboursComeAndGo(t *testing.T) {
	n, k := routed(t)
	both := neighbour("192.168.7.3 fd00:77::3", "10.88.2.0/24 fd00:88:2::/64")
	told := []string{"10.88.2.0/24 192.168.7.3", "fd00:88:2::/64 fd00:77::3"}
	runs(t, n, func(t *testing.T) {
		wantRoutes(t, k, "nothing is told")
		n.SetNeighbours([]Neighbour{both})
		synctest.Wait()
		wantRoutes(t, k, "a neighbour", told...)
		if got := n.Status(); !strings.HasSuffix(got, "; routes to the pods of other nodes: 2") {
			t.Errorf("the status is %q", got)
		}
		k.mu.Lock()
		k.here = lan()[:1]
		k.mu.Unlock()
		time.Sleep(interval)
		synctest.Wait()
		wantRoutes(t, k, "a link has lost its address of IPv6", told[0])
		k.mu.Lock()
		k.here = lan()
		k.mu.Unlock()
		n.SetNeighbours([]Neighbour{both, neighbour("192.168.7.4", "10.88.4.0/24 fd00:88:4::/64")})
		synctest.Wait()
		wantRoutes(t, k, "one of them has IPv4 alone", append(told, "10.88.4.0/24 192.168.7.4")...)
		n.SetNeighbours([]Neighbour{both})
		synctest.Wait()
		wantRoutes(t, k, "a neighbour has gone", told...)
		wantNote(t, n, "")
	})
	again, err := New(n.cfg)
	if err != nil {
		t.Fatal(err)
	}
	k.routed, again.kernel = nil, k
	runs(t, again, func(t *testing.T) {
		wantRoutes(t, k, "a start without the cloud", told...)
		again.SetNeighbours(nil)
		synctest.Wait()
		wantRoutes(t, k, "the cloud tells that there is no neighbour any more")
	})
	file := filepath.Join(n.cfg.ConfDir, neighboursFile)
	if err := os.WriteFile(file, []byte(`[{"addre`), 0o600); err != nil {
		t.Fatal(err)
	}
	damaged, err := New(n.cfg)
	if err != nil {
		t.Fatal(err)
	}
	damaged.kernel = k
	runs(t, damaged, func(t *testing.T) {
		wantRoutes(t, k, "the file is damaged")
		damaged.SetNeighbours([]Neighbour{both})
		synctest.Wait()
		wantRoutes(t, k, "the cloud tells neighbours after that", told...)
	})
	off := n.cfg
	off.Routes = false
	without, err := New(off)
	if err != nil {
		t.Fatal(err)
	}
	without.kernel = k
	runs(t, without, func(t *testing.T) {
		without.SetNeighbours([]Neighbour{both})
		synctest.Wait()
		wantRoutes(t, k, "routes are switched off")
		if _, err := os.Stat(file); err == nil {
			t.Error("the file of the neighbours is there still")
		}
	})
}

// A route is made only to networks that cannot be anything else than those of a neighbour's pods.
func TestRoutesRefused(t *testing.T) {
	good := neighbour("192.168.7.3", "10.88.2.0/24")
	for _, c := range []struct {
		name string
		told Neighbour
		note string
	}{
		{"all addresses", neighbour("192.168.7.4", "0.0.0.0/0"), "too large"},
		{"all addresses of IPv6", neighbour("fd00:77::4", "::/0"), "too large"},
		{"this node's pods", neighbour("192.168.7.4", "10.88.0.0/16"), "overlaps a network of this node's pods"},
		{"this node's pods of earlier", neighbour("192.168.7.4", "10.88.9.0/24"), "this node's pods had the network before"},
		{"this node's pods of earlier, and others", neighbour("192.168.7.4", "10.88.8.0/23"),
			"this node's pods had the network before"},
		{"the LAN", neighbour("192.168.7.4", "192.168.7.128/25"), "overlaps the network of a link"},
		{"this node", neighbour("192.168.7.2", "10.88.4.0/24"), "this machine's own"},
		{"link-local addresses", neighbour("192.168.7.4", "169.254.0.0/16"), "no addresses of pods"},
		{"a VPN", neighbour("192.168.7.4", "10.66.1.0/24"), "another program has a route to 10.66.1.0/24"},
		{"a VPN, and others", neighbour("192.168.7.4", "10.66.0.0/23"), "another program has a route to 10.66.1.0/24"},
		{"a neighbour's pods", neighbour("192.168.7.4", "10.88.2.128/25"), "the pod network of another node"},
		{"elsewhere", neighbour("192.168.8.4", "10.88.4.0/24"), ""},
		{"another family", neighbour("192.168.7.4", "fd00:88:4::/64"), ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			n, k := routed(t)
			k.here = append(k.here, onBridge("10.88.1.1", "10.88.1.0/24"), onBridge("10.88.9.1", "10.88.9.0/24"))
			k.others = []netip.Prefix{netip.MustParsePrefix("10.66.1.0/24"), netip.MustParsePrefix("10.0.0.0/8")}
			runs(t, n, func(t *testing.T) {
				n.SetNeighbours([]Neighbour{good, c.told})
				synctest.Wait()
				if c.name == "a neighbour's pods" {
					wantRoutes(t, k, c.name) // nobody knows which of the two is right
				} else {
					wantRoutes(t, k, c.name, "10.88.2.0/24 192.168.7.3")
				}
				wantNote(t, n, c.note)
				wantWritten(t, n, "10.88.1.0/24,fd00:88:1::/64")
			})
		})
	}
}

// A neighbour on two links is reached by the narrower network.
func TestNarrowestLink(t *testing.T) {
	n, k := routed(t)
	k.here = append(k.here, link{3, netip.MustParseAddr("10.0.0.2"), netip.MustParsePrefix("10.0.0.0/29"), false})
	runs(t, n, func(t *testing.T) {
		n.SetNeighbours([]Neighbour{neighbour("192.168.7.3 10.0.0.3", "10.88.2.0/24")})
		synctest.Wait()
		wantRoutes(t, k, "two links", "10.88.2.0/24 10.0.0.3")
		if k.routed[0].link != 3 {
			t.Errorf("the route is on link %d", k.routed[0].link)
		}
	})
}

// Pods of two nodes in one LAN see each other's addresses; everybody else in the LAN sees the node's. The host other is
// such a node with a pod; the test makes its routes.
func TestRouteToPods(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	conf, err := cni.NewConf([]netip.Prefix{net4, net6})
	if err != nil {
		t.Fatal(err)
	}
	k := linux{}
	if err := k.bridge(conf); err != nil {
		t.Fatal(err)
	}
	other, pod := newHost(t), newHost(t)
	other.connect("lan0", "", "192.168.7.2/24", "192.168.7.3/24", "fd00:77::2/64", "fd00:77::3/64")
	pod.connect("vethpod", conf.Bridge, "", "10.88.1.2/24", "", "fd00:88:1::2/64")
	pod.defaultRoutes("10.88.1.1", "fd00:88:1::1")
	other.in(func() error {
		for to, by := range map[string]string{"10.88.1.0/24": "192.168.7.2", "fd00:88:1::/64": "fd00:77::2"} {
			network := ipNet(netip.MustParsePrefix(to))
			if err := netlink.RouteAdd(&netlink.Route{Dst: network, Gw: net.ParseIP(by)}); err != nil {
				return err
			}
		}
		return address("lo", "10.88.2.2/32", "fd00:88:2::2/128")
	})
	links, err := k.links(conf.Bridge)
	links = slices.DeleteFunc(links, func(l link) bool { return l.bridge })
	if err != nil || len(links) != 2 || links[0].network != lan()[0].network || links[1].network != lan()[1].network ||
		links[0].own != lan()[0].own {
		t.Fatalf("the links are %v, %v", links, err)
	}
	want := []route{
		{netip.MustParsePrefix("10.88.2.0/24"), netip.MustParseAddr("192.168.7.3"), links[0].index},
		{netip.MustParsePrefix("fd00:88:2::/64"), netip.MustParseAddr("fd00:77::3"), links[1].index},
	}
	direct := []netip.Prefix{want[0].to, want[1].to}
	for range 2 {
		if err := k.masquerade(conf.Bridge, conf.Subnets, direct); err != nil {
			t.Skipf("the kernel has no nftables: %v", err)
		}
		if _, err := k.routes(want); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct{ server, seen string }{
		{"10.88.2.2", "10.88.1.2"}, {"fd00:88:2::2", "fd00:88:1::2"},
		{"192.168.7.3", "192.168.7.2"}, {"fd00:77::3", "fd00:77::2"},
	} {
		if got := seenAs(t, other, pod, c.server); got != c.seen {
			t.Errorf("%s sees the pod as %s, want %s", c.server, got, c.seen)
		}
	}
}

// Routes of other programs stay, and ours go when they are not wanted any more.
func TestOnlyOurRoutes(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	newHost(t).connect("lan0", "", "192.168.7.2/24", "192.168.7.3/24", "fd00:77::2/64", "fd00:77::3/64")
	k := linux{}
	links, err := k.links(cni.DefaultBridge)
	if err != nil || len(links) != 2 {
		t.Fatalf("the links are %v, %v", links, err)
	}
	foreign := &netlink.Route{Dst: ipNet(netip.MustParsePrefix("10.88.2.0/24")), Gw: net.ParseIP("192.168.7.9")}
	if err := netlink.RouteAdd(foreign); err != nil {
		t.Fatal(err)
	}
	to := func(network, by string) route {
		return route{netip.MustParsePrefix(network), netip.MustParseAddr(by), links[0].index}
	}
	all := func() (texts []string) {
		for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
			routes, err := netlink.RouteList(nil, family)
			if err != nil {
				t.Fatal(err)
			}
			for _, r := range routes {
				if r.Gw != nil {
					texts = append(texts, r.Dst.String()+" "+r.Gw.String())
				}
			}
		}
		slices.Sort(texts)
		return texts
	}
	taken, free := to("10.88.2.0/24", "192.168.7.3"), to("10.88.3.0/24", "192.168.7.4")
	made, err := k.routes([]route{taken, free, to("fd00:88:3::/64", "fd00:77::4")})
	if !slices.Equal(made, []netip.Prefix{free.to, netip.MustParsePrefix("fd00:88:3::/64")}) {
		t.Errorf("routes lead to %v", made)
	}
	if err == nil || !strings.Contains(err.Error(), "to 10.88.2.0/24 by 192.168.7.3: file exists: another program") {
		t.Errorf("a route that another program has: %v", err)
	}
	const theirs = "10.88.2.0/24 192.168.7.9"
	if got := all(); !slices.Equal(got, []string{theirs, "10.88.3.0/24 192.168.7.4", "fd00:88:3::/64 fd00:77::4"}) {
		t.Errorf("the routes are %q", got)
	}
	others, err := k.foreign(cni.DefaultBridge)
	if !slices.Contains(others, taken.to) || slices.Contains(others, free.to) || err != nil {
		t.Errorf("the routes of other programs lead to %v, %v", others, err)
	}
	if _, err := k.routes([]route{to("10.88.3.0/24", "192.168.7.5")}); err != nil {
		t.Error(err)
	}
	if got := all(); !slices.Equal(got, []string{theirs, "10.88.3.0/24 192.168.7.5"}) {
		t.Errorf("after another address, the routes are %q", got)
	}
	if _, err := k.routes(nil); err != nil {
		t.Error(err)
	}
	if got := all(); !slices.Equal(got, []string{theirs}) {
		t.Errorf("with no neighbours, the routes are %q", got)
	}
}
