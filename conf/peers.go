package conf

import "cmp"

// Peers says who else is a replica of this cloud.
type Peers struct {
	Service       string   // host:port; every address behind the name is a replica
	Addresses     []string // host:port
	CA, Cert, Key string   // files; Cert and Key are the server's own when not set
	ServerName    string   // stands in the certificates of all replicas
}

const peersTable = "mode.cloud.stream.peers."

// Configured reports whether there may be other replicas.
func (p Peers) Configured() bool { return p.Service != "" || len(p.Addresses) > 0 }

func (p Peers) check(r *report) {
	const t = peersTable
	if !p.Configured() {
		if p.CA != "" || p.Cert != "" || p.Key != "" || p.ServerName != "" {
			r.warn(t[:len(t)-1], `not used: write service = "NAME:9000", a headless Service of the replicas, or addresses`)
		}
		return
	}
	if p.Service != "" {
		r.address(t+"service", p.Service, "tunnel-cloud-peers:9000")
	}
	for _, a := range p.Addresses {
		r.address(t+"addresses", a, "10.0.0.2:9000")
	}
	r.required(t+"ca", p.CA, "write the CA that signs the replicas' certificates: without it anybody could be one")
	r.required(t+"servername", p.ServerName, "write the name that stands in the replicas' certificates, and in no other that ca signs")
	r.file(t+"ca", p.CA)
	r.pair(t, p.Cert, p.Key)
}

// Pair returns the certificate that this replica shows the others, and its key.
func (c *Cloud) Pair() (cert, key string) {
	return cmp.Or(c.Peers.Cert, c.Server.Cert), cmp.Or(c.Peers.Key, c.Server.Key)
}
