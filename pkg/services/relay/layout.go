package relay

import (
	"encoding/binary"
	"fmt"
	"net/netip"
)

// How rules are laid out in the kernel's table. No chain of nftables belongs to one Service or one endpoint. A rule
// becomes a few elements of sets, which all Services share. A chain is made for a number of endpoints and a way to
// treat packets. So a change of one Service changes a few elements. The work for one packet does not depend on the
// number of Services.

// setKind says what a set of nftables holds. The table has one set of each kind for IPv4, and one for IPv6.
type setKind uint8

const (
	setServices   setKind = iota // address . protocol . port → port of the relay
	setRelayPorts                // protocol . node port → port of the relay
	setFront                     // address . protocol . port → chain
	setPorts                     // protocol . node port → chain
	setEnds                      // address . protocol . port . index → address . port of an endpoint
	setLive                      // address . protocol . port . address . port of an endpoint that a caller may keep
	setLiveLocal                 // as setLive, for the endpoints of rule.local
	setAffine                    // caller . address . protocol . port → address . port of its endpoint; expires
	setNone                      // address . protocol . port → chain that refuses or drops
	setNonePorts                 // protocol . node port → chain that refuses or drops
	setIPs                       // ClusterIPs
	setHairpin                   // an endpoint on this node, twice: as source and as destination
	setPods                      // networks of the node's pods
	setKinds                     // the number of kinds
)

// String returns the beginning of the set's name. The family (4 or 6) and the id of the table follow.
func (k setKind) String() string {
	return [setKinds]string{"services", "relayports", "front", "ports", "ends", "live", "livelocal", "affine", "none",
		"noneports", "ips", "hairpin", "pods"}[k]
}

// element is one element of a set of nftables. An element of a map also has data (val) or leads to a chain (to).
type element struct {
	set setKind
	key string // in the kernel's form
	val string // only in a map of data: the data, in the kernel's form
	to  chain  // only in a map of verdicts: the chain that packets go to
	end bool   // the key is the first address after a network of setPods
}

// isDispatch reports whether the element sends packets to the relay or to a chain, or has no endpoint. The other
// elements are endpoints. An endpoint must be in the table as long as a chain that may choose it receives packets.
func (e element) isDispatch() bool {
	switch e.set {
	case setEnds, setLive, setLiveLocal:
		return false
	}
	return true
}

// chainKind is what a chain does.
type chainKind uint8

const (
	noChain     chainKind = iota
	chainPick             // translates the destination to one of n endpoints, at random
	chainAffine           // as chainPick, but each caller keeps its endpoint
	chainSplit            // sends callers on this node to one chain, and other callers to another chain
	chainRelay            // translates the destination to the address of the relay
	chainReject           // answers that nobody listens
	chainDrop             // drops
)

// chain describes a chain of nftables that elements send packets to. The table has one chain for all elements with an
// equal description.
type chain struct {
	kind       chainKind
	v6         bool
	n          int    // chainPick, chainAffine: endpoints. chainSplit: endpoints for callers on this node, or 0
	local      bool   // the chain chooses among the endpoints of rule.local, see firstLocal
	node       bool   // packets go to a node port: the keys of the endpoints have the address 0
	sticky     uint32 // chainAffine, chainSplit: how long a caller keeps its endpoint, in seconds
	masquerade bool
	m          int    // chainSplit: the number of endpoints for other callers
	port       uint16 // of the relay, for chainRelay. chainSplit: callers on this node go to this port; 0: they do not
}

// firstLocal is the index of the first endpoint of rule.local in setEnds. The endpoints of rule.ends begin at index 0.
const firstLocal = 1 << 20

// name returns the name of a chain. The id of the table follows it in the kernel.
func (c chain) name() string {
	family := 4
	if c.v6 {
		family = 6
	}
	text := fmt.Sprintf("%s%d", [...]string{"", "pick", "affine", "split", "relay", "reject", "drop"}[c.kind], family)
	switch c.kind {
	case chainPick:
		text += fmt.Sprintf("-%d", c.n)
	case chainAffine:
		text += fmt.Sprintf("-%d-%d", c.n, c.sticky)
	case chainSplit:
		text += fmt.Sprintf("-%d-%d-%d-%d", c.n, c.m, c.sticky, c.port)
	case chainRelay:
		text += fmt.Sprintf("-%d", c.port)
	}
	for _, flag := range []struct {
		is   bool
		text string
	}{{c.node, "-n"}, {c.local, "-l"}, {c.masquerade, "-m"}} {
		if flag.is {
			text += flag.text
		}
	}
	return text
}

