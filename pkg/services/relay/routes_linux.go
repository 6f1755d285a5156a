package relay

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// A process of the node needs a route to a ClusterIP: the kernel looks for a route before it calls the chain "output",
// whose rules choose an endpoint. A node without a default route, for example while its only uplink is down, has none.
// So each ClusterIP gets a route to loopback in the routing table "default", which the kernel asks after the table
// "main" (ip-rule(8)): where another route leads to the ClusterIP, ours does not count. The rules redirect or refuse
// each packet, so none of them is for loopback.

// routeProtocol marks our routes in the kernel (rtnetlink(7), rtm_protocol). The routes of [mode.edge.cni], in the
// table "main", have the same mark (pkg/podnet).
const routeProtocol netlink.RouteProtocol = 117

// loopback is the index of the loopback interface in each network namespace (LOOPBACK_IFINDEX of Linux).
const loopback = 1

// routeTo returns the route to a ClusterIP.
func routeTo(addr netip.Addr) *netlink.Route {
	r := &netlink.Route{Dst: netlink.NewIPNet(addr.AsSlice()), LinkIndex: loopback, Table: unix.RT_TABLE_DEFAULT,
		Protocol: routeProtocol, Scope: netlink.SCOPE_UNIVERSE}
	if addr.Is6() {
		r.Type = unix.RTN_LOCAL // Linux makes each other route of IPv6 to loopback one that refuses
	}
	return r
}

// tableRule returns the rule by which the kernel asks the table "default" for IPv6. For IPv4, Linux itself has such a
// rule, with this priority.
func tableRule() *netlink.Rule {
	r := netlink.NewRule()
	r.Family, r.Table, r.Priority, r.Protocol = netlink.FAMILY_V6, unix.RT_TABLE_DEFAULT, 32767, uint8(routeProtocol)
	return r
}

// ownRoutes returns the ClusterIPs to which the kernel has a route of ours.
func ownRoutes() (map[netip.Addr]bool, error) {
	own := make(map[netip.Addr]bool)
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		all, err := netlink.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_DEFAULT, Protocol: routeProtocol},
			netlink.RT_FILTER_TABLE|netlink.RT_FILTER_PROTOCOL)
		if err != nil {
			return own, fmt.Errorf("listing the routes to ClusterIPs: %w", err)
		}
		for _, r := range all {
			if r.Dst == nil {
				continue
			}
			if addr, ok := netip.AddrFromSlice(r.Dst.IP); ok {
				own[addr.Unmap()] = true
			}
		}
	}
	return own, nil
}

// route implements kernel.
func (k *linux) route(before, after rules) error {
	if k.dns {
		return nil
	}
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("opening rtnetlink: %w", err)
	}
	defer h.Close()
	var errs []error
	if k.routed == nil {
		if k.routed, err = ownRoutes(); err != nil {
			errs = append(errs, err)
		}
		before = make(rules, len(k.routed)) // routes of earlier processes, some to ClusterIPs that are gone
		for addr := range k.routed {
			before[address{netip.AddrPortFrom(addr, 0), aboutClusterIP}] = rule{kind: isClusterIP}
		}
	}
	for at, one := range before {
		if _, stays := after[at]; stays || one.kind != isClusterIP || !k.routed[at.Addr()] {
			continue
		}
		if err = h.RouteDel(routeTo(at.Addr())); err != nil && !errors.Is(err, unix.ESRCH) {
			errs = append(errs, fmt.Errorf("removing the route to %s: %w", at.Addr(), err))
			continue
		}
		delete(k.routed, at.Addr())
	}
	for at, one := range after {
		if one.kind != isClusterIP || k.routed[at.Addr()] || !k.listens(familyOf(at.Addr())) {
			continue
		}
		if at.Addr().Is6() && !k.ruled {
			if err = h.RuleAdd(tableRule()); err != nil && !errors.Is(err, unix.EEXIST) {
				errs = append(errs, fmt.Errorf("adding a rule for the routing table default: %w", err))
			}
			k.ruled = true // or it fails for each address
		}
		if err = h.RouteReplace(routeTo(at.Addr())); err != nil {
			errs = append(errs, fmt.Errorf("adding a route to %s: %w", at.Addr(), err))
			continue
		}
		k.routed[at.Addr()] = true
	}
	return errors.Join(errs...)
}

// hasRoutes reports whether the kernel has the routes that route has made.
func (k *linux) hasRoutes() bool {
	if len(k.routed) == 0 {
		return true
	}
	own, err := ownRoutes()
	return err != nil || len(own) == len(k.routed) // another attempt would not read them either
}

// removeRoutes removes the routes to ClusterIPs, and the rule that leads to them.
func removeRoutes() error {
	own, err := ownRoutes()
	if err != nil || len(own) == 0 {
		return err
	}
	var errs []error
	for addr := range own {
		errs = append(errs, netlink.RouteDel(routeTo(addr)))
	}
	if err = netlink.RuleDel(tableRule()); !errors.Is(err, unix.ENOENT) {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
