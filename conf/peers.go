package conf

import (
	"cmp"
	"net"
	"net/netip"
)

// Peers says which other replicas this cloud has, [mode.cloud.stream.peers]. Without Service and
// Addresses this replica is alone.
type Peers struct {
	Service       string   // host:port; every address to which the name resolves is a replica
	Addresses     []string // host:port of each replica
	CA, Cert, Key string   // files; without Cert and Key, replicas use those of [Server]
	ServerName    string   // a name in the certificates of all replicas, and of nobody else
}

const peersTable = "mode.cloud.stream.peers."

// Configured reports whether there may be other replicas.
func (p Peers) Configured() bool { return p.Service != "" || len(p.Addresses) > 0 }

// check reports an incomplete table.
func (p Peers) check(r *report) {
	const t = peersTable
	if !p.Configured() {
		if p.CA != "" || p.Cert != "" || p.Key != "" || p.ServerName != "" {
			r.warn(t[:len(t)-1],
				`not used: write service = "NAME:9000", a headless Service of the replicas, or addresses`)
		}
		return
	}
	if p.Service != "" {
		r.address(t+"service", p.Service, "tunnel-cloud-peers:9000")
	}
	for _, a := range p.Addresses {
		r.address(t+"addresses", a, "10.0.0.2:9000")
	}
	// Without ca and servername, anybody with a certificate could act as a replica and receive conns.
	r.required(t+"ca", p.CA, "write the CA that signs the replicas' certificates: without it anybody could be one")
	r.required(t+"servername", p.ServerName,
		"write the name that stands in the replicas' certificates, and in no other that ca signs")
	r.file(t+"ca", p.CA)
	r.pair(t, p.Cert, p.Key)
}

// Pair returns the files of the certificate that this replica presents to other replicas, and of its
// key.
func (c *Cloud) Pair() (cert, key string) {
	return cmp.Or(c.Peers.Cert, c.Server.Cert), cmp.Or(c.Peers.Key, c.Server.Key)
}

// checkPeersSendNoHeader reports replicas among the balancers, which must send a PROXY header: a replica
// dials another one without a header.
func (c *Cloud) checkPeersSendNoHeader(r *report) {
	for _, addr := range c.Peers.Addresses {
		host, _, err := net.SplitHostPort(addr)
		if err != nil {
			continue // another check has reported the address
		}
		if ip, err := netip.ParseAddr(host); err == nil && c.Server.ProxyFrom.Permits(ip) {
			r.add(serverTable+"proxyfrom", "the replica %s is in it, and a replica sends no PROXY header: "+
				"write the addresses of the balancers alone", addr)
		}
	}
}
