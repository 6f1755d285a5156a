package services

import (
	"net/netip"
	"slices"
)

// Homes finds the Node of an address: the Node that has the address in its networks of pods, or as an InternalIP. It is
// not safe for concurrent use.
type Homes struct {
	of      map[string][]netip.Prefix // the networks and addresses of each Node
	at      map[netip.Prefix][]string // the Nodes that have a network or an address; mostly one
	lengths map[length]int            // how many networks of each length there are
}

// length is the length of a network's prefix.
type length struct {
	v6   bool
	bits int
}

// NewHomes returns a Homes without Nodes.
func NewHomes() *Homes {
	return &Homes{
		of: make(map[string][]netip.Prefix), at: make(map[netip.Prefix][]string), lengths: make(map[length]int),
	}
}

// Set adds or changes a Node. nil removes the Node.
func (h *Homes) Set(node string, n *Node) {
	for _, p := range h.of[node] {
		if h.lengths[lengthOf(p)]--; h.lengths[lengthOf(p)] == 0 {
			delete(h.lengths, lengthOf(p))
		}
		if h.at[p] = slices.DeleteFunc(h.at[p], func(name string) bool { return name == node }); len(h.at[p]) == 0 {
			delete(h.at, p)
		}
	}
	delete(h.of, node)
	var all []netip.Prefix
	for _, text := range n.GetPodCidrs() {
		if p, err := netip.ParsePrefix(text); err == nil {
			all = append(all, p.Masked())
		}
	}
	for _, text := range n.GetInternalIps() {
		if addr, err := netip.ParseAddr(text); err == nil {
			all = append(all, netip.PrefixFrom(addr.Unmap(), addr.Unmap().BitLen()))
		}
	}
	for _, p := range all {
		h.lengths[lengthOf(p)]++
		h.at[p] = append(h.at[p], node)
	}
	if len(all) > 0 {
		h.of[node] = all
	}
}

func lengthOf(p netip.Prefix) length { return length{p.Addr().Is6(), p.Bits()} }

// Of returns the name of the Node that an endpoint is on. An endpoint need not have that name, for example if a user has
// written its EndpointSlice. Then Of looks for the Node that has the endpoint's address. It returns "" if there is none,
// or if several Nodes have it, as nodes of different sites may.
func (h *Homes) Of(e *Endpoint) string {
	if e.GetNode() != "" {
		return e.GetNode()
	}
	addr, err := netip.ParseAddr(e.GetAddress())
	if err != nil {
		return ""
	}
	addr = addr.Unmap()
	home := ""
	for of := range h.lengths {
		p, err := addr.Prefix(of.bits)
		if of.v6 != addr.Is6() || err != nil {
			continue
		}
		for _, node := range h.at[p] {
			if home != "" && home != node {
				return ""
			}
			home = node
		}
	}
	return home
}
