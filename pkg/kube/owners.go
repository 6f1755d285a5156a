package kube

import (
	"net/netip"
	"slices"
)

// podOwners finds the Node in whose networks of pods an address is. An EndpointSlice that a user has written need not
// say on which node its endpoints are.
//
// A kubelet may set spec.podCIDRs of its own Node once. So a network must not be wider than one Node can need, it must
// hold no address of the control plane, and an address that several Nodes claim belongs to none. InternalIPs do not
// count: a kubelet writes them at any time, and machines of different sites have the same ones. See also claims.go.
type podOwners struct {
	of      map[string][]netip.Prefix // the networks of each Node
	at      map[netip.Prefix][]string // the Nodes that have a network; mostly one
	lengths map[podLength]int         // how many networks of each length there are
	control map[string][]netip.Addr   // the addresses of each Node of the control plane
}

// podLength is the length of a network's prefix.
type podLength struct {
	v6   bool
	bits int
}

func newPodOwners() *podOwners {
	return &podOwners{
		of: make(map[string][]netip.Prefix), at: make(map[netip.Prefix][]string), lengths: make(map[podLength]int),
		control: make(map[string][]netip.Addr),
	}
}

// setControl replaces the addresses of a Node of the control plane; nil: it is none. It reports whether they have
// changed.
func (o *podOwners) setControl(node string, addrs []netip.Addr) bool {
	if slices.Equal(o.control[node], addrs) {
		return false
	}
	if o.control[node] = addrs; len(addrs) == 0 {
		delete(o.control, node)
	}
	return true
}

// holdsControl reports whether a network holds an address of the control plane.
func (o *podOwners) holdsControl(p netip.Prefix) bool {
	for _, addrs := range o.control {
		if slices.ContainsFunc(addrs, p.Contains) {
			return true
		}
	}
	return false
}

// set replaces the networks of a Node. It reports whether they have changed.
func (o *podOwners) set(node string, networks []netip.Prefix) bool {
	networks = slices.DeleteFunc(slices.Clone(networks), func(p netip.Prefix) bool {
		return p.Addr().Is4() && p.Bits() < minPodBits4 || p.Addr().Is6() && p.Bits() < minPodBits6
	})
	if slices.Equal(o.of[node], networks) {
		return false
	}
	for _, p := range o.of[node] {
		length := podLength{p.Addr().Is6(), p.Bits()}
		if o.lengths[length]--; o.lengths[length] == 0 {
			delete(o.lengths, length)
		}
		if o.at[p] = slices.DeleteFunc(o.at[p], func(name string) bool { return name == node }); len(o.at[p]) == 0 {
			delete(o.at, p)
		}
	}
	delete(o.of, node)
	for _, p := range networks {
		o.lengths[podLength{p.Addr().Is6(), p.Bits()}]++
		o.at[p] = append(o.at[p], node)
	}
	if len(networks) > 0 {
		o.of[node] = networks
	}
	return true
}

// owner returns the name of the only Node that has an address in its networks of pods, or "".
func (o *podOwners) owner(address string) (only string) {
	addr, err := netip.ParseAddr(address)
	if err != nil {
		return ""
	}
	addr = addr.Unmap()
	for length := range o.lengths {
		p, err := addr.Prefix(length.bits)
		if length.v6 != addr.Is6() || err != nil {
			continue
		}
		nodes := o.at[p]
		if len(nodes) > 0 && o.holdsControl(p) {
			continue
		}
		for _, node := range nodes {
			if only != "" && only != node {
				return ""
			}
			only = node
		}
	}
	return only
}
