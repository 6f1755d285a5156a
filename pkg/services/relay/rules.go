package relay

import (
	"iter"
	"maps"
	"net/netip"
	"slices"
)

// kind says what the kernel does with packets to an address, or what else the rule of that address is about.
type kind uint8

const (
	// toRelay: packets go to the relay.
	toRelay kind = iota
	// toEnds: packets go to one of the endpoints in rule.ends.
	toEnds
	// toSplit: packets of this node and of its pods are treated as rule.inside says. Other packets go to one of the
	// endpoints in rule.local; if there is none, the kernel drops them.
	toSplit
	// toReject: the kernel answers that nobody listens.
	toReject
	// toDrop: the kernel drops the packets.
	toDrop

	// The following kinds are for rules about an address alone, and not about a port of a Service. The address then has
	// one of the protocols aboutClusterIP, aboutOwn and aboutPods.

	// isClusterIP: the address is a ClusterIP. The kernel refuses packets to ports that no Service has.
	isClusterIP
	// isOwn: the address is that of an endpoint on this node. If the endpoint calls itself by a Service, the kernel
	// masquerades the connection. Otherwise the pod would answer itself directly, and the kernel could not translate the
	// answer.
	isOwn
	// isPods: the address is that of a network of this node's pods, and the port is the length of the network's prefix.
	isPods
)

// These texts stand in place of a protocol for the kinds isClusterIP, isOwn and isPods.
const (
	aboutClusterIP = "a ClusterIP"
	aboutOwn       = "an endpoint of this node"
	aboutPods      = "pods of this node"
)

// isPort reports whether an address is a port of a Service.
func (a address) isPort() bool {
	return a.protocol != aboutClusterIP && a.protocol != aboutOwn && a.protocol != aboutPods
}

// isNodePort reports whether an address is a node port: a port of a Service at all addresses of the node.
func (a address) isNodePort() bool { return a.isPort() && a.Addr().IsUnspecified() }

// rule says what the kernel has to do with packets to an address. It never changes.
type rule struct {
	kind       kind
	port       uint16           // of the relay, for packets that go to the relay and with relayServes
	ends       []netip.AddrPort // the endpoints that packets may go to, sorted
	inside     kind             // only with toSplit, what happens to packets of this node: toEnds, toRelay or toReject
	local      []netip.AddrPort // only with toSplit: the endpoints for callers outside of this node, sorted
	sticky     uint32           // how long a caller keeps its endpoint, in seconds; 0: each connection may get another one
	masquerade bool             // the kernel masquerades: callers are outside, and answers must pass this node

	// The following is only for UDP in place of kube-proxy. It is about flows that began under an earlier rule: like
	// kube-proxy, the edge lets a flow end with its endpoint, and not when other endpoints get the new flows.

	serving     []netip.AddrPort // endpoints that serve, and are neither in ends nor in local, sorted
	relayServes bool             // the relay leads flows to endpoints that serve
}

func (r rule) equal(other rule) bool {
	return r.kind == other.kind && r.port == other.port && r.inside == other.inside && r.sticky == other.sticky &&
		r.masquerade == other.masquerade && slices.Equal(r.ends, other.ends) && slices.Equal(r.local, other.local) &&
		r.relayServes == other.relayServes && slices.Equal(r.serving, other.serving)
}

// relayed reports whether the rule sends packets to the relay.
func (r rule) relayed() bool { return r.kind == toRelay || r.kind == toSplit && r.inside == toRelay }

// flowsRelayed reports whether the relay may have flows for the address of the rule: the rule sends new flows there, or
// flows that began under an earlier rule may stay.
func (r rule) flowsRelayed() bool { return r.relayed() || r.relayServes }

// permits reports whether the kernel may send flows for the address of the rule to an endpoint: new flows, or flows
// that began under an earlier rule.
func (r rule) permits(end netip.AddrPort) bool {
	in := func(sorted []netip.AddrPort) bool {
		_, found := slices.BinarySearchFunc(sorted, end, netip.AddrPort.Compare)
		return found
	}
	return in(r.ends) || in(r.local) || in(r.serving)
}

// leads reports whether the rule sends flows to the address to: to an endpoint, or to the relay at its address own.
func (r rule) leads(to netip.AddrPort, own netip.Addr) bool {
	return r.flowsRelayed() && to == netip.AddrPortFrom(own, r.port) || r.permits(to)
}

// rules are the rules that the kernel should have, by the address whose packets each rule is for.
type rules map[address]rule

// sorted returns the addresses in order.
func (r rules) sorted() []address { return slices.SortedFunc(maps.Keys(r), address.compare) }

// parts yields all rules, at most n at once.
func (r rules) parts(n int) iter.Seq[rules] {
	return func(yield func(rules) bool) {
		some := make(rules, min(n, len(r)))
		for at, one := range r {
			if some[at] = one; len(some) < n {
				continue
			}
			if !yield(some) {
				return
			}
			clear(some)
		}
		if len(some) > 0 {
			yield(some)
		}
	}
}

// toRelay returns, for each address that may have flows to the relay, a rule that leads only there.
func (r rules) toRelay() rules {
	some := make(rules)
	for at, one := range r {
		if at.isPort() && one.flowsRelayed() {
			some[at] = rule{kind: toRelay, port: one.port}
		}
	}
	return some
}

// mayStay reports whether all flows that began under rule r may continue under the rule after, which replaces r.
func (r rule) mayStay(after rule) bool {
	ends := slices.Concat(r.ends, r.local, r.serving)
	gone := func(end netip.AddrPort) bool { return !after.permits(end) }
	return len(ends)+int(r.port) > 0 && !slices.ContainsFunc(ends, gone) &&
		(!r.flowsRelayed() || after.flowsRelayed() && after.port == r.port)
}

// outdates compares the rules before a change with the rules after it. It returns the rules of addresses that may have
// flows to where their new rule would not send them.
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

// difference returns the rules that must go and the rules that must come to turn r into want. A rule that changes is in
// both.
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
