package conf

import (
	"net"
	"slices"
	"strings"
	"time"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/tunnel"
)

// Join says which edges may join besides those of the token file, [mode.cloud.join].
type Join struct {
	// Certificates of nodes.
	CA, CAKey  string        // files: the CA of nodes' certificates, and its key. Without CA there are none
	Kubernetes bool          // the cluster's signer signs, instead of CAKey
	SignerName string        // name of the cluster's signer; "": kubernetes.io/kube-apiserver-client
	Lifetime   time.Duration // of nodes' certificates; 0: 30 days

	// For the join tokens that tunnel token create makes.
	Address string // host:port that edges dial
	CloudCA string // file with the CA that signed the server's certificate; the cloud tells edges its content
	// Servers are addresses of the cloud, host:port, that the cloud tells edges with each certificate; nil: none.
	Servers []string

	// ServiceAccount tokens of pods.
	ServiceAccounts []string // "namespace/name": pods with these accounts may join
	Audience        string   // audience of the pods' tokens; "": tunnel
	AnyNode         bool     // a node may join even if Kubernetes has no Node of its name
}

// joinTable is the prefix of keys, as problems name them.
const joinTable = "mode.cloud.join."

// maxServers is how many addresses an edge accepts from its cloud.
const maxServers = 16

const (
	// minLifetime is also the minimum of kube-controller-manager (spec.expirationSeconds of a
	// CertificateSigningRequest).
	minLifetime = 10 * time.Minute
	maxLifetime = 10 * 365 * 24 * time.Hour // ten years
)

// newJoin makes a Join from the keys. It reports values that are wrong by themselves.
func newJoin(t *joinKeys, r *report) Join {
	path := r.src.path
	j := Join{
		CA: path(t.CA), CAKey: path(t.CAKey),
		SignerName: t.SignerName,
		Address:    t.Address, CloudCA: path(t.CloudCA), Servers: t.Servers,
		ServiceAccounts: t.ServiceAccounts, Audience: t.Audience, AnyNode: t.AnyNode,
	}
	// Report a wrong word here: check sees only the bool Kubernetes.
	switch t.Signer {
	case "", "file":
	case "kubernetes":
		j.Kubernetes = true
	default:
		r.add(joinTable+"signer", "%q is neither \"file\" nor \"kubernetes\": write one of them", t.Signer)
	}
	if t.Lifetime != "" {
		d, err := time.ParseDuration(t.Lifetime)
		if err != nil {
			r.add(joinTable+"lifetime", "%q is not a duration: write hours such as \"720h\"", t.Lifetime)
		} else {
			j.Lifetime = d
		}
	}
	return j
}

// Signs reports whether this cloud issues certificates to nodes.
func (j Join) Signs() bool { return j.Kubernetes || j.CAKey != "" }

// AsksKubernetes reports whether Kubernetes is needed to decide who may join.
func (j Join) AsksKubernetes() bool { return j.Kubernetes || len(j.ServiceAccounts) > 0 }

// edgeAddress checks an address of the cloud. It warns of one that edges refuse: nodes that need no join token do
// without it.
func (r *report) edgeAddress(key, addr string) {
	r.address(key, addr, "tunnel.example.com:9000")
	if host, _, err := net.SplitHostPort(addr); err == nil && IsHost(host) && !auth.IsHost(host) {
		r.warn(key, "edges accept only letters, digits, '-' and '.' in a host, and no '.' at its end: %q", addr)
	}
}

// check reports all problems of the table.
func (j Join) check(r *report) {
	const t = joinTable
	r.file(t+"ca", j.CA)
	r.file(t+"cakey", j.CAKey)
	r.secret(t+"cakey", j.CAKey)
	r.file(t+"cloudca", j.CloudCA)
	switch {
	case j.CA == "" && j.Signs():
		r.add(t+"ca", "missing: write the certificate of the CA that signs nodes' certificates")
	// The cluster's signer has a key of its own, so the operator has probably misunderstood cakey.
	case j.Kubernetes && j.CAKey != "":
		r.add(t+"cakey", `with signer = "kubernetes" the cluster signs: remove it, or remove signer`)
	}
	if j.SignerName != "" && !j.Kubernetes {
		r.add(t+"signername", `only the cluster's signer has a name: write signer = "kubernetes", or remove it`)
	}
	unused := func(key string, is, used bool, why string) {
		if is && !used {
			r.warn(t+key, "not used: %s", why)
		}
	}
	unused("lifetime", j.Lifetime != 0, j.Signs(), "this cloud signs no certificates")
	unused("audience", j.Audience != "", len(j.ServiceAccounts) > 0, "there are no serviceaccounts")
	if j.Lifetime != 0 && (j.Lifetime < minLifetime || j.Lifetime > maxLifetime) {
		r.add(t+"lifetime", "nodes' certificates are good for 10m at least and ten years at most, not %v", j.Lifetime)
	}
	if j.Address != "" {
		r.edgeAddress(t+"address", j.Address)
	}
	for i, server := range j.Servers {
		r.edgeAddress(t+"servers", server)
		if slices.Contains(j.Servers[:i], server) {
			r.add(t+"servers", "%q is there twice: remove one of them", server)
		}
	}
	if len(j.Servers) > maxServers {
		r.add(t+"servers", "edges take %d addresses at most: remove some", maxServers)
	}
	if len(j.Servers) > 0 && !j.Signs() {
		r.add(t+"servers", "edges are told them with a certificate, and this cloud signs none: "+
			"remove it, or write ca and cakey")
	}
	// tunnel token create needs both address and cloudca for a join token.
	if (j.Address == "") != (j.CloudCA == "") {
		missing, there := "address", "cloudca"
		if j.Address != "" {
			missing, there = there, missing
		}
		r.add(t+missing, "missing: a join token holds both, and %s is there", there)
	}
	for _, sa := range j.ServiceAccounts {
		if ns, name, ok := strings.Cut(sa, "/"); !ok || !isName(ns) || !isName(name) {
			r.add(t+"serviceaccounts", "%q is not namespace/name: write one such as \"tunnel-system/tunnel-edge\"", sa)
		}
	}
}

// isName reports whether s may be the name of a namespace or a ServiceAccount. Their rule is the same as
// for names of nodes.
func isName(s string) bool {
	_, err := tunnel.ParseNodeName(s)
	return err == nil
}
