package auth

import "net/netip"

// Group returns what counts as one source when strangers are counted: an IPv4
// address, in either of its forms, or an IPv6 /64, which is what one machine gets.
// Everything that is not an IP address is one group.
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
