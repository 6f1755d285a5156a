package conf

import (
	"cmp"
	"slices"
	"strings"

	"tunnel.example/tunnel/pkg/tunnel"
)

// CloudServices says which Services edges are told, and what they may reach, [mode.cloud.services].
type CloudServices struct {
	On         bool     // whether the table is there
	Namespaces []string // whose Services are told; nil: all
	Cluster    bool     // edges may also reach endpoints that are not on edge nodes
	Domain     string   // of the cluster, in lower case
}

const servicesTable = "mode.cloud.services."

// newCloudServices makes a CloudServices from its table, which may be nil.
func newCloudServices(t *cloudServicesKeys, r *report) CloudServices {
	const all = "*"
	if t == nil {
		return CloudServices{}
	}
	c := CloudServices{On: true, Cluster: slices.Contains(t.Allow, "cluster")}
	switch {
	case t.Namespaces != nil && len(t.Namespaces) == 0:
		r.add(servicesTable+"namespaces", "the list is empty, and no Service would be told: "+
			`write namespaces such as "shop", or remove it for all`)
	case slices.Contains(t.Namespaces, all) && len(t.Namespaces) > 1:
		r.add(servicesTable+"namespaces", `"*" means all namespaces: remove it, or remove the others`)
	case !slices.Contains(t.Namespaces, all):
		c.Namespaces = t.Namespaces
	}
	for _, n := range c.Namespaces {
		if !isLabel(n) {
			r.add(servicesTable+"namespaces", `%q is not the name of a namespace: write one such as "shop"`, n)
		}
	}
	if t.Allow != nil && len(t.Allow) == 0 {
		r.add(servicesTable+"allow",
			`the list is empty, and edges could reach nothing: write "edge" or "cluster", or remove it`)
	}
	for _, a := range t.Allow {
		if a != "edge" && a != "cluster" {
			r.add(servicesTable+"allow", `%q is neither "edge" nor "cluster": write one of them`, a)
		}
	}
	c.Domain = r.domain(servicesTable+"clusterdomain", t.ClusterDomain)
	return c
}

// defaultClusterDomain is that of kubelet and of kubeadm.
const defaultClusterDomain = "cluster.local"

// domain returns the domain of the cluster in a key, in lower case. It reports one that is none.
func (r *report) domain(key, text string) string {
	domain := strings.ToLower(cmp.Or(strings.TrimSuffix(text, "."), defaultClusterDomain))
	if _, err := tunnel.ParseNodeName(domain); err != nil { // a domain has the form of a node's name
		r.add(key, "%q is no domain: write that of the cluster, such as %q", text, defaultClusterDomain)
	}
	return domain
}
