package cni

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"

	"tunnel.example/tunnel/internal/testkit"
)

const (
	subnet4 = "10.88.1.0/24"
	subnet6 = "fd00:88:1::/64"
)

// Every verb, in every version of the specification, for every family.
func TestVerbs(t *testing.T) {
	if !inOwnNetwork(t) {
		return
	}
	for _, version := range []string{"0.3.1", "0.4.0", "1.0.0", "1.1.0"} {
		for _, subnets := range [][]string{{subnet4}, {subnet6}, {subnet4, subnet6}} {
			t.Run(version+" "+strings.Join(subnets, ","), func(t *testing.T) {
				verbs(t, newContainers(t, version, subnets...))
			})
		}
	}
}

func verbs(t *testing.T, c *containers) {
	out, err := c.run("VERSION", attached{}, nil)
	if !strings.Contains(string(out), `["0.3.1","0.4.0","1.0.0","1.1.0"]`) || err != nil {
		t.Fatalf("VERSION: %s, %v", out, err)
	}
	if err := c.status(); c.version == "1.1.0" && err != nil {
		t.Fatalf("STATUS before the first pod: %v", err)
	}
	web, db := c.newPod("web-0"), c.newPod("db-0")
	checkResult(t, web, web.add())
	checkResult(t, db, db.add())
	for i := range web.addrs {
		reaches(t, web, db, db.addrs[i])
		reaches(t, db, web, web.addrs[i])
		reaches(t, nil, web, web.addrs[i])
		reaches(t, web, nil, gatewayOf(c.conf.Subnets[i]))
	}
	if c.version == "0.3.1" {
		if err := web.check(); err == nil {
			t.Error("CHECK came with 0.4.0, and is accepted in 0.3.1")
		}
	} else if err := web.check(); err != nil {
		t.Errorf("CHECK: %v", err)
	}
	had := join(web.addrs)
	_, err = web.tryAdd()
	refused(t, "ADD of a link that is there", err, types.ErrInvalidEnvironmentVariables, "has a link eth0 already")
	if c.version != "0.3.1" {
		if err := web.check(); err != nil {
			t.Errorf("CHECK after an ADD that was refused: %v", err)
		}
	}
	web.del()
	web.del()
	reaches(t, nil, db, db.addrs[0])
	web.inside(func() error {
		if _, err := netlink.LinkByName("eth0"); err == nil {
			t.Error("eth0 is in the pod after DEL")
		}
		return nil
	})
	again := c.newPod("web-0")
	again.add()
	want(t, "web-0, made again", join(again.addrs), had)
	if c.version != "1.1.0" {
		if err := c.gc(nil); err == nil || c.status() == nil {
			t.Errorf("GC and STATUS came with 1.1.0, and are accepted in %s", c.version)
		}
		again.del()
	} else if err := c.gc([]types.GCAttachment{{ContainerID: db.rt.container, IfName: "eth0"}}); err != nil {
		t.Errorf("GC: %v", err)
	}
	reaches(t, nil, db, db.addrs[0])
	want(t, "links of the node", strings.Join(hostLinks(t), ","), db.hostLink())
	db.del()
	c.nothingLeft("after DEL")
	removeBridge(t)
}

func removeBridge(t *testing.T) {
	t.Helper()
	if bridge, err := netlink.LinkByName(DefaultBridge); err != nil {
		t.Errorf("the bridge: %v", err)
	} else if err := netlink.LinkDel(bridge); err != nil {
		t.Error(err)
	}
}

