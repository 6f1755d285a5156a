// Package dns makes the names of nodes resolve to addresses of the tunnel.
//
// [Truth] says which replica holds which node, and [Names] which names may be published.
// The package publishes the result in two ways:
//
//	                    ┌─▶ Responder   answers DNS itself, at once, on every replica
//	Truth, Names ───────┤
//	                    └─▶ Writer      keeps the lines of a ConfigMap that CoreDNS mounts; one replica at a time
//	                                  └─▶ kubelet, CoreDNS … ─▶ HostsFile   reports what CoreDNS sees, and its lag
//
// Both publish the same names. A change of the ConfigMap takes about a minute to reach a
// mounted volume; the Responder answers with the change at once. Every replica serves every
// node, so an outdated answer costs one more hop and breaks nothing.
//
// [Hosts] parses and prints the file that the Writer keeps. It never changes lines that
// the Writer did not write.
//
// The package does not decide which nodes may join: it gets a name only from a session whose
// edge has proven which node it is. It uses Kubernetes only through pkg/kube. The Responder
// needs no Kubernetes.
package dns

import (
	"maps"
	"net/netip"
	"slices"

	"tunnel.example/tunnel/pkg/tunnel"
)

// Truth says which replica holds each node, that is, has its session. Any goroutine may call
// its methods. They return at once.
type Truth interface {
	// Lookup returns the addresses of the replica that holds n; none if no replica does.
	Lookup(n tunnel.NodeName) []netip.Addr
	// Records returns every node that a replica holds, sorted by name. The caller may keep
	// the slice but must not change it.
	Records() []Record
	// Hears reports whether Records includes the nodes of the replica at that address. If not,
	// this replica does not know which nodes that replica holds.
	Hears(replica netip.Addr) bool
	// Changed returns a channel that is closed at the next change. To miss no change, call
	// Changed before any other method.
	Changed() <-chan struct{}
}

// Record says which addresses lead to a node.
type Record struct {
	Node  tunnel.NodeName
	Addrs []netip.Addr // addresses of the replica that holds the node; at most one per family, IPv4 first
}

// Names says which names may be published: those of the Nodes that Kubernetes knows. Without
// Kubernetes there is no Names, and the names of all connected nodes are published.
type Names interface {
	// May reports whether n may be published. known is false until the list of Nodes has been
	// read from Kubernetes. Until then nothing is published, since it could be wrong.
	May(n tunnel.NodeName) (may, known bool)
	// Changed is like Truth.Changed.
	Changed() <-chan struct{}
}

// Local is the Truth of a single replica: it holds the nodes that are connected to it.
type Local struct {
	Nodes interface {
		tunnel.Nodes
		Changed() <-chan struct{}
	}
	Addrs []netip.Addr // addresses by which clients reach this replica
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

// Merged is the Truth of several replicas, which tell each other which nodes they hold.
type Merged struct {
	Replicas interface {
		// Addrs returns the addresses of the replica that holds a node.
		Addrs(n tunnel.NodeName) []netip.Addr
		// All returns, for every node that any replica holds, the addresses of that replica.
		All() map[tunnel.NodeName][]netip.Addr
		Hears(replica netip.Addr) bool // see Truth
		Changed() <-chan struct{}      // see Truth
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

// usable returns those of the reported addresses that may be published: one of each family, IPv4
// first. Another replica has reported them as its own. usable drops addresses with a zone, since a
// zone can be any text, even one with a line break.
func usable(reported []netip.Addr) []netip.Addr {
	var addrs []netip.Addr
	for _, a := range reported {
		a = a.Unmap()
		sameFamily := func(b netip.Addr) bool { return b.Is4() == a.Is4() }
		if a.IsValid() && a.Zone() == "" && !slices.ContainsFunc(addrs, sameFamily) {
			addrs = append(addrs, a)
		}
	}
	slices.SortFunc(addrs, netip.Addr.Compare)
	return addrs
}
