package konnectivity

import (
	"fmt"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Identifiers say what a node can reach.
type Identifiers struct {
	Hosts        []string       // names and addresses that it answers to, exactly as they are dialled
	Networks     []netip.Prefix // in which it reaches every address
	DefaultRoute bool           // it reaches what nobody else does
	Refused      []string       // names that it claims and that do not count: they may not be dialled, unless they are another's
}

// ParseIdentifiers parses Konnectivity's form, a URL query:
//
//	host=edge1&ipv4=10.0.0.5&ipv6=fd00::5&cidr=10.88.1.0/24&default-route=true
//
// A key that nobody knows is an error, as it is for its agent.
func ParseIdentifiers(s string) (Identifiers, error) {
	var id Identifiers
	query, err := url.ParseQuery(s)
	if err != nil {
		return id, fmt.Errorf("%q is no list of identifiers: write them as %q", s, "host=edge1&ipv4=10.0.0.5&cidr=10.88.1.0/24")
	}
	keys := make([]string, 0, len(query))
	for key := range query {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	for _, key := range keys {
		for _, v := range query[key] {
			if err := id.add(key, v); err != nil {
				return Identifiers{}, err
			}
		}
	}
	return id, nil
}

func (id *Identifiers) add(key, v string) error {
	switch key {
	case "host":
		if v == "" {
			return fmt.Errorf("identifier host is empty: write the name that is dialled, such as host=edge1")
		}
		if !utf8.ValidString(v) || strings.ContainsFunc(v, func(r rune) bool { return unicode.IsSpace(r) || !unicode.IsPrint(r) }) {
			return fmt.Errorf("identifier host=%q is no name: remove what cannot be printed, and spaces", v)
		}
		id.Hosts = append(id.Hosts, strings.ToLower(v))
	case "ipv4", "ipv6":
		a, err := netip.ParseAddr(v)
		if err != nil || a.Is4() != (key == "ipv4") || a.Zone() != "" {
			return fmt.Errorf("identifier %s=%s is not such an address", key, v)
		}
		id.Hosts = append(id.Hosts, a.Unmap().String())
	case "cidr":
		p, err := netip.ParsePrefix(v)
		if err != nil {
			return fmt.Errorf("identifier cidr=%s is not a network: write one such as cidr=10.88.1.0/24", v)
		}
		if p.Addr().Is4In6() {
			return fmt.Errorf("identifier cidr=%s is an IPv4 network in IPv6's form: write it as IPv4", v)
		}
		id.Networks = append(id.Networks, p.Masked())
	case "default-route":
		if v != "true" && v != "false" {
			return fmt.Errorf("identifier default-route is true or false, not %q", v)
		}
		id.DefaultRoute = v == "true"
	default:
		return fmt.Errorf("identifier %q is not known: write host, ipv4, ipv6, cidr or default-route", key)
	}
	return nil
}
