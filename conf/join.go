package conf

import (
	"strings"
	"time"

	"tunnel/pkg/tunnel"
)

// Join says who may join besides the lines of the token file, [mode.cloud.join].
type Join struct {
	CA, CAKey  string        // files; who signs nodes' certificates. Without CA there are none
	Kubernetes bool          // the cluster's signer signs, not CAKey
	SignerName string        // of the cluster's signer; "" is kubernetes.io/kube-apiserver-client
	Lifetime   time.Duration // of nodes' certificates; 0 is 30 days
	Address    string        // for join tokens: what edges dial
	CloudCA    string        // for join tokens: file, who signed the server's certificate

	ServiceAccounts []string // whose pods may join, "namespace/name"
	Audience        string   // of their tokens; "" is tunnel
	AnyNode         bool     // nodes need not exist in Kubernetes
}

const joinTable = "mode.cloud.join."

const (
	// leastLifetime is kube-controller-manager's, too (CertificateSigningRequest
	// spec.expirationSeconds).
	leastLifetime = 10 * time.Minute
	mostLifetime  = 10 * 365 * 24 * time.Hour
)

func newJoin(t *joinKeys, r *report) Join {
	path := r.src.path
	j := Join{
		CA: path(t.CA), CAKey: path(t.CAKey),
		SignerName: t.SignerName,
		Address:    t.Address, CloudCA: path(t.CloudCA),
		ServiceAccounts: t.ServiceAccounts, Audience: t.Audience, AnyNode: t.AnyNode,
	}
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

// Signs reports whether nodes get their certificates here.
func (j Join) Signs() bool { return j.Kubernetes || j.CAKey != "" }

// AsksKubernetes reports whether Kubernetes is needed to decide who may join.
func (j Join) AsksKubernetes() bool { return j.Kubernetes || len(j.ServiceAccounts) > 0 }

func (j Join) check(r *report) {
	const t = joinTable
	r.file(t+"ca", j.CA)
	r.file(t+"cakey", j.CAKey)
	r.secret(t+"cakey", j.CAKey)
	r.file(t+"cloudca", j.CloudCA)
	switch {
	case j.CA == "" && j.Signs():
		r.add(t+"ca", "missing: write the certificate of the CA that signs nodes' certificates")
	case j.Kubernetes && j.CAKey != "":
		r.add(t+"cakey", `with signer = "kubernetes" the cluster signs: remove it, or remove signer`)
	}
	if j.Lifetime != 0 && (j.Lifetime < leastLifetime || j.Lifetime > mostLifetime) {
		r.add(t+"lifetime", "nodes' certificates are good for 10m at least and ten years at most, not %v", j.Lifetime)
	}
	if j.Address != "" {
		r.address(t+"address", j.Address, "tunnel.example.com:9000")
	}
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

// isName reports whether s may be the name of a namespace or a ServiceAccount; they follow
// the same rule as those of nodes.
func isName(s string) bool {
	_, err := tunnel.ParseNodeName(s)
	return err == nil
}
