package egress

import (
	"errors"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// hasEnded reports whether the next read of a socket would return a FIN or a reset. While the socket has
// nothing to read, known is false.
func hasEnded(fd uintptr) (ended, known bool) {
	n, _, err := unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_PEEK|unix.MSG_DONTWAIT)
	for errors.Is(err, unix.EINTR) {
		n, _, err = unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_PEEK|unix.MSG_DONTWAIT)
	}
	return n <= 0, !errors.Is(err, unix.EAGAIN)
}

// maxDumps is how often listRoutes reads a table at most. If the table changes during a dump, the dump may lack
// routes. The kernel then marks the dump (NLM_F_DUMP_INTR). Each container that starts or stops changes a table.
const maxDumps = 10

// readRoutes reads the kernel's routing tables: the main table of IPv4, and all tables of IPv6. It ignores
// routing policies (ip-rule(8)). For each address of this machine it adds a route that leads to no device.
func readRoutes() ([]route, error) {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return nil, err
	}
	own := make(map[netip.Addr]bool)
	var all []route
	for _, a := range addrs {
		if n, ok := a.(*net.IPNet); ok {
			addr := prefixOf(n).Addr()
			own[addr] = true
			// An address of this machine may be inside the network of a bridge, but programs of the machine
			// listen there, and no pod does. Routes to own addresses come first in the list, so that they
			// win over other routes with the same prefix length.
			all = append(all, route{to: netip.PrefixFrom(addr, addr.BitLen())})
		}
	}
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		listed, err := listRoutes(family, family == unix.AF_INET)
		if err != nil {
			return nil, err
		}
		all = append(all, routesOf(listed, own)...)
	}
	return all, nil
}

// listRoutes returns the routes of a family in all tables, or in the main table alone. Package netlink then skips
// routes of other tables before it decodes them: in mode full of Services, there is one for each ClusterIP.
func listRoutes(family int, mainAlone bool) (all []netlink.Route, err error) {
	mask := netlink.RT_FILTER_TABLE
	if mainAlone {
		mask = 0 // without a filter, package netlink lists the main table
	}
	for range maxDumps {
		all, err = netlink.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, mask)
		if !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return all, err
}

// routesOf returns the routes that routedToContainers searches. own are the addresses of this machine. A route
// with several next hops becomes one route per next hop. Routes that refuse packets are left out: the kernel
// refuses a dial by itself. Blackhole and throw routes stay: they lead to no device, or to loopback.
func routesOf(listed []netlink.Route, own map[netip.Addr]bool) []route {
	var all []route
	for _, r := range listed {
		if r.Dst == nil || r.Type == unix.RTN_UNREACHABLE || r.Type == unix.RTN_PROHIBIT {
			continue
		}
		hops := r.MultiPath
		if len(hops) == 0 {
			hops = []*netlink.NexthopInfo{{LinkIndex: r.LinkIndex, Gw: r.Gw, Via: r.Via}}
		}
		for _, h := range hops {
			gateway, ok := netip.AddrFromSlice(h.Gw)
			direct := h.Via == nil && (!ok || own[gateway.Unmap()]) // Via: a gateway of the other family
			all = append(all, route{to: prefixOf(r.Dst), direct: direct, link: h.LinkIndex})
		}
	}
	return all
}

// prefixOf converts a network. An IPv4 address may have 4 bytes or 16.
func prefixOf(n *net.IPNet) netip.Prefix {
	ip, _ := netip.AddrFromSlice(n.IP)
	bits, _ := n.Mask.Size()
	return netip.PrefixFrom(ip.Unmap(), bits)
}

// nameOf returns the name of the network device with that index, or "".
func nameOf(link int) string {
	l, err := netlink.LinkByIndex(link)
	if err != nil {
		return ""
	}
	return l.Attrs().Name
}

// driverOf asks the kernel for the driver of a network device, as ethtool -i does; "" if there is none. The name of
// a device does not tell its kind, and sysfs does not show every kind.
func driverOf(device string) string {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return ""
	}
	defer unix.Close(fd)
	info, err := unix.IoctlGetEthtoolDrvinfo(fd, device)
	if err != nil {
		return ""
	}
	return unix.ByteSliceToString(info.Driver[:])
}
