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
	get := conntrackRequest(nl.IPCTNL_MSG_CT_GET, unix.NLM_F_ACK, familyOf(local.Addr()))
	get.AddData(tuple(nl.CTA_TUPLE_REPLY, unix.IPPROTO_UDP, local, caller))
	answers, err := get.Execute(unix.NETLINK_NETFILTER, 0)
	switch {
	case errors.Is(err, unix.ENOENT):
		return at, errUntracked
	case err != nil:
		return at, fmt.Errorf("asking the kernel where a datagram was sent to: %w", withRights(err))
	}
	for _, answer := range answers {
		if to := flowOf(answer).to; to.IsValid() {
			return to, nil
		}
	}
	return at, errUntracked
}

// conntrackRequest returns a request about entries of a family.
func conntrackRequest(message, flags int, f family) *nl.NetlinkRequest {
	req := nl.NewNetlinkRequest(unix.NFNL_SUBSYS_CTNETLINK<<8|message, flags)
	req.AddData(&nl.Nfgenmsg{NfgenFamily: f.protocol, Version: nl.NFNETLINK_V0})
	return req
}

// tuple returns the attribute that names flows by the addresses of one direction. It leaves out addresses that are not
// valid, and ports that are 0.
func tuple(kind int, protocol byte, from, to netip.AddrPort) *nl.RtAttr {
	t := nl.NewRtAttr(unix.NLA_F_NESTED|kind, nil)
	if from.Addr().IsValid() || to.Addr().IsValid() {
		ip := t.AddRtAttr(unix.NLA_F_NESTED|nl.CTA_TUPLE_IP, nil)
		addAddr(ip, from.Addr(), nl.CTA_IP_V4_SRC, nl.CTA_IP_V6_SRC)
		addAddr(ip, to.Addr(), nl.CTA_IP_V4_DST, nl.CTA_IP_V6_DST)
	}
	ports := t.AddRtAttr(unix.NLA_F_NESTED|nl.CTA_TUPLE_PROTO, nil)
	ports.AddRtAttr(nl.CTA_PROTO_NUM, []byte{protocol})
	if from.Port() != 0 {
		ports.AddRtAttr(nl.CTA_PROTO_SRC_PORT, binary.BigEndian.AppendUint16(nil, from.Port()))
	}
	if to.Port() != 0 {
		ports.AddRtAttr(nl.CTA_PROTO_DST_PORT, binary.BigEndian.AppendUint16(nil, to.Port()))
	}
	return t
}

// addAddr adds an address, if it is valid.
func addAddr(ip *nl.RtAttr, addr netip.Addr, kind4, kind6 int) {
	switch {
	case addr.Is4():
		ip.AddRtAttr(kind4, addr.AsSlice())
	case addr.Is6():
		ip.AddRtAttr(kind6, addr.AsSlice())
	}
}

// flow is an entry of conntrack.
type flow struct {
	protocol byte
	state    byte           // of TCP, as in linux/netfilter/nf_conntrack_tcp.h
	to       netip.AddrPort // where the caller sends to
	leads    netip.AddrPort // where answers come from
}

// flowOf reads an entry of conntrack. Fields that the entry lacks stay zero.
func flowOf(entry []byte) (f flow) {
	const header = 4 // struct nfgenmsg of linux/netfilter/nfnetlink.h
	if len(entry) < header {
		return f
	}
	entry = entry[header:]
	original := attribute(entry, nl.CTA_TUPLE_ORIG)
	f.protocol = octet(attribute(attribute(original, nl.CTA_TUPLE_PROTO), nl.CTA_PROTO_NUM))
	f.state = octet(attribute(attribute(attribute(entry, nl.CTA_PROTOINFO), nl.CTA_PROTOINFO_TCP),
		nl.CTA_PROTOINFO_TCP_STATE))
	f.to = endOf(original, nl.CTA_IP_V4_DST, nl.CTA_IP_V6_DST, nl.CTA_PROTO_DST_PORT)
	f.leads = endOf(attribute(entry, nl.CTA_TUPLE_REPLY), nl.CTA_IP_V4_SRC, nl.CTA_IP_V6_SRC, nl.CTA_PROTO_SRC_PORT)
	return f
}

// endOf returns an address and a port in a tuple.
func endOf(tuple []byte, kind4, kind6, port uint16) (end netip.AddrPort) {
	ip := attribute(tuple, nl.CTA_TUPLE_IP)
	addr, ok := netip.AddrFromSlice(attribute(ip, kind4))
	if !ok {
		addr, ok = netip.AddrFromSlice(attribute(ip, kind6))
	}
	number := attribute(attribute(tuple, nl.CTA_TUPLE_PROTO), port)
	if !ok || len(number) != 2 {
		return end
	}
	return netip.AddrPortFrom(addr.Unmap(), binary.BigEndian.Uint16(number))
}

// octet returns the value of an attribute of one byte, or 0.
func octet(value []byte) byte {
	if len(value) != 1 {
		return 0
	}
	return value[0]
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
		o := outdated{before, after, own, isOwn, !k.full}
		for _, to := range filters(own, before, after) {
			if err := o.remove(familyOf(own), to); err != nil {
				errs = append(errs, fmt.Errorf("removing entries of conntrack: %w", withRights(err)))
			}
		}
	}
	return errors.Join(errs...)
}