// checkResult holds what ADD says against what is.
func checkResult(t *testing.T, p *pod, result *current.Result) {
	t.Helper()
	if len(result.Interfaces) != 3 || result.Interfaces[0].Name != "tunnel0" || result.Interfaces[0].Sandbox != "" ||
		result.Interfaces[1].Name != p.hostLink() || result.Interfaces[1].Sandbox != "" ||
		result.Interfaces[2].Name != "eth0" || result.Interfaces[2].Sandbox != p.rt.netns {
		t.Fatalf("the interfaces are %v", result.Interfaces)
	}
	for _, i := range result.Interfaces[:2] {
		link, err := netlink.LinkByName(i.Name)
		if err != nil || link.Attrs().HardwareAddr.String() != i.Mac {
			t.Errorf("%s has not the hardware address %s: %v, %v", i.Name, i.Mac, link, err)
		}
	}
	host, err := netlink.LinkByName(p.hostLink())
	if err != nil {
		t.Fatal(err)
	}
	if info, err := netlink.LinkGetProtinfo(host); err != nil || !info.Hairpin {
		t.Errorf("%s is not in hairpin mode: %v, %v", p.hostLink(), info, err)
	}
	if len(result.IPs) != len(p.c.conf.Subnets) || len(result.Routes) != 2*len(p.c.conf.Subnets) {
		t.Fatalf("the addresses are %v, the routes %v", result.IPs, result.Routes)
	}
	for i, ip := range result.IPs {
		subnet, addr := p.c.conf.Subnets[i], p.addrs[i]
		ones, bits := ip.Address.Mask.Size()
		gateway, _ := netip.AddrFromSlice(ip.Gateway)
		if ones != bits || gateway.Unmap() != gatewayOf(subnet) || *ip.Interface != 2 || !usable(subnet, addr) {
			t.Errorf("address %d is %v", i, ip)
		}
	}
	p.inside(func() error {
		link, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		if link.Attrs().HardwareAddr.String() != result.Interfaces[2].Mac {
			t.Errorf("eth0 has the hardware address %s, not %s", link.Attrs().HardwareAddr, result.Interfaces[2].Mac)
		}
		for i, ip := range result.IPs {
			if err := checkAddress(link, p.addrs[i]); err != nil {
				t.Error(err)
			}
			gateway, _ := netip.AddrFromSlice(ip.Gateway)
			if err := checkRoutes(link, gateway.Unmap()); err != nil {
				t.Error(err)
			}
		}
		return nil
	})
}

// The specification has DEL succeed when what it should remove is gone.
func TestDelTolerates(t *testing.T) {
	if !inOwnNetwork(t) {
		return
	}
	for name, change := range map[string]func(*pod){
		"the namespace is gone": func(p *pod) { p.end() },
		"no namespace is named": func(p *pod) { p.rt.netns = "" },
		"the files are gone":    func(p *pod) { _ = os.RemoveAll(p.c.conf.DataDir) },
		"the subnets have changed": func(p *pod) {
			p.c.conf.Subnets = []netip.Prefix{netip.MustParsePrefix("10.9.0.0/24")}
		},
		"the subnets are gone":       func(p *pod) { p.c.conf.Subnets = nil },
		"the bridge is gone":         func(p *pod) { removeBridge(t) },
		"the link is gone":           func(p *pod) { _ = disconnect(p.attachment()) },
		"the container was no pod's": func(p *pod) { p.rt.args = "" },
		"it was deleted": func(p *pod) {
			p.del()
		},
		"it was never added": func(p *pod) {
			p.del()
			p.rt.container = "never"
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := newContainers(t, "1.1.0", subnet4, subnet6)
			p := c.newPod("web-0")
			p.add()
			change(p)
			p.del()
			p.del()
			c.nothingLeft(name)
		})
	}
}

