package podnet

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// routeProtocol marks our routes in the kernel (rtnetlink(7), rtm_protocol). The edge changes no other routes.
const routeProtocol netlink.RouteProtocol = 117

// links returns the networks of this machine's network interfaces, without loopback.
func (linux) links(bridge string) ([]link, error) {
	all, err := netlink.LinkList()
	if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
		return nil, err
	}
	var found []link
	for _, l := range all {
		attrs := l.Attrs()
		if attrs.Flags&net.FlagLoopback != 0 || attrs.Flags&net.FlagUp == 0 {
			continue
		}
		addrs, err := netlink.AddrList(l, netlink.FAMILY_ALL)
		if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
			return nil, err
		}
		for _, a := range addrs {
			own, ok := netip.AddrFromSlice(a.IP)
			own = own.Unmap()
			bits, _ := a.Mask.Size()
			// A network of one address has no neighbours.
			if ok && own.IsGlobalUnicast() && bits < own.BitLen() {
				found = append(found, link{attrs.Index, own, netip.PrefixFrom(own, bits).Masked(), attrs.Name == bridge})
			}
		}
	}
	return found, nil
}

// foreign implements kernel.
func (linux) foreign(bridge string) (all []netip.Prefix, err error) {
	own := 0 // no interface has this index
	if l, err := netlink.LinkByName(bridge); err == nil {
		own = l.Attrs().Index
	}
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		// Of all tables: programs for VPNs often have one of their own, which comes before the main table.
		routes, err := listRoutes(family, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
		if err != nil {
			return nil, err
		}
		for _, r := range routes {
			if r.Dst == nil || r.Protocol == routeProtocol || r.Table == unix.RT_TABLE_LOCAL || own != 0 && r.LinkIndex == own {
				continue
			}
			to, ok := netip.AddrFromSlice(r.Dst.IP)
			if bits, _ := r.Dst.Mask.Size(); ok && bits > 0 {
				all = append(all, netip.PrefixFrom(to.Unmap(), bits))
			}
		}
	}
	return all, nil
}

// listRoutes lists the routes of the kernel that match filter and mask. If the routes change while the kernel lists
// them, the list may be wrong, and listRoutes asks again, up to five times in all.
func listRoutes(family int, filter *netlink.Route, mask uint64) (routes []netlink.Route, err error) {
	for range 5 {
		routes, err = netlink.RouteListFiltered(family, filter, mask)
		if !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	if err != nil {
		return nil, fmt.Errorf("listing routes: %w", err)
	}
	return routes, nil
}

// routes implements kernel. Our routes have routeProtocol.
func (linux) routes(want []route) (made []netip.Prefix, err error) {
	var errs []error
	made = make([]netip.Prefix, 0, len(want))
	missing := make(map[route]bool, len(want))
	for _, r := range want {
		missing[r] = true
	}
	var has []netlink.Route
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		all, err := listRoutes(family, &netlink.Route{Protocol: routeProtocol}, netlink.RT_FILTER_PROTOCOL)
		if err != nil {
			return nil, err // the next attempt lists them again
		}
		has = append(has, all...)
	}
	for _, r := range has {
		if own, ok := ofKernel(r); ok && missing[own] {
			delete(missing, own)
			continue
		}
		if err := netlink.RouteDel(&r); err != nil && !errors.Is(err, unix.ESRCH) {
			errs = append(errs, fmt.Errorf("removing the route to %s: %w", r.Dst, withRights(err)))
		}
	}
	for _, r := range want {
		if !missing[r] {
			made = append(made, r.to)
			continue
		}
		err := netlink.RouteAdd(&netlink.Route{Dst: ipNet(r.to), Gw: r.by.AsSlice(), LinkIndex: r.link,
			Protocol: routeProtocol})
		if errors.Is(err, unix.EEXIST) {
			err = fmt.Errorf("%w: another program has one; remove it, or switch routes off in [mode.edge.cni]", err)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("adding the route to %s by %s: %w", r.to, r.by, withRights(err)))
			continue
		}
		made = append(made, r.to)
	}
	return made, errors.Join(errs...)
}

// ofKernel returns a route of the kernel in the form of wantRoutes.
func ofKernel(r netlink.Route) (route, bool) {
	if r.Dst == nil {
		return route{}, false
	}
	to, ok := netip.AddrFromSlice(r.Dst.IP)
	by, okBy := netip.AddrFromSlice(r.Gw)
	bits, _ := r.Dst.Mask.Size()
	return route{netip.PrefixFrom(to.Unmap(), bits), by.Unmap(), r.LinkIndex}, ok && okBy
}

func ipNet(prefix netip.Prefix) *net.IPNet {
	addr := prefix.Addr()
	return &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(prefix.Bits(), addr.BitLen())}
}
