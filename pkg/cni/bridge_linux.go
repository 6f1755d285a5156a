package cni

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// EnsureBridge makes the bridge, its addresses and the settings of the kernel as conf says. It changes only what is
// wrong, and removes nothing. If another network interface of the node reaches a subnet of conf, EnsureBridge fails
// before it changes anything. Several processes may call it at the same time. If it fails only to correct settings of
// the kernel, it returns both the bridge and an error.
func EnsureBridge(conf *Conf) (netlink.Link, error) {
	missing, err := conf.missingGateways()
	if err != nil {
		return nil, err
	}
	bridge, err := findOrAddBridge(conf)
	if err != nil {
		return nil, err
	}
	wrong := ignoreAdvertisements(conf.Bridge) // why settings of the kernel could not be corrected
	for _, subnet := range conf.Subnets {
		if subnet.Addr().Is4() {
			err = apply(forwardingV4(conf.Bridge)...)
		} else {
			err = forwardV6(conf.Bridge)
		}
		wrong = errors.Join(wrong, err)
	}
	for _, subnet := range missing {
		addr := netlink.Addr{IPNet: ipNet(netip.PrefixFrom(gatewayOf(subnet), subnet.Bits()))}
		if subnet.Addr().Is6() {
			addr.Flags = unix.IFA_F_NODAD // duplicate address detection would delay the address
		}
		if err = netlink.AddrAdd(bridge, &addr); err != nil && !errors.Is(err, unix.EEXIST) {
			err = fmt.Errorf("giving bridge %s the address %s: %w", conf.Bridge, addr.IPNet, err)
			return nil, errors.Join(wrong, err)
		}
	}
	if err := netlink.LinkSetUp(bridge); err != nil {
		return nil, errors.Join(wrong, fmt.Errorf("starting bridge %s: %w", conf.Bridge, err))
	}
	return bridge, errors.Join(wrong, gather(conf, bridge))
}

// gather puts the links of pods that are on no bridge on this one: a person or a program has removed their bridge. ADD
// gives a link its alias only when the link is on a bridge, so gather does not disturb an ADD.
func gather(conf *Conf, bridge netlink.Link) error {
	links, err := Dump(netlink.LinkList)
	if err != nil {
		return fmt.Errorf("listing links: %w", err)
	}
	var errs []error
	for _, link := range links {
		a, _, ok := attachmentOf(link.Attrs().Alias)
		if !ok || a.network != conf.Name || link.Attrs().Name != a.hostLink() || link.Attrs().MasterIndex != 0 {
			continue
		}
		err = netlink.LinkSetMaster(link, bridge)
		if err == nil {
			err = netlink.LinkSetHairpin(link, true)
		}
		if err != nil && !isNotFound(err) && !errors.Is(err, unix.ENODEV) { // else the pod has ended
			errs = append(errs, fmt.Errorf("putting %s on bridge %s: %w", link.Attrs().Name, conf.Bridge, err))
		}
	}
	return errors.Join(errs...)
}

func findOrAddBridge(conf *Conf) (netlink.Link, error) {
	link, err := netlink.LinkByName(conf.Bridge)
	if isNotFound(err) {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = conf.Bridge
		attrs.HardwareAddr = macOf(gatewayOf(conf.Subnets[0]))
		if attrs.MTU, err = conf.mtu(); err != nil {
			return nil, err
		}
		if err = netlink.LinkAdd(&netlink.Bridge{LinkAttrs: attrs}); err != nil && !errors.Is(err, unix.EEXIST) {
			return nil, fmt.Errorf("making bridge %s: %w", conf.Bridge, err)
		}
		link, err = netlink.LinkByName(conf.Bridge)
	}
	if err != nil {
		return nil, fmt.Errorf("finding bridge %s: %w", conf.Bridge, err)
	}
	if link.Type() != "bridge" {
		return nil, fmt.Errorf("link %s is a %s: name another bridge", conf.Bridge, link.Type())
	}
	return link, nil
}

// macOf returns the hardware address for an IP address. So the bridge, and a pod at the same address, have the same
// hardware address when they are made again. The tables in which other machines keep hardware addresses stay right.
func macOf(addr netip.Addr) net.HardwareAddr {
	hash := sha256.Sum256(addr.AsSlice())
	// 0x0a marks a locally administered address of a single receiver (IEEE 802).
	return net.HardwareAddr(append([]byte{0x0a}, hash[:5]...))
}

// defaultMTU is the MTU of Ethernet. Pods get it if the node has no default route.
const defaultMTU = 1500

// mtu returns the MTU of pods: the MTU in the configuration, else the smallest MTU of the interfaces with default
// routes.
func (c *Conf) mtu() (int, error) {
	if c.MTU != 0 {
		return c.MTU, nil
	}
	found := 0
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, err := Dump(func() ([]netlink.Route, error) { return netlink.RouteList(nil, family) })
		if err != nil {
			return 0, fmt.Errorf("listing routes: %w", err)
		}
		for _, route := range routes {
			if !isDefault(route) {
				continue
			}
			for _, index := range linksOf(route) {
				link, err := netlink.LinkByIndex(index)
				if err == nil && (found == 0 || link.Attrs().MTU < found) {
					found = link.Attrs().MTU
				}
			}
		}
	}
	if found == 0 {
		return defaultMTU, nil
	}
	return found, nil
}

// linksOf returns the indexes of a route's network interfaces: several if the route has several next hops.
func linksOf(route netlink.Route) (indexes []int) {
	if route.LinkIndex != 0 {
		indexes = append(indexes, route.LinkIndex)
	}
	for _, hop := range route.MultiPath {
		indexes = append(indexes, hop.LinkIndex)
	}
	return indexes
}

func isDefault(route netlink.Route) bool {
	if route.Dst == nil {
		return true
	}
	ones, _ := route.Dst.Mask.Size()
	return ones == 0
}

// The kernel may change a list while a process reads it. Dump then reads the list again, at most maxDumps times. Before
// each time it waits dumpPause longer: some two seconds in all, since a hundred pods may start at once.
const (
	maxDumps  = 60
	dumpPause = time.Millisecond
)

// Dump calls list until the kernel has not changed the list during the call.
func Dump[T any](list func() ([]T, error)) (all []T, err error) {
	for i := range maxDumps {
		time.Sleep(time.Duration(i) * dumpPause)
		if all, err = list(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	return all, err
}

func isNotFound(err error) bool {
	_, ok := errors.AsType[netlink.LinkNotFoundError](err)
	return ok
}

func ipNet(prefix netip.Prefix) *net.IPNet {
	addr := prefix.Addr()
	return &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(prefix.Bits(), addr.BitLen())}
}

// only returns the network with addr as its only address: /32 or /128.
func only(addr netip.Addr) *net.IPNet { return ipNet(netip.PrefixFrom(addr, addr.BitLen())) }