// An ADD that fails says why by a code of the specification, and leaves nothing.
func TestAddRefuses(t *testing.T) {
	if !inOwnNetwork(t) {
		return
	}
	for name, test := range map[string]struct {
		change func(*pod)
		code   uint
		text   string
	}{
		"no subnets": {func(p *pod) { p.c.conf.Subnets = nil },
			types.ErrInvalidNetworkConfig, "the key subnets is empty"},
		"no namespace": {func(p *pod) { p.end() }, types.ErrInvalidNetNS, "no network namespace is there"},
		"a file for a namespace": {func(p *pod) {
			p.end()
			_ = os.WriteFile(p.rt.netns, nil, 0o600)
		}, types.ErrInvalidNetNS, "no network namespace is there"},
		"the node's namespace": {func(p *pod) { p.rt.netns = fmt.Sprintf("/proc/%d/ns/net", os.Getpid()) },
			types.ErrInvalidNetNS, "the network namespace of the pod is the node's"},
		"unknown arguments": {func(p *pod) { p.rt.args = "SOMETHING=else" },
			types.ErrInvalidEnvironmentVariables, "SOMETHING=else"},
		"another link has the bridge's name": {func(p *pod) { p.c.conf.Bridge = "lo" },
			types.ErrInternal, "link lo is a device: name another bridge"},
		"a default route in the pod": {func(p *pod) { p.inside(addDefaultRoute) },
			types.ErrInternal, "adding route 0.0.0.0/0 in the pod: file exists"},
		"a file in place of the folder": {func(p *pod) { _ = os.WriteFile(p.c.conf.DataDir, nil, 0o600) },
			types.ErrIOFailure, "making the folder of reservations"},
	} {
		t.Run(name, func(t *testing.T) {
			c := newContainers(t, "1.1.0", subnet4)
			p := c.newPod("web-0")
			test.change(p)
			_, err := p.tryAdd()
			refused(t, name, err, test.code, test.text)
			if links := hostLinks(t); len(links) > 0 {
				t.Errorf("the links %v are left", links)
			}
			if entries, err := os.ReadDir(c.conf.DataDir); err == nil && len(entries) > 0 {
				if used := c.inUse(); len(used) > 0 {
					t.Errorf("the addresses %v are left", used)
				}
			}
		})
	}
}

// addDefaultRoute gives a namespace a default route that tunnel-cni did not make.
func addDefaultRoute() error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Flags = "other0", net.FlagUp
	other := &netlink.Bridge{LinkAttrs: attrs}
	if err := netlink.LinkAdd(other); err != nil {
		return err
	}
	return netlink.RouteAdd(&netlink.Route{LinkIndex: other.Index, Dst: ipNet(netip.MustParsePrefix("0.0.0.0/0")),
		Scope: netlink.SCOPE_LINK})
}

// 100 processes at once.
func TestParallelPods(t *testing.T) {
	if !inOwnNetwork(t) {
		return
	}
	c := newContainers(t, "1.1.0", subnet4, subnet6)
	pods := make([]*pod, 100)
	for i := range pods {
		pods[i] = c.newPod(fmt.Sprintf("pod-%d", i))
	}
	began := time.Now()
	errs := make([]error, len(pods))
	var wg sync.WaitGroup
	for i, p := range pods {
		wg.Go(func() { _, errs[i] = p.tryAdd() })
	}
	wg.Wait()
	t.Logf("100 ADDs at once took %v", time.Since(began).Round(time.Millisecond))
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, p := range pods {
		all = append(all, strings.Split(join(p.addrs), ",")...)
	}
	slices.Sort(all)
	if distinct := slices.Compact(all); len(distinct) != 200 {
		t.Errorf("100 pods have %d addresses, want 200", len(distinct))
	}
	for i := range pods[0].addrs {
		reaches(t, pods[0], pods[99], pods[99].addrs[i])
	}
	for i, p := range pods {
		wg.Go(func() { errs[i] = p.tryDel() })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	c.nothingLeft("after 100 DELs at once")
}

// The machine reboots without its cloud: namespaces and links are gone, nobody called DEL, and the boot has
// another id. The same pods get the same addresses, though new ones come first.
func TestOfflineReboot(t *testing.T) {
	if !inOwnNetwork(t) {
		return
	}
	c := newContainers(t, "1.1.0", subnet4, subnet6)
	before := make(map[string]string)
	for i := range 5 {
		p := c.newPod(fmt.Sprintf("pod-%d", i))
		p.add()
		before[fmt.Sprintf("pod-%d", i)] = join(p.addrs)
		defer p.end()
		p.end()
	}
	for deadline := time.Now().Add(time.Minute); len(hostLinks(t)) > 0; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("the links %v live longer than their namespaces", hostLinks(t))
		}
	}
	removeBridge(t)
	reboot(t, c.node)
	if err := c.status(); err != nil {
		t.Errorf("STATUS after the reboot: %v", err)
	}
	if used := c.inUse(); len(used) > 0 {
		t.Errorf("in use after STATUS: %v", used)
	}
	c.newPod("job-0").add()
	for i := 4; i >= 0; i-- {
		p := c.newPod(fmt.Sprintf("pod-%d", i))
		p.add()
		want(t, p.rt.container+" after the reboot", join(p.addrs), before[fmt.Sprintf("pod-%d", i)])
		reaches(t, nil, p, p.addrs[1])
	}
}

