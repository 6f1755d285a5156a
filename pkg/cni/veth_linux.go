package cni

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// hostLink returns the name of the node's end of an attachment's veth pair: 11 hexadecimal digits of a hash, since a
// name has at most 15 characters. On a node with 250 attachments, two names are equal once in 5 * 10^8 nodes.
func (a attachment) hostLink() string {
	hash := sha256.Sum256([]byte(a.network + "\x00" + a.containerID + "\x00" + a.ifName))
	return "veth" + hex.EncodeToString(hash[:])[:11]
}

// hostLinkLives reports whether the node's end of an attachment's veth pair exists. The kernel removes it when the
// namespace of the other end ends.
func hostLinkLives(a attachment) bool {
	_, err := netlink.LinkByName(a.hostLink())
	return !isNotFound(err) // with any other error, the link may exist
}

// connect makes the veth pair of an attachment: one end on the bridge, and one in the pod, with the addresses
// and routes. The caller calls disconnect if it fails.
func connect(a attachment, bridge netlink.Link, pod *sandbox, mtu int, addrs, gateways []netip.Addr) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.Flags = a.hostLink(), mtu, net.FlagUp
	attrs.MasterIndex = bridge.Attrs().Index
	veth := netlink.NewVeth(attrs)
	veth.PeerName = a.ifName
	veth.PeerNamespace = netlink.NsFd(pod.ns)
	veth.PeerHardwareAddr = macOf(addrs[0])
	err := netlink.LinkAdd(veth)
	if errors.Is(err, unix.EEXIST) {
		// An earlier ADD of this attachment was killed. Its pair ends in another namespace: ADD has checked this one.
		if err = disconnect(a); err == nil {
			err = netlink.LinkAdd(veth)
		}
	}
	if err != nil {
		return fmt.Errorf("making the links of the pod: %w", err)
	}
	if err := ignoreAdvertisements(attrs.Name); err != nil { // in case it leaves the bridge
		return err
	}
	// If a pod dials its own Service, or its own port of the host, packets return by the link on which they came. With
	// br_netfilter, the bridge itself translates the address and forwards the packet; without hairpin it would drop it.
	if err := netlink.LinkSetHairpin(veth, true); err != nil {
		return fmt.Errorf("setting hairpin mode of %s: %w", attrs.Name, err)
	}
	for _, addr := range addrs {
		// The node may remember the hardware address of an earlier pod for addr. It is no error if there is no entry.
		_ = netlink.NeighDel(&netlink.Neigh{LinkIndex: bridge.Attrs().Index, IP: addr.AsSlice()})
	}
	if alias := aliasOf(a, addrs); len(alias) <= maxAlias {
		if err := netlink.LinkSetAlias(veth, alias); err != nil {
			return fmt.Errorf("naming %s: %w", attrs.Name, err)
		}
	}
	return pod.do(func() error { return configure(a.ifName, addrs, gateways) })
}

// configure gives the pod's link its addresses and routes. It runs in the namespace of the pod.
func configure(ifName string, addrs, gateways []netip.Addr) error {
	link, err := netlink.LinkByName(ifName)
	if err != nil {
		return fmt.Errorf("finding %s in the pod: %w", ifName, err)
	}
	if err := errors.Join(ignoreAdvertisements(ifName), apply(settingsInPod(ifName, addrs)...)); err != nil {
		return err
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return fmt.Errorf("starting %s in the pod: %w", ifName, err)
	}
	for i, addr := range addrs {
		address := &netlink.Addr{IPNet: only(addr)}
		if addr.Is6() {
			address.Flags = unix.IFA_F_NODAD // the pod can use the address at once
		}
		if err := netlink.AddrAdd(link, address); err != nil {
			return fmt.Errorf("giving %s the address %s: %w", ifName, addr, err)
		}
		for _, route := range routesOf(link.Attrs().Index, gateways[i]) {
			if err := netlink.RouteAdd(&route); err != nil {
				return fmt.Errorf("adding route %s in the pod: %w", route.Dst, err)
			}
		}
	}
	return nil
}

