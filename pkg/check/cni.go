package check

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/pkg/cni"
)

// pods has what the checks of [mode.edge.cni] have found so far.
type pods struct {
	conf.CNI
	conf *cni.Conf // the plugin's part of the network configuration; nil: not read
	// rules returns the networks of pods that are masqueraded. Tests replace it.
	rules func([]netip.Prefix) ([]netip.Prefix, error)
}

// podNetwork returns the checks of [mode.edge.cni]: the network of a node's pods.
func podNetwork(c conf.CNI) []Check {
	p := &pods{CNI: c, rules: masqueraded}
	const group = "pod network"
	return []Check{
		{group, "plugin", p.plugin},
		{group, "configuration", p.configuration},
		{group, "first", p.first},
		{group, "bridge", p.bridge},
		{group, "forwarding", p.forwarding},
		{group, "masquerade", p.masquerade},
		{group, "addresses", p.addresses},
	}
}

// plugin looks for the program of the plugin.
func (p *pods) plugin(context.Context) Result {
	path := filepath.Join(p.BinDir, cni.Program)
	info, err := os.Stat(path)
	switch {
	case err != nil:
		return Fail("sudo tunnel cni install", "%v", err)
	case !info.Mode().IsRegular() || info.Mode()&0o111 == 0:
		return Fail("sudo tunnel cni install", "%s is no program", path)
	}
	return OK("%s is there", path)
}

// configuration reads the network configuration that the edge writes.
func (p *pods) configuration(context.Context) Result {
	path := filepath.Join(p.ConfDir, cni.ListFile)
	text, err := os.ReadFile(path)
	if os.IsNotExist(err) {
		if p.PodCIDRs == nil {
			return Fail("set podcidrs in [mode.edge.cni]; or let the cloud send them: the Node needs spec.podCIDRs "+
				"(kube-controller-manager --allocate-node-cidrs), and the cloud kubernetes = true in [mode.cloud.egress]",
				"there is no %s: the edge does not know the networks of this node's pods yet", path)
		}
		return Fail("start the edge, which writes it; its line cni in /readyz says why it does not", "there is no %s", path)
	}
	if err != nil {
		return Fail("run this as root", "%v", err)
	}
	if foreign := cni.Foreign(text); foreign != "" {
		return Fail("remove the file, or the table [mode.edge.cni]", "the edge did not write %s: %s", path, foreign)
	}
	if p.conf, err = cni.ConfIn(text); err != nil {
		return Fail("remove the file: the edge writes it again", "%s: %v", path, err)
	}
	if p.PodCIDRs != nil && !slices.Equal(p.PodCIDRs, p.conf.Subnets) {
		return Warn("start the edge again; its line cni in /readyz says more", "%s has the networks %v, and podcidrs are %v",
			path, p.conf.Subnets, p.PodCIDRs)
	}
	return OK("%s has the networks %v", path, p.conf.Subnets)
}

// first looks for another network configuration that the container runtime would use. The runtime uses the file whose
// name sorts first.
func (p *pods) first(context.Context) Result {
	rival, err := cni.Rival(p.ConfDir)
	if err != nil {
		return Fail("create the folder, or correct confdir in [mode.edge.cni]", "%v", err)
	}
	if rival != "" {
		return Fail("remove it, with the plugin to which it belongs", "the runtime takes %s, which sorts before %s",
			filepath.Join(p.ConfDir, rival), cni.ListFile)
	}
	return OK("no other network configuration comes before %s", cni.ListFile)
}

// bridge looks for the addresses of the bridge. It also looks for other network interfaces with addresses in the
// networks of the pods.
func (p *pods) bridge(context.Context) Result {
	if p.conf == nil {
		return Skipped("the configuration comes first")
	}
	links, err := net.Interfaces()
	if err != nil {
		return Fail("run this as root", "%v", err)
	}
	var has []netip.Addr
	for _, link := range links {
		addrs, err := link.Addrs()
		if err != nil {
			continue // the network interface has gone
		}
		for _, a := range addrs {
			prefix, err := netip.ParsePrefix(a.String())
			if err != nil {
				continue
			}
			if link.Name == p.conf.Bridge {
				has = append(has, prefix.Addr())
				continue
			}
			for _, subnet := range p.conf.Subnets {
				if subnet.Overlaps(prefix.Masked()) && prefix.Bits() > 0 {
					return Fail("give the Node, or podcidrs in [mode.edge.cni], another network",
						"the link %s has the address %s, in the network of the pods %s", link.Name, prefix, subnet)
				}
			}
		}
	}
	for _, subnet := range p.conf.Subnets {
		if !slices.Contains(has, subnet.Addr().Next()) {
			return Fail("start the edge, which makes it; ip address show "+p.conf.Bridge,
				"the bridge %s does not have the address %s", p.conf.Bridge, subnet.Addr().Next())
		}
	}
	return OK("%s has the gateways of the pods", p.conf.Bridge)
}

