package egress

import (
	"net/netip"
	"slices"
	"strings"

	"tunnel.example/tunnel/pkg/konnectivity"
	"tunnel.example/tunnel/pkg/tunnel"
)

// table answers which nodes reach an address. It never changes after newTable.
type table struct {
	hosts    map[string][]tunnel.NodeName // by canonical name or address
	networks map[netip.Prefix][]tunnel.NodeName
	lengths  [2][]int                     // prefix lengths in networks, longest first: IPv4, IPv6
	refused  map[string][]tunnel.NodeName // by canonical name; see konnectivity.Identifiers
	defaults []tunnel.NodeName            // nodes that declare a default route
}

func newTable(all map[tunnel.NodeName]konnectivity.Identifiers) *table {
	t := &table{
		hosts:    make(map[string][]tunnel.NodeName),
		networks: make(map[netip.Prefix][]tunnel.NodeName),
		refused:  make(map[string][]tunnel.NodeName),
	}
	for node, id := range all {
		for _, h := range id.Hosts {
			addOwner(t.hosts, canonical(h), node)
		}
		for _, n := range id.Networks {
			addOwner(t.networks, n, node)
			if l := &t.lengths[family(n.Addr())]; !slices.Contains(*l, n.Bits()) {
				*l = append(*l, n.Bits())
			}
		}
		for _, h := range id.Refused {
			addOwner(t.refused, canonical(h), node)
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

// addOwner adds node to the owners of k. newTable adds all keys of one node before the keys of the next node. So if
// node is an owner of k already, it is the last owner.
func addOwner[K comparable](owners map[K][]tunnel.NodeName, k K, node tunnel.NodeName) {
	if all := owners[k]; len(all) == 0 || all[len(all)-1] != node {
		owners[k] = append(all, node)
	}
}

// family returns the index of an address family in table.lengths.
func family(a netip.Addr) int {
	if a.Is4() {
		return 0
	}
	return 1
}

// host returns the nodes with a name or an address of their own.
func (t *table) host(host string) []tunnel.NodeName { return t.hosts[canonical(host)] }

// canonical returns a name or an address in the spelling that is its key in table.hosts.
func canonical(host string) string {
	if a, ok := address(host); ok {
		return a.String()
	}
	return strings.ToLower(strings.TrimSuffix(host, "."))
}

// address returns host as an address. It drops an IPv6 zone, which has no meaning on another machine.
func address(host string) (netip.Addr, bool) {
	a, err := netip.ParseAddr(strings.TrimSuffix(host, "."))
	return a.WithZone("").Unmap(), err == nil
}

// allNetworks returns the nodes with any network that contains the address.
func (t *table) allNetworks(host string) (all []tunnel.NodeName) {
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

// narrowestNetwork returns the nodes with the narrowest network that contains the address.
func (t *table) narrowestNetwork(host string) []tunnel.NodeName {
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
