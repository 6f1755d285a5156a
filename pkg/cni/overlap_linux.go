package cni

import (
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// missingGateways returns the subnets whose gateway is not an address of the bridge yet. It returns an error if another
// link reaches a part of such a subnet. With the gateway's address on the bridge, the node would then lose its own
// network, or receive the packets for pods of another plugin. It does not check a subnet whose gateway is on the
// bridge.
func (c *Conf) missingGateways() (missing []netip.Prefix, err error) {
	seen := make(map[int]reached) // by address family
	for _, subnet := range c.Subnets {
		family := familyOf(subnet)
		if _, ok := seen[family]; ok {
			continue
		}
		if seen[family], err = reachedNow(family); err != nil {
			return nil, err
		}
	}
	// Look up the bridge last: another ADD may just have made it, and its addresses may be among those listed above.
	bridge := 0 // no link has the index 0
	link, err := netlink.LinkByName(c.Bridge)
	if err == nil {
		bridge = link.Attrs().Index
	} else if !isNotFound(err) {
		return nil, fmt.Errorf("finding bridge %s: %w", c.Bridge, err)
	}
	for _, subnet := range c.Subnets {
		now := seen[familyOf(subnet)]
		if hasAddress(now.addrs, bridge, netip.PrefixFrom(gatewayOf(subnet), subnet.Bits())) {
			continue
		}
		if err := checkOverlap(subnet, bridge, now); err != nil {
			return nil, err
		}
		missing = append(missing, subnet)
	}
	return missing, nil
}

// reached is what the links of this machine reach, in one address family.
type reached struct {
	addrs  []netlink.Addr
	routes []netlink.Route
}

func reachedNow(family int) (now reached, err error) {
	if now.addrs, err = Dump(func() ([]netlink.Addr, error) { return netlink.AddrList(nil, family) }); err != nil {
		return now, fmt.Errorf("listing addresses: %w", err)
	}
	if now.routes, err = Dump(func() ([]netlink.Route, error) { return netlink.RouteList(nil, family) }); err != nil {
		return now, fmt.Errorf("listing routes: %w", err)
	}
	return now, nil
}

func hasAddress(addrs []netlink.Addr, link int, want netip.Prefix) bool {
	for _, a := range addrs {
		if a.LinkIndex == link && a.IPNet.String() == want.String() {
			return true
		}
	}
	return false
}

// checkOverlap returns an error if a link other than the bridge reaches a part of a subnet: by its address, or by
// a route without a gateway. A wider route that someone added, such as one to the pods of all nodes by WireGuard,
// is no conflict: the route to the bridge is more specific.
func checkOverlap(subnet netip.Prefix, bridge int, now reached) error {
	for _, a := range now.addrs {
		if a.LinkIndex != bridge && overlaps(subnet, a.IPNet.String()) {
			return overlap(subnet, a.IPNet.String(), a.LinkIndex)
		}
	}
	for _, r := range now.routes {
		if r.LinkIndex == bridge || r.LinkIndex == 0 || r.Gw != nil || r.Via != nil || isDefault(r) {
			continue
		}
		if ones, _ := r.Dst.Mask.Size(); ones < subnet.Bits() && r.Protocol != unix.RTPROT_KERNEL {
			continue
		}
		if overlaps(subnet, r.Dst.String()) {
			return overlap(subnet, r.Dst.String(), r.LinkIndex)
		}
	}
	return nil
}

func overlaps(subnet netip.Prefix, other string) bool {
	prefix, err := netip.ParsePrefix(other)
	return err == nil && subnet.Overlaps(prefix)
}

func overlap(subnet netip.Prefix, other string, index int) error {
	name := fmt.Sprint("number ", index)
	if link, err := netlink.LinkByIndex(index); err == nil {
		name = link.Attrs().Name
	}
	return fmt.Errorf("subnet %s overlaps with %s of link %s: give the pods of this node another subnet, "+
		"or remove the link if another CNI plugin has left it", subnet, other, name)
}

func familyOf(subnet netip.Prefix) int {
	if subnet.Addr().Is4() {
		return netlink.FAMILY_V4
	}
	return netlink.FAMILY_V6
}
