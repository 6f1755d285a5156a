package cni

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"
	"github.com/vishvananda/netlink"
)

// errChanged is the error code of CHECK if something is no longer as ADD left it. Each plugin may define codes from 100
// on.
const errChanged = 100

// check is CHECK. The runtime passes the result of ADD, and check compares it with reservations, network interfaces,
// addresses and routes.
func check(args *skel.CmdArgs) error {
	conf, err := parseConf(args.StdinData)
	if err != nil {
		return err
	}
	result, err := previous(conf)
	if err != nil {
		return err
	}
	addrs := addressesIn(result, args.Netns)
	if len(addrs) == 0 {
		return types.NewError(types.ErrInvalidNetworkConfig, "prevResult names no address of this pod", "")
	}
	a := attachment{conf.Name, args.ContainerID, args.IfName}
	inside, err := openSandbox(args.Netns)
	if err != nil {
		return err
	}
	defer inside.close()
	err = errors.Join(
		checkReservations(conf, a, addrs),
		checkNode(conf, a),
		inside.do(func() error { return checkPod(conf, args.IfName, addrs) }),
	)
	if err != nil {
		return types.NewError(errChanged, "the network of the pod has changed", err.Error())
	}
	return nil
}

// previous returns the result of ADD, which CHECK needs.
func previous(conf *Conf) (*current.Result, error) {
	if conf.RawPrevResult == nil {
		return nil, types.NewError(types.ErrInvalidNetworkConfig, "prevResult is missing", "CHECK needs the result of ADD")
	}
	err := version.ParsePrevResult(&conf.PluginConf)
	if err == nil {
		var result *current.Result
		if result, err = current.NewResultFromResult(conf.PrevResult); err == nil {
			return result, nil
		}
	}
	return nil, types.NewError(types.ErrDecodingFailure, "reading prevResult", err.Error())
}

// addressesIn returns the addresses that a result gives to the network interfaces in the namespace at path.
func addressesIn(result *current.Result, path string) (addrs []netip.Addr) {
	for _, ip := range result.IPs {
		if ip.Interface == nil || *ip.Interface < 0 || *ip.Interface >= len(result.Interfaces) {
			continue
		}
		addr, ok := netip.AddrFromSlice(ip.Address.IP)
		if ok && result.Interfaces[*ip.Interface].Sandbox == path {
			addrs = append(addrs, addr.Unmap())
		}
	}
	return addrs
}

func checkReservations(conf *Conf, a attachment, addrs []netip.Addr) error {
	s, err := openExisting(conf.DataDir)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("no address is reserved: %w", err)
	}
	if err != nil {
		return err
	}
	defer s.close()
	var errs []error
	for _, addr := range addrs {
		if r := s.known[addr]; r == nil || !r.belongsTo(a) {
			errs = append(errs, fmt.Errorf("address %s is not reserved for this container", addr))
		}
	}
	return errors.Join(errs...)
}

// checkNode checks the node's end of the veth pair.
func checkNode(conf *Conf, a attachment) error {
	bridge, err := netlink.LinkByName(conf.Bridge)
	if err != nil {
		return fmt.Errorf("bridge %s: %w", conf.Bridge, err)
	}
	link, err := netlink.LinkByName(a.hostLink())
	if err != nil {
		return fmt.Errorf("link %s of the node: %w", a.hostLink(), err)
	}
	switch {
	case link.Attrs().MasterIndex != bridge.Attrs().Index:
		return fmt.Errorf("link %s is not on bridge %s", a.hostLink(), conf.Bridge)
	case link.Attrs().Flags&net.FlagUp == 0:
		return fmt.Errorf("link %s is down", a.hostLink())
	case bridge.Attrs().Flags&net.FlagUp == 0:
		return fmt.Errorf("bridge %s is down", conf.Bridge)
	}
	return checkHairpin(link)
}

func checkHairpin(link netlink.Link) error {
	info, err := Dump(func() ([]netlink.Protinfo, error) {
		info, err := netlink.LinkGetProtinfo(link)
		return []netlink.Protinfo{info}, err
	})
	if err != nil {
		return fmt.Errorf("settings of link %s: %w", link.Attrs().Name, err)
	}
	if !info[0].Hairpin {
		return fmt.Errorf("link %s is not in hairpin mode: the pod cannot reach its own Services", link.Attrs().Name)
	}
	return nil
}

// checkPod checks the pod's end of the veth pair. It runs in the namespace of the pod.
func checkPod(conf *Conf, ifName string, addrs []netip.Addr) error {
	link, err := netlink.LinkByName(ifName)
	if err != nil {
		return fmt.Errorf("link %s of the pod: %w", ifName, err)
	}
	var errs []error
	if link.Type() != "veth" {
		errs = append(errs, fmt.Errorf("link %s of the pod is a %s", ifName, link.Type()))
	}
	if link.Attrs().Flags&net.FlagUp == 0 {
		errs = append(errs, fmt.Errorf("link %s of the pod is down", ifName))
	}
	for _, addr := range addrs {
		errs = append(errs, checkAddress(link, addr))
		// If the subnets have changed since ADD, the pod keeps its old gateway, so check no route.
		if subnet, ok := conf.subnetOf(addr); ok {
			errs = append(errs, checkRoutes(link, gatewayOf(subnet)))
		}
	}
	return errors.Join(errs...)
}

func checkAddress(link netlink.Link, addr netip.Addr) error {
	has, err := Dump(func() ([]netlink.Addr, error) { return netlink.AddrList(link, netlink.FAMILY_ALL) })
	if err != nil {
		return fmt.Errorf("listing addresses of the pod: %w", err)
	}
	for _, a := range has {
		if a.IPNet.String() == only(addr).String() {
			return nil
		}
	}
	return fmt.Errorf("link %s of the pod does not have the address %s", link.Attrs().Name, only(addr))
}

func checkRoutes(link netlink.Link, gateway netip.Addr) error {
	family := netlink.FAMILY_V4
	if gateway.Is6() {
		family = netlink.FAMILY_V6
	}
	has, err := Dump(func() ([]netlink.Route, error) { return netlink.RouteList(link, family) })
	if err != nil {
		return fmt.Errorf("listing routes of the pod: %w", err)
	}
	for _, route := range has {
		if isDefault(route) && route.Gw.Equal(gateway.AsSlice()) {
			return nil
		}
	}
	return fmt.Errorf("the pod has no default route by %s", gateway)
}
