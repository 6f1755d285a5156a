package conf

import (
	"cmp"
	"slices"
	"strings"

	"tunnel.example/tunnel/pkg/tunnel"
)

// CloudServices says which Services the cloud tells edges, and which endpoints edges may reach, [mode.cloud.services].
type CloudServices struct {
	On         bool     // the file has the table
	Namespaces []string // the cloud tells edges the Services of these namespaces; nil: of all
	Cluster    bool     // edges may also reach endpoints that are not on edge nodes
	Domain     string   // the cluster's domain, in lower case
	Mirror     Mirror
}

// Mirror says how pods of the cluster reach Services of edge nodes, [mode.cloud.services.mirror].
type Mirror struct {
	First, Last uint16 // the ports that the cloud may open; both 0: off
	Service     string // the Service whose endpoints are the replicas
	Namespace   string // the namespace of Service and of the Lease
	Identity    string // the name of this replica in the election of the replica that writes
}

// On reports whether the file has the table.
func (m Mirror) On() bool { return m.First != 0 }

const (
	servicesTable = "mode.cloud.services."
	mirrorTable   = servicesTable + "mirror."
)

// newCloudServices makes a CloudServices from its table, which may be nil.
func newCloudServices(t *cloudServicesKeys, env Env, r *report) CloudServices {
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
	if t.Mirror != nil {
		c.Mirror = Mirror{
			Service: t.Mirror.Service, Namespace: env.PodNamespace, Identity: cmp.Or(env.PodName, env.HostName),
		}
		c.Mirror.First, c.Mirror.Last = r.portRange(mirrorTable+"ports", t.Mirror.Ports)
	}
	return c
}

// portRange parses two ports with a '-' between, such as 20000-20999. It reports any other text.
func (r *report) portRange(key, text string) (first, last uint16) {
	from, to, _ := strings.Cut(text, "-")
	a, okA := parsePort(from)
	b, okB := parsePort(to)
	if !okA || !okB || a > b {
		r.add(key, `%q is not a range of ports: write one such as "20000-20999"`, text)
		return 0, 0
	}
	return uint16(a), uint16(b)
}

// checkMirror reports problems of [mode.cloud.services.mirror].
func (c *Cloud) checkMirror(r *report) {
	const t = mirrorTable
	m := c.Services.Mirror
	if !m.On() {
		return
	}
	if !isLabel(m.Service) {
		r.add(t+"service", "%q is not the name of a Service: write the Service whose endpoints are the pods of the cloud, "+
			`such as "tunnel-cloud-peers"; its namespace is POD_NAMESPACE`, m.Service)
	}
	if !isLabel(m.Namespace) && (m.Namespace != "" || !c.elsewhere) {
		r.add(t[:len(t)-1], "POD_NAMESPACE %q is not the namespace of the cloud: set it from the pod's metadata.namespace",
			m.Namespace)
	}
	if m.Identity == "" {
		r.add(t[:len(t)-1], "neither POD_NAME nor the host name tells this replica from others: "+
			"set POD_NAME from the pod's metadata.name")
	}
	if !c.Egress.Kubernetes {
		r.add(egressTable+"kubernetes", "[mode.cloud.services.mirror] needs it, to know which node has an endpoint: "+
			"write kubernetes = true")
	}
	for _, l := range c.listeners() {
		if l.port >= int(m.First) && l.port <= int(m.Last) {
			r.add(t+"ports", "port %d is taken by %s: choose another range", l.port, l.key)
		}
	}
}

// defaultClusterDomain is also the default of the kubelet and of kubeadm.
const defaultClusterDomain = "cluster.local"

// domain returns the cluster's domain in a key, in lower case. It reports a text that is not a domain.
func (r *report) domain(key, text string) string {
	domain := strings.ToLower(cmp.Or(strings.TrimSuffix(text, "."), defaultClusterDomain))
	if _, err := tunnel.ParseNodeName(domain); err != nil { // a domain has the form of a node's name
		r.add(key, "%q is no domain: write that of the cluster, such as %q", text, defaultClusterDomain)
	}
	return domain
}