// pick returns the chain that chooses one of n endpoints.
func pick(v6, node, local bool, n int, sticky uint32, masquerade bool) chain {
	c := chain{kind: chainPick, v6: v6, n: n, local: local, node: node, masquerade: masquerade}
	if sticky > 0 {
		c.kind, c.sticky = chainAffine, sticky
	}
	return c
}

// random returns the chainPick for the endpoints of a chainAffine. Connections use it when the kernel cannot remember
// the endpoint of another caller.
func (c chain) random() chain {
	c.kind, c.sticky = chainPick, 0
	return c
}

// parts returns the chains to which a chainSplit sends packets: from pods of this node, from the node's own processes,
// and from other callers. With kind noChain, the rules leave such packets alone.
func (c chain) parts() (pods, own, others chain) {
	switch {
	case c.port > 0:
		pods = chain{kind: chainRelay, v6: c.v6, port: c.port}
		own = pods
	case c.n > 0:
		pods = pick(c.v6, c.node, false, c.n, c.sticky, false)
		own = pick(c.v6, c.node, false, c.n, c.sticky, c.masquerade)
	}
	others = chain{kind: chainDrop, v6: c.v6}
	if c.m > 0 {
		others = pick(c.v6, c.node, true, c.m, c.sticky, false)
	}
	return pods, own, others
}

// needs returns the chains to which the rules of c send packets. The table must have them before c.
func (c chain) needs() (all []chain) {
	switch c.kind {
	case chainAffine:
		return []chain{c.random()}
	case chainSplit:
		pods, own, others := c.parts()
		for _, one := range []chain{pods, own, others} {
			if one.kind != noChain {
				all = append(all, one)
			}
		}
	}
	return all
}

// protocolNumber returns the number of a protocol (IANA).
func protocolNumber(name string) byte {
	switch name {
	case protocolUDP:
		return 17
	case protocolSCTP:
		return 132
	}
	return 6
}

// key returns an address, its protocol and its port as the key of a set. Each part fills whole registers of four bytes.
func key(at address) []byte { return append(at.Addr().AsSlice(), portKey(at)...) }

// portKey returns the protocol and the port of an address as the key of a set for node ports.
func portKey(at address) []byte {
	b := []byte{protocolNumber(at.protocol), 0, 0, 0}
	b = binary.BigEndian.AppendUint16(b, at.Port())
	return append(b, 0, 0)
}

// endKey returns the key in setEnds of the endpoint with an index. Random numbers of the kernel, such as the index, are
// in the byte order of the machine.
func endKey(at address, index int) string {
	return string(binary.NativeEndian.AppendUint32(key(at), uint32(index))) //nolint:gosec // endpoints are fewer
}

// endData returns the address and the port of an endpoint as data of a map.
func endData(end netip.AddrPort) string {
	b := binary.BigEndian.AppendUint16(end.Addr().AsSlice(), end.Port())
	return string(append(b, 0, 0))
}

