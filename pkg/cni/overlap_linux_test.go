package cni

import (
	"net"
	"net/netip"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/vishvananda/netlink"
)

// A subnet that the node reaches by another link is refused by ADD and STATUS, and nothing is changed: with the
// gateway's address on the bridge, the node would lose its network.
func TestOverlap(t *testing.T) {
	if !inOwnNetwork(t) {
		return
	}
	const refusal = "overlaps with"
	for name, test := range map[string]struct {
		addrs, routes []string // of the other link
		refused       bool
	}{
		"the network of the LAN":                 {[]string{"10.88.1.77/24"}, nil, true},
		"a part of the network of the LAN":       {[]string{"10.88.77.1/16"}, nil, true},
		"an address of a tunnel in the subnet":   {[]string{"10.88.1.77/32"}, nil, true},
		"a route to a pod of another plugin":     {nil, []string{"10.88.1.5/32"}, true},
		"a route to the same subnet":             {nil, []string{"10.88.1.0/24"}, true},
		"the network of the LAN, IPv6":           {[]string{"fd00:88:1::77/64"}, nil, true},
		"a route to the same subnet, IPv6":       {nil, []string{"fd00:88:1::/64"}, true},
		"another network":                        {[]string{"10.88.2.7/24", "fd00:88:2::1/64"}, nil, false},
		"a route to another network":             {nil, []string{"10.88.3.0/24"}, false},
		"a wide route, such as one by WireGuard": {nil, []string{"10.88.0.0/16", "fd00:88::/48"}, false},
		"a default route without a gateway":      {nil, []string{"0.0.0.0/0"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			other := otherLink(t, test.addrs, test.routes)
			defer func() { _ = netlink.LinkDel(other) }()
			c := newContainers(t, "1.1.0", subnet4, subnet6)
			p := c.newPod("web-0")
			if !test.refused {
				p.add()
				if err := c.status(); err != nil {
					t.Errorf("STATUS: %v", err)
				}
				p.del()
				removeBridge(t)
				return
			}
			refused(t, "STATUS", c.status(), types.ErrPluginNotAvailable, refusal)
			_, err := p.tryAdd()
			refused(t, "ADD", err, types.ErrInternal, "of link lan0: give the pods of this node another subnet")
			if _, err := netlink.LinkByName(DefaultBridge); !isNotFound(err) {
				t.Errorf("the bridge was made nevertheless: %v", err)
			}
		})
	}
}

// The check is before the gateway's address is set: a link that comes later does not stop the pods of a node.
func TestOverlapLater(t *testing.T) {
	if !inOwnNetwork(t) {
		return
	}
	c := newContainers(t, "1.1.0", subnet4)
	c.newPod("web-0").add()
	otherLink(t, []string{"10.88.1.77/24"}, nil)
	c.newPod("db-0").add()
}

// otherLink makes the link lan0 with these addresses, and routes without gateways.
func otherLink(t *testing.T, addrs, routes []string) netlink.Link {
	t.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.Flags = "lan0", net.FlagUp
	link := &netlink.Bridge{LinkAttrs: attrs}
	if err := netlink.LinkAdd(link); err != nil {
		t.Fatal(err)
	}
	for _, text := range addrs {
		prefix := netip.MustParsePrefix(text)
		if err := netlink.AddrAdd(link, &netlink.Addr{IPNet: ipNet(prefix)}); err != nil {
			t.Fatal(err)
		}
	}
	for _, text := range routes {
		route := &netlink.Route{LinkIndex: link.Index, Dst: ipNet(netip.MustParsePrefix(text)), Scope: netlink.SCOPE_LINK}
		if err := netlink.RouteAdd(route); err != nil {
			t.Fatal(err)
		}
	}
	return link
}