func TestStatus(t *testing.T) {
	if !inOwnNetwork(t) {
		return
	}
	c := newContainers(t, "1.1.0")
	refused(t, "no subnets", c.status(), types.ErrPluginNotAvailable, "the key subnets is empty")
	c = newContainers(t, "1.1.0", "10.88.1.0/30")
	c.conf.Bridge = "lo"
	refused(t, "no bridge", c.status(), types.ErrPluginNotAvailable, "link lo is a device")
	c.conf.Bridge = "tunnel0"
	if err := c.status(); err != nil {
		t.Errorf("STATUS of an empty pool: %v", err)
	}
	p := c.newPod("web-0")
	p.add()
	refused(t, "a full pool", c.status(), types.ErrPluginNotAvailable, "subnet 10.88.1.0/30 has no free address")
	p.end() // and nobody calls DEL
	err := c.status()
	for deadline := time.Now().Add(time.Minute); err != nil && time.Now().Before(deadline); err = c.status() {
		time.Sleep(20 * time.Millisecond)
	}
	if err != nil {
		t.Errorf("STATUS after the only pod has gone: %v", err)
	}
}

// GC frees what the runtime does not name, in this network alone.
func TestGC(t *testing.T) {
	if !inOwnNetwork(t) {
		return
	}
	c := newContainers(t, "1.1.0", subnet4)
	other := newContainers(t, "1.1.0", subnet4)
	other.conf.DataDir = c.conf.DataDir
	valid, stale, foreign := c.newPod("web-0"), c.newPod("db-0"), other.newPod("web-0")
	for _, p := range []*pod{valid, stale, foreign} {
		p.add()
	}
	gc := func(valid []types.GCAttachment) {
		t.Helper()
		if err := c.gc(valid); err != nil {
			t.Fatalf("GC: %v", err)
		}
	}
	gc(nil)
	if got := len(c.inUse()); got != 3 {
		t.Errorf("%d addresses are in use after a GC without a list, want 3", got)
	}
	gc([]types.GCAttachment{{ContainerID: valid.rt.container, IfName: "eth0"}})
	used := c.inUse()
	if len(used) != 2 || used[join(valid.addrs)] == "" || used[join(foreign.addrs)] == "" {
		t.Errorf("in use after GC: %v", used)
	}
	if hostLinkLives(stale.attachment()) || !hostLinkLives(valid.attachment()) || !hostLinkLives(foreign.attachment()) {
		t.Errorf("the links after GC are %v", hostLinks(t))
	}
	gc([]types.GCAttachment{})
	if used := c.inUse(); len(used) != 1 || used[join(foreign.addrs)] == "" {
		t.Errorf("in use after a GC with an empty list: %v", used)
	}
}

// Somebody empties the folder, or the disk loses files, while pods live: no new pod gets a living pod's address.
func TestLostFiles(t *testing.T) {
	if !inOwnNetwork(t) {
		return
	}
	for name, lose := range map[string]func(c *containers, addr string) error{
		"all files":      func(c *containers, _ string) error { return os.RemoveAll(c.conf.DataDir) },
		"one file":       func(c *containers, addr string) error { return os.Remove(c.file(addr)) },
		"a damaged file": func(c *containers, addr string) error { return os.Truncate(c.file(addr), 0) },
	} {
		t.Run(name, func(t *testing.T) {
			c := newContainers(t, "1.1.0", subnet4, subnet6)
			web, db := c.newPod("web-0"), c.newPod("db-0")
			web.add()
			db.add()
			if err := lose(c, web.addrs[0].String()); err != nil {
				t.Fatal(err)
			}
			owners := make(map[netip.Addr]bool)
			for _, p := range []*pod{web, db} {
				for _, addr := range p.addrs {
					owners[addr] = true
				}
			}
			for i := range 3 {
				p := c.newPod(fmt.Sprintf("job-%d", i))
				p.add()
				for _, addr := range p.addrs {
					if owners[addr] {
						t.Errorf("%s gets %s, which another pod has", p.rt.container, addr)
					}
					owners[addr] = true
				}
				defer p.del()
			}
			web.del()
			db.del()
			if got := len(c.inUse()); got != 6 {
				t.Errorf("%d addresses are in use by three pods, want 6: %v", got, c.inUse())
			}
		})
	}
}

