package conf

import "strings"

// Konnectivity configures an edge as an agent of stock proxy-servers, [mode.edge.konnectivity]. Without
// Servers it is off.
type Konnectivity struct {
	Servers       []string // tls://host:port
	CA, Cert, Key string   // files: the CA of the servers' certificates; the agent's certificate and key
	TokenFile     string   // file with the agent's token; needed if Cert is not set
}

// check reports all problems of the table.
func (k Konnectivity) check(r *report) {
	const t = edgeTablePrefix + "konnectivity."
	seen := make(map[string]bool)
	for _, s := range k.Servers {
		if addr, ok := strings.CutPrefix(s, schemeTLS); !ok {
			r.add(t+"servers", "%q is not tls://HOST:PORT: write one such as \"tls://10.0.0.1:8091\"", s)
		} else {
			r.address(t+"servers", addr, "10.0.0.1:8091")
		}
		if seen[s] {
			r.add(t+"servers", "%q is there twice: remove one of them", s)
		}
		seen[s] = true
	}
	r.pair(t, k.Cert, k.Key)
	r.file(t+"ca", k.CA)
	r.file(t+"tokenfile", k.TokenFile)
	switch {
	// A proxy-server can open connections to this edge's targets, so its certificate is always verified.
	case len(k.Servers) > 0:
		r.required(t+"ca", k.CA, "write the CA that signed the certificates of the proxy-servers")
		if k.Cert == "" && k.TokenFile == "" {
			r.add(t+"cert", "missing: a proxy-server takes a client certificate or a token, "+
				"write cert and key, or tokenfile")
		}
	case k.CA != "" || k.Cert != "" || k.TokenFile != "":
		r.warn(t[:len(t)-1], `off: write servers = ["tls://10.0.0.1:8091"]`)
	}
}
