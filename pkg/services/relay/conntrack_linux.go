package relay

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// SO_ORIGINAL_DST works only for TCP. For a translated datagram, IP_RECVORIGDSTADDR says the relay's own address. So
// the relay asks conntrack, which has an entry for each flow: one message of netlink, and one answer.

// destination implements kernel. Answers to the caller go from local to the caller, so destination looks for the entry
// whose reply direction has these addresses. If two entries would have the same addresses, the kernel gives the caller
// another port.
func (*linux) destination(caller, local netip.AddrPort) (at netip.AddrPort, err error) {
	// The kernel marks its answer as one of several (NLM_F_MULTI), so only an acknowledgement shows the end.
	get := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_CTNETLINK<<8|nl.IPCTNL_MSG_CT_GET, unix.NLM_F_ACK)
	get.AddData(&nl.Nfgenmsg{NfgenFamily: familyOf(local.Addr()).protocol, Version: nl.NFNETLINK_V0})
	get.AddData(tuple(nl.CTA_TUPLE_REPLY, local, caller))
	answers, err := get.Execute(unix.NETLINK_NETFILTER, 0)
	switch {
	case errors.Is(err, unix.ENOENT):
		return at, errUntracked
	case err != nil:
		return at, fmt.Errorf("asking the kernel where a datagram was sent to: %w", withRights(err))
	}
	for _, answer := range answers {
		if to, ok := destinationOf(answer); ok {
			return to, nil
		}
	}
	return at, errUntracked
}

// tuple returns the attribute that names a flow of UDP by the addresses of one direction.
func tuple(kind int, from, to netip.AddrPort) *nl.RtAttr {
	source, target := nl.CTA_IP_V4_SRC, nl.CTA_IP_V4_DST
	if from.Addr().Is6() {
		source, target = nl.CTA_IP_V6_SRC, nl.CTA_IP_V6_DST
	}
	t := nl.NewRtAttr(unix.NLA_F_NESTED|kind, nil)
	ip := t.AddRtAttr(unix.NLA_F_NESTED|nl.CTA_TUPLE_IP, nil)
	ip.AddRtAttr(source, from.Addr().AsSlice())
	ip.AddRtAttr(target, to.Addr().AsSlice())
	ports := t.AddRtAttr(unix.NLA_F_NESTED|nl.CTA_TUPLE_PROTO, nil)
	ports.AddRtAttr(nl.CTA_PROTO_NUM, []byte{unix.IPPROTO_UDP})
	ports.AddRtAttr(nl.CTA_PROTO_SRC_PORT, binary.BigEndian.AppendUint16(nil, from.Port()))
	ports.AddRtAttr(nl.CTA_PROTO_DST_PORT, binary.BigEndian.AppendUint16(nil, to.Port()))
	return t
}

// destinationOf returns the original destination in an entry of conntrack.
func destinationOf(entry []byte) (at netip.AddrPort, ok bool) {
	const header = 4 // struct nfgenmsg of linux/netfilter/nfnetlink.h
	if len(entry) < header {
		return at, false
	}
	original := attribute(entry[header:], nl.CTA_TUPLE_ORIG)
	ip, ports := attribute(original, nl.CTA_TUPLE_IP), attribute(original, nl.CTA_TUPLE_PROTO)
	addr, ok := netip.AddrFromSlice(attribute(ip, nl.CTA_IP_V4_DST))
	if !ok {
		addr, ok = netip.AddrFromSlice(attribute(ip, nl.CTA_IP_V6_DST))
	}
	port := attribute(ports, nl.CTA_PROTO_DST_PORT)
	if !ok || len(port) != 2 {
		return at, false
	}
	return netip.AddrPortFrom(addr.Unmap(), binary.BigEndian.Uint16(port)), true
}

// attribute returns the value of an attribute, or nil.
func attribute(b []byte, kind uint16) []byte {
	all, err := nl.ParseRouteAttr(b)
	if err != nil {
		return nil
	}
	for _, a := range all {
		if a.Attr.Type&^(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER) == kind {
			return a.Value
		}
	}
	return nil
}

// forget implements kernel.
func (k *linux) forget(before, after rules) error {
	if len(k.left) > 0 { // it has no ports of the relay for node ports, so look at all
		maps.Copy(k.left, before)
		before, k.left = k.left, nil
	} else if before, after = outdates(before, after); len(before)+len(after) == 0 {
		return nil // nothing can be outdated, for example when only an endpoint comes: skip the list of all entries
	}
	var errs []error
	isOwn := ownAddresses(before, after)
	for _, listener := range k.listeners {
		own := listener.Addr()
		_, err := netlink.ConntrackDeleteFilters(netlink.ConntrackTable,
			netlink.InetFamily(familyOf(own).protocol), outdated{before, after, own, isOwn, !k.full})
		if err != nil {
			errs = append(errs, fmt.Errorf("removing entries of conntrack: %w", withRights(err)))
		}
	}
	return errors.Join(errs...)
}

