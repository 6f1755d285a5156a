package conf

import "strings"

// Konnectivity is how to join stock proxy-servers as an agent. Without Servers it is off.
type Konnectivity struct {
	Servers       []string // tls://host:port
	CA, Cert, Key string   // files
	TokenFile     string
}

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
	case len(k.Servers) > 0:
		r.required(t+"ca", k.CA, "write the CA that signed the certificates of the proxy-servers")
		if k.Cert == "" && k.TokenFile == "" {
			r.add(t+"cert", "missing: a proxy-server takes a client certificate or a token, write cert and key, or tokenfile")
		}
	case k.CA != "" || k.Cert != "" || k.TokenFile != "":
		r.warn(t[:len(t)-1], `off: write servers = ["tls://10.0.0.1:8091"]`)
	}
}