// CHECK sees each way in which the network of a pod can break.
func TestCheck(t *testing.T) {
	if !inOwnNetwork(t) {
		return
	}
	onLink := func(p *pod, name string, f func(netlink.Link) error) {
		link, err := netlink.LinkByName(name)
		if err == nil {
			err = f(link)
		}
		if err != nil {
			p.c.t.Fatal(err)
		}
	}
	inPod := func(p *pod, f func(netlink.Link) error) {
		p.inside(func() error {
			link, err := netlink.LinkByName("eth0")
			if err != nil {
				return err
			}
			return f(link)
		})
	}
	for name, test := range map[string]struct {
		change func(*pod)
		text   string
	}{
		"the address is gone": {func(p *pod) {
			inPod(p, func(l netlink.Link) error { return netlink.AddrDel(l, &netlink.Addr{IPNet: only(p.addrs[1])}) })
		}, "does not have the address fd00:88:1::2/128"},
		"the route is gone": {func(p *pod) {
			inPod(p, func(l netlink.Link) error {
				return netlink.RouteDel(&routesOf(l.Attrs().Index, gatewayOf(p.c.conf.Subnets[0]))[1])
			})
		}, "no default route by 10.88.1.1"},
		"the pod's link is down":  {func(p *pod) { inPod(p, netlink.LinkSetDown) }, "link eth0 of the pod is down"},
		"the pod's link is gone":  {func(p *pod) { inPod(p, netlink.LinkDel) }, "link eth0 of the pod"},
		"the node's link is down": {func(p *pod) { onLink(p, p.hostLink(), netlink.LinkSetDown) }, "is down"},
		"the node's link is off": {func(p *pod) { onLink(p, p.hostLink(), netlink.LinkSetNoMaster) },
			"is not on bridge tunnel0"},
		"the node's link has no hairpin mode": {func(p *pod) {
			onLink(p, p.hostLink(), func(l netlink.Link) error { return netlink.LinkSetHairpin(l, false) })
		}, "is not in hairpin mode"},
		"the bridge is down": {func(p *pod) { onLink(p, "tunnel0", netlink.LinkSetDown) }, "bridge tunnel0 is down"},
		"the bridge is gone": {func(p *pod) { onLink(p, "tunnel0", netlink.LinkDel) }, "bridge tunnel0"},
		"a reservation is released": {func(p *pod) { _ = free(p.c.conf, p.attachment()) },
			"is not reserved for this container"},
		"the files are gone": {func(p *pod) { _ = os.RemoveAll(p.c.conf.DataDir) }, "no address is reserved"},
	} {
		t.Run(name, func(t *testing.T) {
			c := newContainers(t, "1.1.0", subnet4, subnet6)
			p := c.newPod("web-0")
			p.add()
			if err := p.check(); err != nil {
				t.Fatalf("CHECK before the change: %v", err)
			}
			test.change(p)
			refused(t, name, p.check(), errChanged, test.text)
			p.del()
		})
	}
}

