package conf

import (
	"cmp"
	"net/netip"
)

// EdgeServices configures how an edge serves Services, [mode.edge.services].
type EdgeServices struct {
	On     bool           // the file has the table
	State  string         // path of the file in which the edge keeps the Services that the cloud has told
	Full   bool           // the edge serves all Services, in place of kube-proxy
	Direct []netip.Prefix // networks whose endpoints this node reaches without the tunnel
	Spread bool           // each endpoint of a Service has the same chance to get a connection
	DNS    bool           // the edge answers DNS queries for the names of Services
	Domain string         // the cluster's domain, in lower case

	Near   netip.AddrPort // where other edges of this site connect to this edge; zero: nowhere
	NearCA string         // file with the CAs of nodes' certificates, to verify other edges; "": the cloud tells them
}

const (
	// defaultServicesState is where an edge keeps what it knows of Services.
	defaultServicesState = "/var/lib/tunnel/services.db"
	// In the mode servicesRelay the edge works beside kube-proxy; in the mode servicesFull it replaces kube-proxy.
	servicesRelay = "relay"
	servicesFull  = "full"
)

// newEdgeServices makes an EdgeServices from its table, which may be nil.
func newEdgeServices(t *edgeServicesKeys, r *report) EdgeServices {
	if t == nil {
		return EdgeServices{}
	}
	const table = edgeTablePrefix + "services."
	s := EdgeServices{On: true, State: r.src.path(cmp.Or(t.State, defaultServicesState))}
	switch t.Mode {
	case "", servicesRelay:
	case servicesFull:
		s.Full = true
	default:
		r.add(table+"mode", "%q is no mode: write mode = %q or %q", t.Mode, servicesRelay, servicesFull)
	}
	s.Direct, s.Spread = r.prefixes(table+"direct", t.Direct), t.Spread
	s.DNS, s.Domain = t.DNS, r.domain(table+"clusterdomain", t.ClusterDomain)
	if t.ClusterDomain != "" && !t.DNS {
		r.add(table+"clusterdomain", "not used: write dns = true, or remove the key")
	}
	s.NearCA = r.src.path(t.NearCA)
	if t.Near != "" {
		var err error
		if s.Near, err = netip.ParseAddrPort(t.Near); err != nil || s.Near.Port() == 0 {
			r.add(table+"near", "%q is no address with a port: write one such as \"0.0.0.0:9443\"", t.Near)
		}
	} else if t.NearCA != "" {
		r.add(table+"nearca", "not used: write near, or remove the key")
	}
	return s
}

// prefixes returns the networks of a key. It reports each text that is not a network.
func (r *report) prefixes(key string, texts []string) (all []netip.Prefix) {
	for _, text := range texts {
		prefix, err := netip.ParsePrefix(text)
		switch {
		case err != nil:
			r.add(key, "%q is not a network: write one such as \"10.88.1.0/24\"", text)
		case prefix != prefix.Masked():
			r.add(key, "%q: did you mean %q?", text, prefix.Masked())
		default:
			all = append(all, prefix)
		}
	}
	return all
}