// elements returns the elements that make the kernel follow rule r for packets to a.
func (a address) elements(r rule) (all []element) {
	v6, node := a.Addr().Is6(), a.isNodePort()
	dispatch := func(ofAddress, ofPort setKind, e element) {
		e.set, e.key = ofAddress, string(key(a))
		if node {
			e.set, e.key = ofPort, string(portKey(a))
		}
		all = append(all, e)
	}
	switch r.kind {
	case toRelay:
		dispatch(setServices, setRelayPorts, element{val: string(binary.BigEndian.AppendUint16(nil, r.port))})
	case toReject:
		dispatch(setNone, setNonePorts, element{to: chain{kind: chainReject, v6: v6}})
	case toDrop:
		dispatch(setNone, setNonePorts, element{to: chain{kind: chainDrop, v6: v6}})
	case toEnds:
		dispatch(setFront, setPorts, element{to: pick(v6, node, false, len(r.ends), r.sticky, r.masquerade)})
		all = a.ends(all, r)
	case toSplit:
		c := chain{kind: chainSplit, v6: v6, node: node, sticky: r.sticky, masquerade: r.masquerade, m: len(r.local)}
		switch r.inside {
		case toEnds:
			c.n = len(r.ends)
		case toRelay:
			c.port = r.port
		}
		dispatch(setFront, setPorts, element{to: c})
		all = a.ends(all, r)
	case isClusterIP:
		all = append(all, element{set: setIPs, key: string(a.Addr().AsSlice())})
	case isOwn:
		all = append(all, element{set: setHairpin, key: string(a.Addr().AsSlice()) + string(a.Addr().AsSlice())})
	case isPods:
		all = append(all, element{set: setPods, key: string(a.Addr().AsSlice())})
		if end := addressAfter(netip.PrefixFrom(a.Addr(), int(a.Port()))); end.IsValid() {
			all = append(all, element{set: setPods, key: string(end.AsSlice()), end: true})
		}
	}
	return all
}

// ends appends the elements for the endpoints of rule r.
func (a address) ends(all []element, r rule) []element {
	for first, list := range map[int][]netip.AddrPort{0: r.ends, firstLocal: r.local} {
		set := setLive
		if first == firstLocal {
			set = setLiveLocal
		}
		live := make(map[netip.AddrPort]struct{})
		for i, end := range list {
			all = append(all, element{set: setEnds, key: endKey(a, first+i), val: endData(end)})
			if _, double := live[end]; r.sticky > 0 && !double {
				live[end] = struct{}{}
				all = append(all, element{set: set, key: string(key(a)) + endData(end)})
			}
		}
	}
	return all
}

// addressAfter returns the first address after a network. The address is not valid if the network ends with the last
// address of its family.
func addressAfter(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for i := range b {
		if host := 8*(i+1) - p.Bits(); host >= 8 {
			b[i] = 0xff
		} else if host > 0 {
			b[i] |= 1<<host - 1
		}
	}
	last, _ := netip.AddrFromSlice(b)
	return last.Next()
}

// steps are the changes of elements that replace some rules by others. The kernel applies them in this order, so that
// no packet meets a chain whose endpoints are missing.
type steps struct {
	early  []change // adds and replaces endpoints
	atOnce []change // changes what leads to chains; all changes of one address are in one transaction
	late   []change // removes endpoints
}

// change replaces the element gone by add. Without gone, it only adds an element; without add, it only removes one.
type change struct {
	at        address
	gone, add *element
}

// stepsOf returns the steps from before to after.
func stepsOf(before, after rules) (s steps) {
	each := make(map[address]struct{}, len(before)+len(after))
	for at := range before {
		each[at] = struct{}{}
	}
	for at := range after {
		each[at] = struct{}{}
	}
	for at := range each {
		s.add(at, elementsOf(at, before), elementsOf(at, after))
	}
	return s
}

func elementsOf(at address, in rules) []element {
	r, ok := in[at]
	if !ok {
		return nil
	}
	return at.elements(r)
}

// elementKey identifies an element among those of all sets.
type elementKey struct {
	set setKind
	key string
	end bool
}

func (s *steps) add(at address, before, after []element) {
	had := make(map[elementKey]*element, len(before))
	for i := range before {
		e := &before[i]
		had[elementKey{e.set, e.key, e.end}] = e
	}
	for i := range after {
		e := &after[i]
		k := elementKey{e.set, e.key, e.end}
		old := had[k]
		delete(had, k)
		switch {
		case old != nil && *old == *e:
		case e.isDispatch():
			s.atOnce = append(s.atOnce, change{at, old, e})
		default:
			s.early = append(s.early, change{at, old, e})
		}
	}
	for i := range before { // in order
		e := &before[i]
		if _, gone := had[elementKey{e.set, e.key, e.end}]; !gone {
			continue
		}
		if e.isDispatch() {
			s.atOnce = append(s.atOnce, change{at, e, nil})
		} else {
			s.late = append(s.late, change{at, e, nil})
		}
	}
}
