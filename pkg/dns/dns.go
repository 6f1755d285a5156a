// Package dns makes a node's name lead to the tunnel.
//
// What is true, which replica holds which node ([Truth]), and who may appear at all
// ([Names]) is told in two ways:
//
//	                    ┌─▶ Responder   answers DNS itself, at once, on every replica
//	Truth, Names ───────┤
//	                    └─▶ Writer      keeps the lines of a ConfigMap that CoreDNS mounts; one replica at a time
//	                                      └─▶ kubelet, CoreDNS … ─▶ HostsFile   says what CoreDNS really sees, and how late
//
// A ConfigMap takes a minute to reach a mounted volume, the responder none; they say
// the same. Every replica serves every node, so an answer that is out of date costs a
// hop and breaks nothing.
//
// [Hosts] is the file that the Writer keeps. It is text in, text out: nothing in there
// that it did not write is ever changed.
//
// The package decides nothing about who may join: a name gets here with a session
// whose node was proven. It speaks to Kubernetes through pkg/kube alone, and needs
// none for the Responder.
package dns

import (
	"maps"
	"net/netip"
	"slices"

	"tunnel/pkg/tunnel"
)

// Truth says where each node is held. Its methods are for any goroutine and answer at
// once.
type Truth interface {
	// Lookup returns the addresses of the replica that holds n; none when nobody does.
	Lookup(n tunnel.NodeName) []netip.Addr
	// Records returns every node that is held, sorted by name. The caller may keep it,
	// and changes nothing in it.
	Records() []Record
	// Hears reports whether Records covers the replica at that address. Of a replica
	// that is not heard, nobody knows what it holds.
	Hears(replica netip.Addr) bool
	// Changed returns a channel that is closed at the next change. To miss nothing, ask
	// for it before asking for anything else.
	Changed() <-chan struct{}
}

// Record says which addresses lead to a node.
type Record struct {
	Node  tunnel.NodeName
	Addrs []netip.Addr // of the replica that holds it, as usable returns them
}

// Names says which names may appear: those of the Nodes that Kubernetes knows. Without
// Kubernetes there is no Names, and every connected node may.
type Names interface {
	// May reports whether n may appear. known is false until Kubernetes has said which
	// may; then nothing is told to anybody rather than something untrue.
	May(n tunnel.NodeName) (may, known bool)
	// Changed is as Truth has it.
	Changed() <-chan struct{}
}

// Local is the truth of a replica that is alone: it holds what is connected to it.
type Local struct {
	Nodes interface {
		tunnel.Nodes
		Changed() <-chan struct{}
	}
	Addrs []netip.Addr // by which clients reach this replica
}

var _ Truth = Local{}

// Lookup implements Truth.
func (l Local) Lookup(n tunnel.NodeName) []netip.Addr {
	if !l.Nodes.Holds(n) {
		return nil
	}
	return l.Addrs
}

// Records implements Truth.
func (l Local) Records() []Record {
	names := l.Nodes.Connected()
	all := make([]Record, len(names))
	for i, n := range names {
		all[i] = Record{n, l.Addrs}
	}
	return all
}

// Hears implements Truth.
func (l Local) Hears(replica netip.Addr) bool {
	return slices.Contains(l.Addrs, replica)
}

// Changed implements Truth.
func (l Local) Changed() <-chan struct{} { return l.Nodes.Changed() }

// Merged is the truth of several replicas, which tell each other what they hold.
type Merged struct {
	Replicas interface {
		// Addrs returns the addresses of the replica that holds a node.
		Addrs(n tunnel.NodeName) []netip.Addr
		// All returns the same for every node that is held anywhere.
		All() map[tunnel.NodeName][]netip.Addr
		Hears(replica netip.Addr) bool
		Changed() <-chan struct{}
	}
}

var _ Truth = Merged{}

// Lookup implements Truth.
func (m Merged) Lookup(n tunnel.NodeName) []netip.Addr { return usable(m.Replicas.Addrs(n)) }

// Records implements Truth.
func (m Merged) Records() []Record {
	all := m.Replicas.All()
	records := make([]Record, 0, len(all))
	for _, n := range slices.Sorted(maps.Keys(all)) {
		records = append(records, Record{n, usable(all[n])})
	}
	return records
}

// Hears implements Truth.
func (m Merged) Hears(replica netip.Addr) bool { return m.Replicas.Hears(replica) }

// Changed implements Truth.
func (m Merged) Changed() <-chan struct{} { return m.Replicas.Changed() }

// usable returns what names may lead to, of the addresses that another replica has told of
// itself: one of each family, IPv4 first, and none with a zone, which can hold anything,
// a line break too.
func usable(told []netip.Addr) []netip.Addr {
	var addrs []netip.Addr
	for _, a := range told {
		a = a.Unmap()
		another := func(b netip.Addr) bool { return b.Is4() == a.Is4() }
		if a.IsValid() && a.Zone() == "" && !slices.ContainsFunc(addrs, another) {
			addrs = append(addrs, a)
		}
	}
	slices.SortFunc(addrs, netip.Addr.Compare)
	return addrs
}
