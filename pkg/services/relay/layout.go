package relay

import (
	"encoding/binary"
	"fmt"
	"net/netip"
)

// How rules are laid out in the kernel's table. No chain is for one Service or one endpoint: each rule is a few
// elements of sets that all Services share, and a chain is for a number of endpoints. So a change is a few elements,
// and the way of a packet does not depend on how many Services there are.

// setKind is what a set is for. Each family has one set of a kind.
type setKind uint8

const (
	setServices   setKind = iota // address . protocol . port → port of the relay
	setRelayPorts                // protocol . node port → port of the relay
	setFront                     // address . protocol . port → chain
	setPorts                     // protocol . node port → chain
	setEnds                      // address . protocol . port . index → address . port of an endpoint
	setLive                      // address . protocol . port . address . port of an endpoint: a caller may keep it
	setLiveLocal                 // the same, of callers that get rule.local
	setAffine                    // caller . address . protocol . port → address . port of its endpoint, for a time
	setNone                      // address . protocol . port → chain that refuses
	setNonePorts                 // protocol . node port → chain that refuses
	setIPs                       // ClusterIPs
	setHairpin                   // address . address of endpoints on this node
	setPods                      // networks of the node's pods
	setKinds                     // how many there are
)

// String returns what the name of the set of IPv4 begins with, without the family.
func (k setKind) String() string {
	return [setKinds]string{"services", "relayports", "front", "ports", "ends", "live", "livelocal", "affine", "none",
		"noneports", "ips", "hairpin", "pods"}[k]
}

// element is one element of a set.
type element struct {
	set setKind
	key string // as the kernel has it
	val string // of a map of data, as the kernel has it
	to  chain  // of a map of verdicts
	end bool   // the key is the first one after an interval
}

// isDispatch reports whether the element leads to a chain or refuses. Others are endpoints: they must be there while a
// chain that may choose them can be reached.
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
	chainPick             // translates to one of n endpoints at random
	chainAffine           // the same, but a caller keeps its endpoint
	chainSplit            // one chain for callers on this node, another one for others
	chainRelay            // translates to the relay
	chainReject           // refuses
	chainDrop             // drops
)

// chain is a chain that elements lead to. Equal chains are one.
type chain struct {
	kind       chainKind
	v6         bool
	n          int    // of chainPick and chainAffine, and of chainSplit for callers on this node; 0: none
	local      bool   // the endpoints are those of this node, see firstLocal
	node       bool   // the address is a node port: its elements have the address 0
	sticky     uint32 // of chainAffine and chainSplit, seconds
	masquerade bool
	m          int    // of chainSplit: endpoints for other callers
	port       uint16 // of chainRelay, and of chainSplit if callers on this node get the relay; 0: they do not
}

// firstLocal is the index of the first endpoint of rule.local. Those of rule.ends begin at 0.
const firstLocal = 1 << 20

// name returns the name of a chain, without the id of the process.
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

// random returns the chain that a chain falls back to which keeps the endpoints of callers.
func (c chain) random() chain {
	c.kind, c.sticky = chainPick, 0
	return c
}

// parts returns the chains of a split: for pods of this node, for its own processes, and for other callers. Their kind
// may be noChain.
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

// needs returns the chains that a chain leads to.
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

// key is an address of a map: each part fills whole registers of four bytes.
func key(at address) []byte { return append(at.Addr().AsSlice(), portKey(at)...) }

// portKey is the key without the address.
func portKey(at address) []byte {
	b := []byte{protocolNumber(at.protocol), 0, 0, 0}
	b = binary.BigEndian.AppendUint16(b, at.Port())
	return append(b, 0, 0)
}

// endKey is the key of the endpoint of an address with an index. The kernel has numbers in its own byte order.
func endKey(at address, index int) string {
	return string(binary.NativeEndian.AppendUint32(key(at), uint32(index))) //nolint:gosec // endpoints are fewer
}

// endData is an endpoint as data of a map.
func endData(end netip.AddrPort) string {
	b := binary.BigEndian.AppendUint16(end.Addr().AsSlice(), end.Port())
	return string(append(b, 0, 0))
}

// elements returns the elements of a rule.
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

// ends appends the elements of the endpoints of a rule.
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

// addressAfter returns the address after the last one of a network. It is not valid if there is none.
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

// steps are the changes that make the elements of some rules those of others. The kernel does them in this order: no
// packet may meet a chain whose endpoints are missing.
type steps struct {
	early  []change // of endpoints that are added or replaced
	atOnce []change // of what leads to chains. Those of one address are one transaction.
	late   []change // of endpoints that go
}

// change replaces one element; either may be missing.
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

// elementKey tells the elements of all sets apart.
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