// noteFlows notes where the sets of other calls of program have led flows. The process that has made them may have been
// killed, and this one may not know what it served last.
func (k *linux) noteFlows(c *nftables.Conn, others leftovers) error {
	k.left = make(rules)
	for _, listener := range k.listeners {
		f := familyOf(listener.Addr())
		for _, kind := range []setKind{setServices, setRelayPorts, setEnds} {
			for _, set := range others.sets {
				if !strings.HasPrefix(set.Name, kind.String()+f.name+"-") {
					continue
				}
				set.Table = k.table()
				all, err := c.GetSetElements(set)
				if err != nil {
					return fmt.Errorf("reading where flows may lead: %w", err)
				}
				for _, e := range all {
					k.noteFlow(kind, f, e.Key, e.Val)
				}
			}
		}
	}
	return nil
}

// noteFlow notes where an element leads, see element. It passes over elements of another layout.
func (k *linux) noteFlow(kind setKind, f family, key, val []byte) {
	addr := netip.IPv4Unspecified()
	if f.own.Is6() {
		addr = netip.IPv6Unspecified()
	}
	size := int(f.size)
	if kind != setRelayPorts && len(key) >= size {
		addr, _ = netip.AddrFromSlice(key[:size])
		key = key[size:]
	}
	if len(key) < len(portKey(address{})) {
		return
	}
	at := address{netip.AddrPortFrom(addr, binary.BigEndian.Uint16(key[4:])), protocolOf(key[0])}
	switch r := k.left[at]; {
	case kind == setEnds && len(val) >= size+2:
		addr, _ := netip.AddrFromSlice(val[:size])
		end := netip.AddrPortFrom(addr, binary.BigEndian.Uint16(val[size:]))
		i, _ := slices.BinarySearchFunc(r.ends, end, netip.AddrPort.Compare)
		r.kind, r.ends = toEnds, slices.Insert(r.ends, i, end)
		k.left[at] = r
	case kind != setEnds && len(val) >= 2:
		k.left[at] = rule{kind: toRelay, port: binary.BigEndian.Uint16(val)}
	}
}

// protocolOf undoes protocolNumber.
func protocolOf(number byte) string {
	switch number {
	case protocolNumber(protocolUDP):
		return protocolUDP
	case protocolNumber(protocolSCTP):
		return protocolSCTP
	}
	return protocolTCP
}

// ownAddresses returns the addresses of this machine if there are rules for node ports, else nil.
func ownAddresses(all ...rules) map[netip.Addr]struct{} {
	for _, some := range all {
		for at := range some {
			if !at.isNodePort() {
				continue
			}
			found := make(map[netip.Addr]struct{})
			addrs, _ := net.InterfaceAddrs() // if it fails, flows to node ports stay as they are
			for _, one := range addrs {
				if n, ok := one.(*net.IPNet); ok {
					addr, _ := netip.AddrFromSlice(n.IP)
					found[addr.Unmap()] = struct{}{}
				}
			}
			return found
		}
	}
	return nil
}

// outdated matches the entries of conntrack that forget removes.
type outdated struct {
	before, after rules
	own           netip.Addr              // the relay's own address
	isOwn         map[netip.Addr]struct{} // addresses of this machine, see ownAddresses
	// beside says that the edge works beside kube-proxy, which serves the addresses that after lacks. kube-proxy may use
	// the endpoints in before as well, and ends flows to other endpoints itself. So only flows to the relay are outdated.
	beside bool
}

// MatchConntrackFlow implements netlink.CustomConntrackFilter.
func (o outdated) MatchConntrackFlow(f *netlink.ConntrackFlow) bool {
	protocol, ok := mayForget(f)
	if !ok {
		return false
	}
	at := address{addrPort(f.Forward.DstIP, f.Forward.DstPort), protocol}
	leads := addrPort(f.Reverse.SrcIP, f.Reverse.SrcPort)
	if stale, known := o.stale(at, leads); known {
		return stale
	}
	if _, local := o.isOwn[at.Addr()]; !local {
		return false
	}
	every := netip.IPv4Unspecified()
	if at.Addr().Is6() {
		every = netip.IPv6Unspecified()
	}
	stale, _ := o.stale(address{netip.AddrPortFrom(every, at.Port()), protocol}, leads)
	return stale
}

// stale reports whether the entry of a flow to at leads to where the rules do not lead. known is false if at has no
// rule.
func (o outdated) stale(at address, leads netip.AddrPort) (stale, known bool) {
	if now, ok := o.after[at]; ok {
		return !now.leads(leads, o.own), true
	}
	was, ok := o.before[at]
	if o.beside {
		was.ends, was.local, was.serving = nil, nil, nil
	}
	return ok && was.leads(leads, o.own), ok
}

// mayForget returns the protocol of an entry that can be removed without cutting off anything: of UDP, or of a TCP
// connection that has had no answer. A TCP caller without an answer sends its SYN again, and the rules decide again. ok
// is false for other entries.
func mayForget(f *netlink.ConntrackFlow) (protocol string, ok bool) {
	const synSent = 1 // TCP_CONNTRACK_SYN_SENT of linux/netfilter/nf_conntrack_tcp.h
	switch f.Forward.Protocol {
	case unix.IPPROTO_UDP:
		return protocolUDP, true
	case unix.IPPROTO_TCP:
		state, known := f.ProtoInfo.(*netlink.ProtoInfoTCP)
		return protocolTCP, known && state.State == synSent
	}
	return "", false
}

func addrPort(ip net.IP, port uint16) netip.AddrPort {
	addr, _ := netip.AddrFromSlice(ip)
	return netip.AddrPortFrom(addr.Unmap(), port)
}