// What ADD sets on the node: forwarding, no redirects, and advertisements that are still accepted.
func TestNodeSettings(t *testing.T) {
	if !inOwnNetwork(t) {
		return
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.Flags = "uplink0", 1400, net.FlagUp
	uplink := &netlink.Bridge{LinkAttrs: attrs}
	if err := netlink.LinkAdd(uplink); err != nil {
		t.Fatal(err)
	}
	if err := netlink.RouteAdd(&netlink.Route{LinkIndex: uplink.Index, Dst: ipNet(netip.MustParsePrefix("0.0.0.0/0")),
		Scope: netlink.SCOPE_LINK}); err != nil {
		t.Fatal(err)
	}
	if err := apply(setting{"ipv6/conf/uplink0/accept_ra", "1"}, setting{"ipv6/conf/all/forwarding", "0"},
		setting{"ipv6/conf/default/accept_ra", "1"}, setting{"ipv4/ip_forward", "0"},
		setting{"ipv4/conf/all/send_redirects", "1"}); err != nil {
		t.Fatal(err)
	}
	c := newContainers(t, "1.1.0", subnet4, subnet6)
	web := c.newPod("web-0")
	result := web.add()
	for name, want := range map[string]string{
		"ipv4/ip_forward": "1", "ipv4/conf/tunnel0/forwarding": "1", "ipv6/conf/all/forwarding": "1",
		"ipv4/conf/all/send_redirects": "0", "ipv4/conf/tunnel0/send_redirects": "0",
		"ipv6/conf/uplink0/accept_ra": "2", "ipv6/conf/tunnel0/accept_ra": "0",
		"ipv6/conf/default/accept_ra": "2", "ipv6/conf/" + web.hostLink() + "/accept_ra": "0",
	} {
		value, err := os.ReadFile(filepath.Join("/proc/sys/net", name))
		if err != nil || strings.TrimSpace(string(value)) != want {
			t.Errorf("%s is %s, %v, want %s", name, value, err, want)
		}
	}
	checkMTU(t, web, result, 1400) // the uplink's
	c.conf.MTU = 1300
	db := c.newPod("db-0")
	checkMTU(t, db, db.add(), 1300)
	checkMTU(t, web, result, 1400)
}

// No pod can make itself the IPv6 router of the node or of another pod, also on a node whose pods have IPv4 alone.
func TestAdvertisementsAreIgnored(t *testing.T) {
	if !inOwnNetwork(t) {
		return
	}
	if err := apply(setting{"ipv6/conf/default/accept_ra", "1"}); err != nil {
		t.Skipf("the kernel has no IPv6: %v", err)
	}
	c := newContainers(t, "1.1.0", subnet4)
	web := c.newPod("web-0")
	web.add()
	if got := valueOf("ipv6/conf/tunnel0/accept_ra"); got != "0" {
		t.Errorf("accept_ra of the bridge is %s", got)
	}
	if got := valueOf("ipv6/conf/" + web.hostLink() + "/accept_ra"); got != "0" {
		t.Errorf("accept_ra of the node's link is %s", got)
	}
	web.inside(func() error {
		if got := valueOf("ipv6/conf/eth0/accept_ra"); got != "0" {
			t.Errorf("accept_ra of the pod's link is %s", got)
		}
		return nil
	})
}

// A default route by two uplinks: packets of pods must pass by either.
func TestMTUOfTwoUplinks(t *testing.T) {
	if !testkit.InOwnNetwork(t) {
		return
	}
	var hops []*netlink.NexthopInfo
	for name, mtu := range map[string]int{"uplink0": 1400, "uplink1": 1300} {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.MTU, attrs.Flags = name, mtu, net.FlagUp
		uplink := &netlink.Bridge{LinkAttrs: attrs}
		if err := netlink.LinkAdd(uplink); err != nil {
			t.Fatal(err)
		}
		hops = append(hops, &netlink.NexthopInfo{LinkIndex: uplink.Index})
	}
	everything := ipNet(netip.MustParsePrefix("0.0.0.0/0"))
	if err := netlink.RouteAdd(&netlink.Route{Dst: everything, Scope: netlink.SCOPE_LINK, MultiPath: hops}); err != nil {
		t.Fatal(err)
	}
	if mtu, err := (&Conf{}).mtu(); err != nil || mtu != 1300 {
		t.Errorf("the MTU is %d, %v, want 1300: the smaller one of the uplinks", mtu, err)
	}
}

// checkMTU looks at both ends of a pod's links, and at what ADD said of them.
func checkMTU(t *testing.T, p *pod, result *current.Result, want int) {
	t.Helper()
	check := func(where, name string) error {
		link, err := netlink.LinkByName(name)
		if err == nil && link.Attrs().MTU != want {
			t.Errorf("%s %s has the MTU %d, want %d", where, name, link.Attrs().MTU, want)
		}
		return err
	}
	if err := check("on the node,", p.hostLink()); err != nil {
		t.Error(err)
	}
	p.inside(func() error { return check("in the pod,", "eth0") })
	for _, i := range result.Interfaces[1:] {
		if i.Mtu != want {
			t.Errorf("ADD says %s has the MTU %d, want %d", i.Name, i.Mtu, want)
		}
	}
}

// A bridge that is there already is used as it is. Its hardware address is the same after its ports have come and
// gone, and after it was made again: pods know it by that.
func TestBridge(t *testing.T) {
	if !inOwnNetwork(t) {
		return
	}
	bridge := func() netlink.Link {
		t.Helper()
		link, err := netlink.LinkByName(DefaultBridge)
		if err != nil {
			t.Fatal(err)
		}
		return link
	}
	c := newContainers(t, "1.1.0", subnet4, subnet6)
	var macs []string
	for range 2 {
		for i := range 3 {
			p := c.newPod(fmt.Sprintf("pod-%d", i))
			p.add()
			macs = append(macs, bridge().Attrs().HardwareAddr.String())
			defer p.end()
			p.del()
			macs = append(macs, bridge().Attrs().HardwareAddr.String())
		}
		removeBridge(t)
	}
	if distinct := slices.Compact(macs); len(distinct) != 1 {
		t.Errorf("the bridge has the hardware addresses %v", distinct)
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = DefaultBridge
	if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}); err != nil {
		t.Fatal(err)
	}
	other := &netlink.Addr{IPNet: ipNet(netip.MustParsePrefix("10.99.0.1/24"))}
	if err := netlink.AddrAdd(bridge(), other); err != nil {
		t.Fatal(err)
	}
	before := bridge().Attrs()
	p := c.newPod("web-0")
	p.add()
	for _, addr := range p.addrs {
		reaches(t, nil, p, addr)
	}
	if after := bridge().Attrs(); after.Index != before.Index {
		t.Errorf("the bridge was made again: %v, %v", before, after)
	}
	if has, err := netlink.AddrList(bridge(), netlink.FAMILY_V4); err != nil || len(has) != 2 {
		t.Errorf("the bridge has the addresses %v, %v; want the gateway and the address that was there", has, err)
	}
}

