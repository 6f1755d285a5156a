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

// Identifiers say which addresses a node can reach.
type Identifiers struct {
	Hosts        []string       // names and addresses of the node, exactly as callers dial them
	Networks     []netip.Prefix // networks in which the node reaches every address
	DefaultRoute bool           // the node also reaches addresses that no node declares
	// Refused are names that the node claims and may not have. Dials to a refused name fail, unless
	// another node owns the name. Refused names come from Kubernetes Nodes; no agent sends any.
	Refused []string
}

// ParseIdentifiers parses the form of Konnectivity's agents (--agent-identifiers), a URL query:
//
//	host=edge1&ipv4=10.0.0.5&ipv6=fd00::5&cidr=10.88.1.0/24&default-route=true
//
// An unknown key is an error, as it is for the stock agent.
func ParseIdentifiers(s string) (Identifiers, error) {
	var id Identifiers
	query, err := url.ParseQuery(s)
	if err != nil {
		const example = "host=edge1&ipv4=10.0.0.5&cidr=10.88.1.0/24"
		return id, fmt.Errorf("%q is not a list of identifiers: write them as %q", s, example)
	}
	keys := make([]string, 0, len(query))
	for key := range query {
		keys = append(keys, key)
	}
	slices.Sort(keys) // the same input always gives the same error
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
		unprintable := func(r rune) bool { return unicode.IsSpace(r) || !unicode.IsPrint(r) }
		if !utf8.ValidString(v) || strings.ContainsFunc(v, unprintable) {
			return fmt.Errorf("identifier host=%q is not a name: remove spaces and unprintable characters", v)
		}
		id.Hosts = append(id.Hosts, strings.ToLower(v))
	case "ipv4", "ipv6":
		a, err := netip.ParseAddr(v)
		if err != nil || a.Is4() != (key == "ipv4") || a.Zone() != "" {
			want := "an IPv4 address"
			if key == "ipv6" {
				want = "an IPv6 address without a zone"
			}
			return fmt.Errorf("identifier %s=%s is not %s", key, v, want)
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
