package relay

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
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
		all, err := listRoutes(family)
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

// listRoutes lists our routes of a family. If the routes change while the kernel lists them, listRoutes asks again, up
// to five times in all.
func listRoutes(family int) (all []netlink.Route, err error) {
	for range 5 {
		all, err = netlink.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_DEFAULT, Protocol: routeProtocol},
			netlink.RT_FILTER_TABLE|netlink.RT_FILTER_PROTOCOL)
		if !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return all, err
}

// countRoutes returns how many routes of ours the kernel has. It reads only their headers: a node may have thousands,
// and the relay counts them every few seconds.
func countRoutes() (n int, err error) {
	for _, family := range []uint8{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		req := nl.NewNetlinkRequest(unix.RTM_GETROUTE, unix.NLM_F_DUMP)
		req.AddData(&nl.RtMsg{RtMsg: unix.RtMsg{Family: family}})
		err = req.ExecuteIter(unix.NETLINK_ROUTE, unix.RTM_NEWROUTE, func(m []byte) (more bool) {
			msg := nl.DeserializeRtMsg(m)
			if msg.Table == unix.RT_TABLE_DEFAULT && msg.Protocol == uint8(routeProtocol) {
				n++
			}
			return true
		})
		if err != nil {
			return n, fmt.Errorf("counting the routes to ClusterIPs: %w", err)
		}
	}
	return n, nil
}

// routes are the routes to ClusterIPs. The zero value knows nothing yet.
type routes struct {
	want map[netip.Addr]bool // the ClusterIPs that should have a route; nil: update has not run
	has  map[netip.Addr]bool // the ClusterIPs that have one
	// lacks has the families, by Is4, for which this kernel has no table "default".
	lacks map[bool]bool
}

// route implements kernel.
func (k *linux) route(before, after rules) error {
	if k.dns {
		return nil
	}
	var errs []error
	first := k.routes.want == nil
	if first {
		k.routes = routes{want: make(map[netip.Addr]bool), lacks: make(map[bool]bool)}
		var err error
		if k.routes.has, err = ownRoutes(); err != nil { // routes of earlier processes, some to ClusterIPs that are gone
			errs = append(errs, err)
		}
	}
	for at, one := range before {
		if one.kind == isClusterIP {
			delete(k.routes.want, at.Addr())
		}
	}
	for at, one := range after {
		if one.kind == isClusterIP && k.listens(familyOf(at.Addr())) && !k.routes.lacks[at.Addr().Is4()] {
			k.routes.want[at.Addr()] = true
		}
	}
	errs = append(errs, k.routes.update())
	if first {
		errs = append(errs, k.routes.check())
	}
	return errors.Join(errs...)
}

// update removes and adds routes, until the kernel has those of want. What fails is tried again at the next call.
func (r *routes) update() error {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("opening rtnetlink: %w", err)
	}
	defer h.Close()
	var errs []error
	for addr := range r.has {
		if r.want[addr] {
			continue
		}
		if err = h.RouteDel(routeTo(addr)); err != nil && !errors.Is(err, unix.ESRCH) {
			errs = append(errs, fmt.Errorf("removing the route to %s: %w", addr, err))
			continue
		}
		delete(r.has, addr)
	}
	ruled := false
	for addr := range r.want {
		if r.has[addr] {
			continue
		}
		if addr.Is6() && !ruled {
			ruled = true // an error of each address would be the same
			if err = h.RuleAdd(tableRule()); err != nil && !errors.Is(err, unix.EEXIST) {
				errs = append(errs, fmt.Errorf("adding a rule for the routing table default: %w", err))
			}
		}
		if err = h.RouteReplace(routeTo(addr)); err != nil {
			errs = append(errs, fmt.Errorf("adding a route to %s: %w", addr, err))
			continue
		}
		r.has[addr] = true
	}
	return errors.Join(errs...)
}

// check gives up a family for which the kernel has no table "default": a kernel without policy routing adds each route
// to the table "main", where it would count before others.
func (r *routes) check() error {
	own, err := ownRoutes()
	if err != nil {
		return nil // as if the kernel had the table
	}
	for addr := range r.has {
		r.lacks[addr.Is4()] = r.lacks[addr.Is4()] || !own[addr]
	}
	if !r.lacks[true] && !r.lacks[false] {
		return nil
	}
	for addr := range r.want {
		if r.lacks[addr.Is4()] {
			delete(r.want, addr)
		}
	}
	return errors.Join(errors.New("this kernel has no routing table default: it was built without policy routing"),
		r.update())
}

// intact reports whether the kernel has the routes that update has made, and the rule that leads to those of IPv6.
func (r *routes) intact() bool {
	if len(r.has) == 0 {
		return true
	}
	n, err := countRoutes()
	if err != nil {
		return true // such as: the routes have changed meanwhile
	}
	ruled := true
	for addr := range r.has {
		if addr.Is6() {
			rules, err := netlink.RuleListFiltered(netlink.FAMILY_V6, tableRule(), netlink.RT_FILTER_TABLE)
			ruled = err != nil || len(rules) > 0
			break
		}
	}
	return ruled && n == len(r.has)
}

// removeRoutes removes the routes to ClusterIPs, and the rule that leads to them.
func removeRoutes() error {
	var errs []error
	own, err := ownRoutes()
	errs = append(errs, err)
	for addr := range own {
		errs = append(errs, netlink.RouteDel(routeTo(addr)))
	}
	if err = netlink.RuleDel(tableRule()); !errors.Is(err, unix.ENOENT) {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