// settingsInPod returns the kernel settings of the pod's link: it ignores redirects, see forwardingV4.
func settingsInPod(ifName string, addrs []netip.Addr) (settings []setting) {
	for _, addr := range addrs {
		if addr.Is4() {
			settings = append(settings, setting{"ipv4/conf/all/accept_redirects", "0"},
				setting{"ipv4/conf/" + ifName + "/accept_redirects", "0"})
			continue
		}
		in := "ipv6/conf/" + ifName + "/"
		settings = append(settings, setting{in + "disable_ipv6", "0"}, setting{in + "accept_dad", "0"},
			setting{in + "accept_redirects", "0"})
	}
	return settings
}

// routesOf returns the routes of a pod: all packets go to the gateway. One route leads to the gateway itself, since the
// pod's own network (/32 or /128) does not contain it.
func routesOf(index int, gateway netip.Addr) []netlink.Route {
	everything := netip.PrefixFrom(gateway, 0).Masked()
	return []netlink.Route{
		{LinkIndex: index, Dst: only(gateway), Scope: netlink.SCOPE_LINK},
		{LinkIndex: index, Dst: ipNet(everything), Gw: gateway.AsSlice()},
	}
}

// disconnect removes the links of an attachment, in node and pod. It is no error if there is no link.
func disconnect(a attachment) error {
	link, err := netlink.LinkByName(a.hostLink())
	if err == nil {
		err = netlink.LinkDel(link)
	}
	if err != nil && !isNotFound(err) && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("removing %s: %w", a.hostLink(), err)
	}
	return nil
}

// missingIn returns an error if the pod has a link of this name already: the specification says that ADD must fail
// then.
func missingIn(pod *sandbox, ifName string) error {
	return pod.do(func() error {
		_, err := netlink.LinkByName(ifName)
		if isNotFound(err) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("looking for %s in the pod: %w", ifName, err)
		}
		return types.NewError(types.ErrInvalidEnvironmentVariables, "the pod has a link "+ifName+" already",
			"DEL removes it, if tunnel-cni made it")
	})
}

// The node's end has an alias, "tunnel-cni NETWORK CONTAINER IFNAME ADDRESS,ADDRESS". When files are lost, the alias
// proves which attachment has the addresses. In the output of `ip link`, it shows to which pod a link leads.
const (
	aliasMark = "tunnel-cni"
	maxAlias  = 255 // bytes: IFALIASZ of Linux without the zero byte
)

func aliasOf(a attachment, addrs []netip.Addr) string {
	texts := make([]string, len(addrs))
	for i, addr := range addrs {
		texts[i] = addr.String()
	}
	return strings.Join([]string{aliasMark, a.network, a.containerID, a.ifName, strings.Join(texts, ",")}, " ")
}

// attachmentOf reads an alias.
func attachmentOf(alias string) (a attachment, addrs []netip.Addr, ok bool) {
	fields := strings.Fields(alias)
	if len(fields) != 5 || fields[0] != aliasMark {
		return attachment{}, nil, false
	}
	for text := range strings.SplitSeq(fields[4], ",") {
		addr, err := netip.ParseAddr(text)
		if err != nil {
			return attachment{}, nil, false
		}
		addrs = append(addrs, addr)
	}
	return attachment{fields[1], fields[2], fields[3]}, addrs, true
}

// Attached counts the attachments of this node, by the aliases of its links.
func Attached() (int, error) {
	links, err := linked()
	return len(links), err
}

// maxLists is how many lists of links linked joins.
const maxLists = 10

// linked returns the attachments in the aliases of this node's links, with their addresses. If the kernel changes its
// list of links while linked reads it, links may be missing. So linked joins further lists until the kernel did not
// change one, or until it has maxLists lists. A link that exists all the time is in one of them.
func linked() (map[attachment][]netip.Addr, error) {
	found := make(map[attachment][]netip.Addr)
	for range maxLists {
		links, err := netlink.LinkList()
		if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
			return nil, fmt.Errorf("listing links: %w", err)
		}
		for _, link := range links {
			a, addrs, ok := attachmentOf(link.Attrs().Alias)
			if ok && link.Attrs().Name == a.hostLink() {
				found[a] = addrs
			}
		}
		if err == nil {
			break
		}
	}
	return found, nil
}