// Somebody removes the bridge while pods run: the next ADD, or the edge, connects them again.
func TestBridgeIsRemoved(t *testing.T) {
	if !inOwnNetwork(t) {
		return
	}
	c := newContainers(t, "1.1.0", subnet4, subnet6)
	old := c.newPod("old-0")
	old.add()
	bridge, err := netlink.LinkByName("tunnel0")
	if err == nil {
		err = netlink.LinkDel(bridge)
	}
	if err != nil {
		t.Fatal(err)
	}
	fresh := c.newPod("new-0")
	fresh.add()
	for i := range old.addrs {
		reaches(t, fresh, old, old.addrs[i])
		reaches(t, old, fresh, fresh.addrs[i])
		reaches(t, nil, old, old.addrs[i])
	}
	if err := old.check(); err != nil {
		t.Errorf("CHECK: %v", err)
	}
}

// The networks of the node change: new pods get addresses of the new ones, pods that live keep theirs.
func TestChangedSubnets(t *testing.T) {
	if !inOwnNetwork(t) {
		return
	}
	c := newContainers(t, "1.1.0", subnet4)
	old := c.newPod("old-0")
	old.add()
	c.conf.Subnets = []netip.Prefix{netip.MustParsePrefix("10.99.1.0/24"), netip.MustParsePrefix(subnet6)}
	fresh := c.newPod("new-0")
	fresh.add()
	want(t, "the new pod", join(fresh.addrs), "10.99.1.2,fd00:88:1::2")
	reaches(t, fresh, old, old.addrs[0])
	reaches(t, old, fresh, fresh.addrs[0])
	old.del()
	again := c.newPod("old-0")
	again.add()
	want(t, "the old pod, made again", join(again.addrs), "10.99.1.3,fd00:88:1::3")
}

// The runtime gets the DNS settings of the configuration back.
func TestDNS(t *testing.T) {
	if !inOwnNetwork(t) {
		return
	}
	c := newContainers(t, "1.1.0", subnet4)
	p := c.newPod("web-0")
	out, err := c.run("ADD", p.rt, map[string]any{"dns": map[string]any{"nameservers": []string{"10.96.0.10"}}})
	if err != nil || !strings.Contains(string(out), `"10.96.0.10"`) {
		t.Errorf("the result is %s, %v", out, err)
	}
}
