package auth

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
)

// Sources is a list of networks that may connect. The empty list permits nobody. A []netip.Prefix
// converts to it.
type Sources []netip.Prefix

// ParseSources parses addresses and CIDR networks, such as "10.0.0.0/8" and "::1".
func ParseSources(entries []string) (Sources, error) {
	s := make(Sources, 0, len(entries))
	for _, e := range entries {
		p, err := parsePrefix(e)
		if err != nil {
			return nil, fmt.Errorf("source %q: %w", e, err)
		}
		s = append(s, p)
	}
	return s, nil
}

// Permits reports whether a is in one of the networks. The IPv6 form of an IPv4 address
// (::ffff:10.0.0.1) counts as that address, and a zone does not matter.
func (s Sources) Permits(a netip.Addr) bool {
	for _, p := range s {
		if contains(p, a) {
			return true
		}
	}
	return false
}

// String returns the list for a log line.
func (s Sources) String() string {
	words := make([]string, len(s))
	for i, p := range s {
		words[i] = p.String()
	}
	return strings.Join(words, ",")
}

// contains reports whether p holds a, both in their IPv4 form if they have one.
func contains(p netip.Prefix, a netip.Addr) bool {
	return unmapPrefix(p).Contains(a.Unmap().WithZone(""))
}

// unmapPrefix returns the IPv4 network for ::ffff:a.b.c.d/n, and other prefixes unchanged.
func unmapPrefix(p netip.Prefix) netip.Prefix {
	if p.Addr().Is4In6() && p.Bits() >= 96 {
		return netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
	}
	return p
}

func errNotNetwork() error {
	return errors.New("not an IP address or a CIDR network such as 10.0.0.0/8")
}

// parsePrefix parses an address or a CIDR network. IPv4-mapped IPv6 forms become IPv4.
func parsePrefix(s string) (netip.Prefix, error) {
	if !strings.Contains(s, "/") {
		a, err := netip.ParseAddr(s)
		if err != nil {
			return netip.Prefix{}, errNotNetwork()
		}
		if a.Zone() != "" {
			return netip.Prefix{}, fmt.Errorf("an address with a zone cannot be listed; leave out %%%s", a.Zone())
		}
		a = a.Unmap()
		return netip.PrefixFrom(a, a.BitLen()), nil
	}
	p, err := netip.ParsePrefix(s)
	if err != nil {
		return netip.Prefix{}, errNotNetwork()
	}
	p = unmapPrefix(p)
	if p != p.Masked() {
		// Either the address or the length is a mistake. A wrong guess could permit a whole network.
		return netip.Prefix{}, fmt.Errorf(
			"the address has bits outside its network; write %s for the network or %s for the address",
			p.Masked(), p.Addr())
	}
	return p, nil
}
