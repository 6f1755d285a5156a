package egress

import (
	"net/netip"
	"slices"
	"strings"

	"tunnel/pkg/konnectivity"
	"tunnel/pkg/tunnel"
)

// table answers which nodes reach an address. It never changes.
type table struct {
	hosts    map[string][]tunnel.NodeName
	networks map[netip.Prefix][]tunnel.NodeName
	lengths  [2][]int // that prefixes in networks have, longest first: of IPv4, of IPv6
	refused  map[string][]tunnel.NodeName
	defaults []tunnel.NodeName
}

func newTable(all map[tunnel.NodeName]konnectivity.Identifiers) *table {
	t := &table{hosts: make(map[string][]tunnel.NodeName), networks: make(map[netip.Prefix][]tunnel.NodeName), refused: make(map[string][]tunnel.NodeName)}
	for node, id := range all {
		for _, h := range id.Hosts {
			give(t.hosts, canonical(h), node)
		}
		for _, n := range id.Networks {
			give(t.networks, n, node)
			if l := &t.lengths[family(n.Addr())]; !slices.Contains(*l, n.Bits()) {
				*l = append(*l, n.Bits())
			}
		}
		for _, h := range id.Refused {
			give(t.refused, canonical(h), node)
		}
		if id.DefaultRoute {
			t.defaults = append(t.defaults, node)
		}
	}
	for _, l := range t.lengths {
		slices.SortFunc(l, func(a, b int) int { return b - a })
	}
	return t
}

// give makes node one of those that have k. Nodes come one after the other.
func give[K comparable](owners map[K][]tunnel.NodeName, k K, node tunnel.NodeName) {
	if all := owners[k]; len(all) == 0 || all[len(all)-1] != node {
		owners[k] = append(all, node)
	}
}

func family(a netip.Addr) int {
	if a.Is4() {
		return 0
	}
	return 1
}

// host returns the nodes that answer to a name or an address.
func (t *table) host(host string) []tunnel.NodeName { return t.hosts[canonical(host)] }

// canonical is a name or an address in the one way to write it.
func canonical(host string) string {
	if a, ok := address(host); ok {
		return a.String()
	}
	return strings.ToLower(strings.TrimSuffix(host, "."))
}

// address returns the address that host is. Another machine's zone says nothing.
func address(host string) (netip.Addr, bool) {
	a, err := netip.ParseAddr(strings.TrimSuffix(host, "."))
	return a.WithZone("").Unmap(), err == nil
}

// holders returns the nodes with any network that holds the address.
func (t *table) holders(host string) (all []tunnel.NodeName) {
	a, ok := address(host)
	if !ok {
		return nil
	}
	for _, bits := range t.lengths[family(a)] {
		if p, err := a.Prefix(bits); err == nil {
			all = append(all, t.networks[p]...)
		}
	}
	return all
}

// network returns the nodes with the narrowest network that holds the address.
func (t *table) network(host string) []tunnel.NodeName {
	a, ok := address(host)
	if !ok {
		return nil
	}
	for _, bits := range t.lengths[family(a)] {
		p, err := a.Prefix(bits)
		if err != nil {
			continue
		}
		if nodes := t.networks[p]; nodes != nil {
			return nodes
		}
	}
	return nil
}
