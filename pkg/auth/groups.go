package auth

import "net/netip"

// Group returns the source to which an address belongs when strangers are counted. A source is
// an IPv4 address, in either of its two forms, or an IPv6 /64, the usual network of one machine.
// All addresses that are not IP addresses belong to one group, the zero prefix.
func Group(a netip.Addr) netip.Prefix {
	a = a.Unmap()
	bits := a.BitLen()
	if a.Is6() {
		bits = 64
	}
	p, err := a.Prefix(bits)
	if err != nil {
		return netip.Prefix{}
	}
	return p
}

// Single returns the prefix of one address alone, for callers that share a network, such as the pods of a node.
func Single(a netip.Addr) netip.Prefix {
	a = a.Unmap().WithZone("")
	return netip.PrefixFrom(a, a.BitLen())
}
