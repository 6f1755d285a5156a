package relay

import (
	"maps"
	"net/netip"
	"slices"
)

// kind is what the kernel does with packets to an address.
type kind uint8

const (
	// toRelay: they go to the relay.
	toRelay kind = iota
	// toEnds: they go to one of the rule's ends.
	toEnds
	// toSplit: packets of this node and of its pods are treated as the rule's inside says. Others go to one of the
	// rule's local ends; without any, the kernel drops them.
	toSplit
	// toReject: the kernel answers that nobody listens.
	toReject
	// toDrop: the kernel drops them.
	toDrop

	// The following kinds are of addresses that are no port of a Service. Their protocol says so.

	// isClusterIP: the address is a ClusterIP. The kernel refuses packets to ports that no Service has.
	isClusterIP
	// isOwn: the address is that of an endpoint on this node. If it calls itself by a Service, the kernel masquerades it:
	// no answer would come by the kernel otherwise.
	isOwn
	// isPods: the address is that of a network of pods of this node, and the port is the length of its prefix.
	isPods
)

// The protocols of addresses that are no port of a Service.
const (
	aboutClusterIP = "a ClusterIP"
	aboutOwn       = "an endpoint of this node"
	aboutPods      = "pods of this node"
)

// isPort reports whether an address is a port of a Service.
func (a address) isPort() bool {
	return a.protocol != aboutClusterIP && a.protocol != aboutOwn && a.protocol != aboutPods
}

// isNodePort reports whether an address is a port of all addresses of the node.
func (a address) isNodePort() bool { return a.isPort() && a.Addr().IsUnspecified() }

// rule is what the kernel has to do with packets to an address. It never changes.
type rule struct {
	kind       kind
	port       uint16           // of the relay's own address, if some packets go there
	ends       []netip.AddrPort // in order
	inside     kind             // of toSplit: toEnds, toRelay or toReject
	local      []netip.AddrPort // of toSplit, in order
	sticky     uint32           // how long a caller keeps its end, in seconds; 0: each connection gets any
	masquerade bool             // answers come by this node, since callers are elsewhere
}

func (r rule) equal(other rule) bool {
	return r.kind == other.kind && r.port == other.port && r.inside == other.inside && r.sticky == other.sticky &&
		r.masquerade == other.masquerade && slices.Equal(r.ends, other.ends) && slices.Equal(r.local, other.local)
}

// relayed reports whether the rule sends packets to the relay.
func (r rule) relayed() bool { return r.kind == toRelay || r.kind == toSplit && r.inside == toRelay }

// leads reports whether a flow that the rule has let pass may lead to an address. own is the relay's own address.
func (r rule) leads(to netip.AddrPort, own netip.Addr) bool {
	return r.relayed() && to == netip.AddrPortFrom(own, r.port) ||
		slices.Contains(r.ends, to) || slices.Contains(r.local, to)
}

// rules are what the kernel has to do.
type rules map[address]rule

// sorted returns the addresses in order.
func (r rules) sorted() []address { return slices.SortedFunc(maps.Keys(r), address.compare) }

// ports returns how many ports of Services the rules are for.
func (r rules) ports() (n int) {
	for at := range r {
		if at.isPort() {
			n++
		}
	}
	return n
}

// toRelay returns the rules that send packets to the relay.
func (r rules) toRelay() rules {
	some := make(rules)
	for at, one := range r {
		if at.isPort() && one.relayed() {
			some[at] = one
		}
	}
	return some
}

// mayStay reports whether all flows that r has let pass may go on by the rule after it.
func (r rule) mayStay(after rule) bool {
	stays := func(end netip.AddrPort) bool {
		return slices.Contains(after.ends, end) || slices.Contains(after.local, end)
	}
	gone := func(end netip.AddrPort) bool { return !stays(end) }
	return len(r.ends)+len(r.local) > 0 && !r.relayed() &&
		!slices.ContainsFunc(r.ends, gone) && !slices.ContainsFunc(r.local, gone)
}

// outdates returns the rules of before and after that may have flows which lead elsewhere than after says.
func outdates(before, after rules) (was, now rules) {
	was, now = make(rules), make(rules)
	for at, one := range after {
		if had, ok := before[at]; at.isPort() && (!ok || !had.mayStay(one)) {
			now[at] = one
		}
	}
	for at, had := range before {
		if next, ok := after[at]; at.isPort() && (!ok || !had.mayStay(next)) {
			was[at] = had
		}
	}
	return was, now
}

// difference returns what differs between r and want: the rules of r that want does not have, or has changed, and
// those of want that r does not have as they are.
func (r rules) difference(want rules) (before, after rules) {
	before, after = make(rules), make(rules)
	for at, one := range want {
		had, ok := r[at]
		if ok && had.equal(one) {
			continue
		}
		after[at] = one
		if ok {
			before[at] = had
		}
	}
	for at, had := range r {
		if _, stays := want[at]; !stays {
			before[at] = had
		}
	}
	return before, after
}