// filters returns the destinations of the flows that rules may concern, in the family of own. If they are many, it
// returns all of UDP and all of TCP, since the kernel looks at each of its flows once for each destination.
func filters(own netip.Addr, all ...rules) []address {
	const few = 8
	named := make(map[address]struct{})
	for _, some := range all {
		for at := range some {
			if !at.isPort() || at.protocol == protocolSCTP || at.Addr().Is4() != own.Is4() {
				continue
			}
			if at.isNodePort() {
				at.AddrPort = netip.AddrPortFrom(netip.Addr{}, at.Port()) // at any address
			}
			named[at] = struct{}{}
			if len(named) > few {
				return []address{{protocol: protocolUDP}, {protocol: protocolTCP}}
			}
		}
	}
	return slices.Collect(maps.Keys(named))
}

// conntrackEntries returns the entries of flows to an address, which may be without address or port. It asks the kernel
// to leave out the other entries, and connections of TCP that have had an answer: a node may have 100,000 of them.
// Linux does so since 5.8 and 5.18; an older one returns all entries of the family.
func conntrackEntries(f family, to address) ([][]byte, error) {
	// The numbers are those of linux/netfilter/nfnetlink_conntrack.h and net/netfilter/nf_internals.h in Linux's source.
	const (
		filter, filterFlags, statusMask  = 25, 1, 26
		flagAddr, flagProtocol, flagPort = 1 << 1, 1 << 3, 1 << 5 // of the destination
		seenReply                        = 1 << 1
	)
	protocol := protocolNumber(to.protocol)
	flags := uint32(flagProtocol)
	if to.Addr().Is4() {
		flags |= flagAddr
	} else { // Linux compares addresses of IPv6 the wrong way round (ctnetlink_filter_match_tuple, as of 6.18)
		to.AddrPort = netip.AddrPortFrom(netip.Addr{}, to.Port())
	}
	if to.Port() != 0 {
		flags |= flagPort
	}
	dump := conntrackRequest(nl.IPCTNL_MSG_CT_GET, unix.NLM_F_DUMP, f)
	dump.AddData(tuple(nl.CTA_TUPLE_ORIG, protocol, netip.AddrPort{}, to.AddrPort))
	by := nl.NewRtAttr(unix.NLA_F_NESTED|filter, nil)
	by.AddRtAttr(filterFlags, binary.NativeEndian.AppendUint32(nil, flags))
	dump.AddData(by)
	if protocol == unix.IPPROTO_TCP {
		dump.AddData(nl.NewRtAttr(nl.CTA_STATUS, binary.BigEndian.AppendUint32(nil, 0)))
		dump.AddData(nl.NewRtAttr(statusMask, binary.BigEndian.AppendUint32(nil, seenReply)))
	}
	return dump.Execute(unix.NETLINK_NETFILTER, 0)
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

// outdated says which entries of conntrack forget removes.
type outdated struct {
	before, after rules
	own           netip.Addr              // the relay's own address
	isOwn         map[netip.Addr]struct{} // addresses of this machine, see ownAddresses
	// beside says that the edge works beside kube-proxy, which serves the addresses that after lacks. kube-proxy may use
	// the endpoints in before as well, and ends flows to other endpoints itself. So only flows to the relay are outdated.
	beside bool
}

// remove removes the outdated entries of flows to an address.
func (o outdated) remove(f family, to address) error {
	entries, err := conntrackEntries(f, to)
	if err != nil && !errors.Is(err, nl.ErrDumpInterrupted) { // interrupted: the kernel may have left out some
		return err
	}
	errs := []error{err}
	for _, entry := range entries {
		if !o.matches(flowOf(entry)) {
			continue
		}
		remove := conntrackRequest(nl.IPCTNL_MSG_CT_DELETE, unix.NLM_F_ACK, f)
		remove.AddRawData(entry[nl.SizeofNfgenmsg:])
		if _, err = remove.Execute(unix.NETLINK_NETFILTER, 0); !errors.Is(err, unix.ENOENT) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// matches reports whether forget removes a flow.
func (o outdated) matches(f flow) bool {
	protocol, ok := mayForget(f)
	if !ok {
		return false
	}
	at := address{f.to, protocol}
	if stale, known := o.stale(at, f.leads); known {
		return stale
	}
	if _, local := o.isOwn[at.Addr()]; !local {
		return false
	}
	every := netip.IPv4Unspecified()
	if at.Addr().Is6() {
		every = netip.IPv6Unspecified()
	}
	stale, _ := o.stale(address{netip.AddrPortFrom(every, at.Port()), protocol}, f.leads)
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
func mayForget(f flow) (protocol string, ok bool) {
	const synSent = 1 // TCP_CONNTRACK_SYN_SENT of linux/netfilter/nf_conntrack_tcp.h
	switch f.protocol {
	case unix.IPPROTO_UDP:
		return protocolUDP, true
	case unix.IPPROTO_TCP:
		return protocolTCP, f.state == synSent
	}
	return "", false
}