// forwarding checks the settings by which the kernel forwards packets between interfaces.
func (p *pods) forwarding(context.Context) Result {
	if p.conf == nil || runtime.GOOS != "linux" {
		return Skipped("the configuration comes first")
	}
	for _, subnet := range p.conf.Subnets {
		name, help := "ipv4/ip_forward", "sysctl -w net.ipv4.ip_forward=1"
		if subnet.Addr().Is6() { // the edge and the plugin also set accept_ra to 2, without which the node forgets its route
			name, help = "ipv6/conf/all/forwarding", "start the edge, or add a pod: either switches it on, and keeps the "+
				"default route by router advertisements, which sysctl -w does not"
		}
		value, err := os.ReadFile(filepath.Join("/proc/sys/net", name))
		if err != nil {
			return Warn("the kernel lacks the family of the network", "%v", err)
		}
		if strings.TrimSpace(string(value)) == "0" {
			setting := "net." + strings.ReplaceAll(name, "/", ".")
			return Fail(help+"; look in /etc/sysctl.d for who switches it off",
				"the kernel forwards no packets of pods: %s is 0", setting)
		}
	}
	return OK("the kernel forwards packets of pods")
}

// masquerade looks for the rules by which pods reach addresses outside of the node: packets leave with the node's
// address.
func (p *pods) masquerade(context.Context) Result {
	if p.conf == nil {
		return Skipped("the configuration comes first")
	}
	found, err := p.rules(p.conf.Subnets)
	switch {
	case errors.Is(err, errors.ErrUnsupported) && runtime.GOOS != "linux":
		return Skipped("this system is not Linux")
	case errors.Is(err, fs.ErrPermission):
		return Fail("run this as root", "listing the rules of nftables: %v", err)
	case err != nil:
		return Fail("modprobe nf_tables; or take a kernel with nftables (CONFIG_NF_TABLES)",
			"the kernel has no nftables, so pods reach nothing outside: %v", err)
	}
	for _, subnet := range p.conf.Subnets {
		if !slices.Contains(found, subnet) {
			return Fail("start the edge, which writes the rule; its line cni in /readyz says why it does not",
				"pods of %s reach nothing outside: the table inet %s does not masquerade them", subnet, cni.RulesTable)
		}
	}
	return OK("pods reach the outside under the node's address")
}

// addresses counts the addresses that pods have.
func (p *pods) addresses(context.Context) Result {
	if p.conf == nil {
		return Skipped("the configuration comes first")
	}
	entries, err := os.ReadDir(p.conf.DataDir)
	if err != nil && !os.IsNotExist(err) {
		return Fail("run this as root", "%v", err)
	}
	used, all := make(map[netip.Prefix]uint64), 0
	for _, e := range entries {
		text, err := os.ReadFile(filepath.Join(p.conf.DataDir, e.Name()))
		var r cni.Reservation
		if err != nil || json.Unmarshal(text, &r) != nil || r.Address.String() != e.Name() || !r.Released.IsZero() {
			continue // not a reservation, half-written, or a remembered address, which another pod may get
		}
		for _, subnet := range p.conf.Subnets {
			if subnet.Contains(r.Address) {
				used[subnet]++
				all++
			}
		}
	}
	for _, subnet := range p.conf.Subnets {
		room := room(subnet)
		switch n := used[subnet]; {
		case n >= room:
			return Fail("give the node a larger network: spec.podCIDRs, or podcidrs in [mode.edge.cni]",
				"all %d addresses of %s are in use: no further pod starts", room, subnet)
		case n >= room-room/10:
			return Warn("give the node a larger network: spec.podCIDRs, or podcidrs in [mode.edge.cni]",
				"%d of %d addresses of %s are in use", n, room, subnet)
		}
	}
	return OK("pods have %d addresses, and there is room", all)
}

// room returns for how many pods a network has addresses. No pod gets the address of the network or of the gateway.
// In IPv4, no pod gets the broadcast address.
func room(subnet netip.Prefix) uint64 {
	bits := min(subnet.Addr().BitLen()-subnet.Bits(), 62)
	if subnet.Addr().Is4() {
		return 1<<bits - 3
	}
	return 1<<bits - 2
}
