package check

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strings"

	"github.com/miekg/dns"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/pkg/api"
	"tunnel.example/tunnel/pkg/kube"
)

// right is a permission in Kubernetes that a configuration needs.
type right struct {
	kube.Right
	why string // what fails without the right
	// unless says when the cloud can do without the right; "": the cloud always needs the right.
	unless string
}

// rights returns the rights in Kubernetes that a configuration needs. A test checks that deployment/cloud-rbac.yaml
// grants all of them.
func rights(c *conf.Cloud) (all []right) {
	add := func(why, unless, namespace, group, resource, subresource, name string, verbs ...string) {
		for _, verb := range verbs {
			all = append(all, right{kube.Right{
				Verb: verb, Group: group, Resource: resource, Subresource: subresource, Name: name, Namespace: namespace,
			}, why, unless})
		}
	}
	d, j := c.DNS, c.Join
	const written = "the names of nodes are not written"
	if d.ConfigMap != "" {
		add(written, "", d.Namespace, "", "configmaps", "", d.ConfigMap, "get", "list", "watch", "patch")
		add(written, "the ConfigMap exists", d.Namespace, "", "configmaps", "", "", "create")
		add(written, "", d.Namespace, "coordination.k8s.io", "leases", "", d.ConfigMap, "get", "patch")
		add(written, "the Lease exists", d.Namespace, "coordination.k8s.io", "leases", "", "", "create")
	}
	if name := c.InventoryMap(); name != "" {
		const forgets = "the cloud forgets missing nodes when all its replicas stop"
		add(forgets, "", c.Namespace, "", "configmaps", "", name, "get", "patch")
		if d.ConfigMap == "" { // else the list has the same right already
			add(forgets, "the ConfigMap exists", c.Namespace, "", "configmaps", "", "", "create")
		}
	}
	if d.Service != "" {
		add("lines of replicas that are gone stay", "", d.Namespace, "discovery.k8s.io", "endpointslices", "", "", "list")
	}
	if d.ConfigMap != "" || c.Egress.AsksKubernetes() || c.Services.On || j.AsksKubernetes() && !j.AnyNode {
		add("the cloud does not know the cluster's nodes", "", "", "", "nodes", "", "", "get", "list", "watch")
	}
	if len(j.ServiceAccounts) > 0 {
		add("no edge can join by a ServiceAccount token", "", "", "authentication.k8s.io", "tokenreviews", "", "", "create")
	}
	if c.Egress.AsksKubernetes() {
		add("a Node could claim the address of a Service", "the cluster is older than Kubernetes 1.33", "",
			"networking.k8s.io", "servicecidrs", "", "", "list")
	}
	if c.AsksKubernetes() && c.HTTPS.MayAskKubernetes() {
		add("an exec that names no node is answered with 503", "https has kubernetes = false", "", "", "pods", "", "", "get")
	}
	if c.Services.On {
		const why = "edges are not told of Services"
		add(why, "", "", "", "services", "", "", "list", "watch")
		add(why, "", "", "discovery.k8s.io", "endpointslices", "", "", "list", "watch")
	}
	if m := c.Services.Mirror; m.On() {
		const why = "pods of the cluster do not reach Services of edge nodes"
		add(why, "", "", "", "services", "", "", "get", "create", "patch", "delete")
		add(why, "", "", "discovery.k8s.io", "endpointslices", "", "", "get", "create", "patch", "delete")
		add(why, "", m.Namespace, "coordination.k8s.io", "leases", "", kube.MirrorLease, "get", "patch")
		if d.ConfigMap == "" { // else the list has the same right already
			add(why, "the Lease exists", m.Namespace, "coordination.k8s.io", "leases", "", "", "create")
		}
	}
	if j.Kubernetes {
		const group, requests = "certificates.k8s.io", "certificatesigningrequests"
		const why = "nodes get no certificates"
		add(why, "", "", group, requests, "", "", "create", "get", "delete")
		add(why, "", "", group, requests, "approval", "", "patch")
		add(why, "", "", group, "signers", "", cmp.Or(j.SignerName, kube.DefaultSigner), "approve")
	}
	return all
}

// kubernetes returns the checks of what a cloud has in Kubernetes, and of DNS.
func (c *cloud) kubernetes() (list []Check) {
	const group = "kubernetes"
	reached := false
	if c.Kubernetes != nil {
		list = append(list, Check{group, "api", func(ctx context.Context) Result {
			version, err := c.Kubernetes.Version(ctx)
			if err != nil {
				return c.silent(err)
			}
			reached = true
			return OK("%s answers, %s", c.Kubernetes.Host(), version)
		}})
		for _, r := range rights(c.Conf) {
			list = append(list, Check{group, "right to " + r.String(), func(ctx context.Context) Result {
				if !reached {
					return Skipped("the API server does not answer")
				}
				result, err := c.may(ctx, r)
				if _, unanswered := errors.AsType[*url.Error](err); unanswered || isTimeout(err) {
					reached = false // do not ask for further rights: each would wait for an answer that never comes
					return c.silent(err)
				}
				return result
			}})
		}
	}
	if c.Conf.DNS.ConfigMap != "" && c.Kubernetes != nil {
		list = append(list,
			Check{"names", "configmap", func(ctx context.Context) Result {
				if !reached {
					return Skipped("the API server does not answer")
				}
				return c.configMap(ctx)
			}},
			Check{"names", "mounted", c.mounted})
	}
	if c.Conf.DNS.ConfigMap != "" || c.Conf.DNS.Listen != "" || c.DNS != "" {
		list = append(list, Check{"names", "dns", c.resolves})
	}
	return list
}

// silent returns the result for an API server that does not answer.
func (c *cloud) silent(err error) Result {
	return Fail("check KUBECONFIG, or the pod's service account, and the network to the API server",
		"%s does not answer: %v", c.Kubernetes.Host(), kube.Explain(err))
}

// may asks the API server whether the cloud has a right. It returns an error if the API server gives no answer.
func (c *cloud) may(ctx context.Context, r right) (Result, error) {
	const do = "kubectl apply -f deployment/cloud-rbac.yaml, with the names of this configuration in it"
	switch ok, err := c.Kubernetes.May(ctx, r.Right); {
	case err != nil:
		return Warn("kubectl auth can-i asks the same", "not known: %v", kube.Explain(err)), err
	case ok:
		return OK("granted"), nil
	case r.unless != "":
		return Warn(do, "missing: %s, unless %s", r.why, r.unless), nil
	}
	return Fail(do, "missing: %s", r.why), nil
}

// hostsKey is the key of the ConfigMap that holds the names.
const hostsKey = "hosts"

// configMap reads the ConfigMap that holds the names of nodes.
func (c *cloud) configMap(ctx context.Context) Result {
	d := c.Conf.DNS
	content, err := c.Kubernetes.ConfigMap(d.Namespace, d.ConfigMap, hostsKey).Load(ctx)
	if err != nil {
		return Fail("see the rights above", "%v", kube.Explain(err))
	}
	if content.Version == "" {
		return Fail("start the cloud, which creates it; or kubectl create configmap "+d.ConfigMap+" -n "+d.Namespace,
			"there is no ConfigMap %s in %s", d.ConfigMap, d.Namespace)
	}
	c.lines = readHosts(content.Text)
	return OK("ConfigMap %s in %s has the names of %d nodes", d.ConfigMap, d.Namespace, len(c.lines))
}

// mounted compares the file that CoreDNS reads with the ConfigMap.
func (c *cloud) mounted(context.Context) Result {
	file := c.Conf.DNS.Hosts
	switch {
	case file == "":
		return Skipped("hosts in [mode.cloud.stream.dns] names no file; it would be the ConfigMap as CoreDNS mounts it")
	case c.lines == nil:
		return Skipped("the ConfigMap comes first")
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return Fail("mount the ConfigMap there, optional and without subPath, in this pod and in CoreDNS (docs/dns.md)",
			"the ConfigMap is not mounted: %v", err)
	}
	if late := differences(c.lines, readHosts(string(text))); late > 0 {
		return Warn("wait two minutes for the kubelet; if it stays so, the volume may have a subPath, which never changes, "+
			"or another ConfigMap is mounted", "%s differs from the ConfigMap in %d names", file, late)
	}
	return OK("%s is the ConfigMap", file)
}

// differences counts the names whose addresses differ.
func differences(a, b map[string][]netip.Addr) (n int) {
	for name, addrs := range a {
		if !slices.Equal(addrs, b[name]) {
			n++
		}
	}
	for name := range b {
		if _, ok := a[name]; !ok {
			n++
		}
	}
	return n
}

// readHosts returns the names of a hosts file, each with its addresses in order.
func readHosts(text string) map[string][]netip.Addr {
	all := make(map[string][]netip.Addr)
	for line := range strings.Lines(text) {
		line, _, _ = strings.Cut(line, "#")
		fields := strings.Fields(line)
		if len(fields) < 2 {
			continue
		}
		addr, err := netip.ParseAddr(fields[0])
		if err != nil {
			continue
		}
		for _, name := range fields[1:] {
			all[name] = append(all[name], addr.Unmap())
		}
	}
	for _, addrs := range all {
		slices.SortFunc(addrs, netip.Addr.Compare)
	}
	return all
}

// resolves asks the DNS server of kube-apiserver for the name of a node.
func (c *cloud) resolves(ctx context.Context) Result {
	server, d := cmp.Or(c.DNS, reachable(c.Conf.DNS.Listen)), c.Conf.DNS
	if server == "" {
		return Skipped("the DNS server that kube-apiserver asks is not known: name it with --dns HOST:PORT")
	}
	node, want := c.example()
	if node == "" {
		return Skipped("no connected node has a name in DNS")
	}
	got, err := lookUp(ctx, server, node)
	mount := "docs/dns.md says what kube-apiserver's CoreDNS needs"
	if d.ConfigMap != "" {
		mount = "mount ConfigMap " + d.ConfigMap + " in kube-apiserver's CoreDNS, with the plugin hosts (docs/dns.md)"
	}
	switch {
	case err != nil:
		return Fail("does the DNS server run, and is that its address? --dns names another one", "%s: %v", server, err)
	case len(got) == 0:
		return Fail(mount, "%s does not know %s, which should lead to %s", server, node, join(want))
	case len(want) == 0:
		return OK("%s leads %s to %s", server, node, join(got))
	}
	for _, addr := range got {
		if !slices.Contains(want, addr) {
			return Fail("another source answers for the name: "+mount, "%s leads %s to %s, and it should be %s", server, node,
				join(got), join(want))
		}
	}
	return OK("%s leads %s to %s", server, node, join(got))
}

// example returns the name of a node, and the addresses that DNS should give for it. want is nil if any address may be
// right.
func (c *cloud) example() (node string, want []netip.Addr) {
	if c.nodes != nil {
		for _, n := range c.nodes.Nodes {
			if n.State != api.Connected {
				continue
			}
			if c.lines == nil && c.Conf.DNS.ConfigMap == "" {
				if c.Conf.Peers.Configured() {
					return n.Name, nil // the name may lead to any replica
				}
				return n.Name, c.Conf.DNS.Addrs
			}
			if addrs := c.lines[n.Name]; addrs != nil {
				return n.Name, addrs
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(c.lines)) {
		return name, c.lines[name]
	}
	return "", nil
}

// lookUp asks a DNS server for the addresses of a name. For a name that does not exist, it returns no address and no
// error.
func lookUp(ctx context.Context, server, name string) (all []netip.Addr, err error) {
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	for _, kind := range []uint16{dns.TypeA, dns.TypeAAAA} {
		query := new(dns.Msg).SetQuestion(dns.Fqdn(name), kind)
		answer, _, err := new(dns.Client).ExchangeContext(ctx, query, server)
		if err != nil {
			return nil, err
		}
		if answer.Rcode != dns.RcodeSuccess && answer.Rcode != dns.RcodeNameError {
			return nil, fmt.Errorf("it answers %s", dns.RcodeToString[answer.Rcode])
		}
		for _, rr := range answer.Answer {
			var ip net.IP
			switch rr := rr.(type) {
			case *dns.A:
				ip = rr.A
			case *dns.AAAA:
				ip = rr.AAAA
			}
			if addr, ok := netip.AddrFromSlice(ip); ok {
				all = append(all, addr.Unmap())
			}
		}
	}
	return all, nil
}

// join returns a text with all addresses.
func join(addrs []netip.Addr) string {
	texts := make([]string, len(addrs))
	for i, a := range addrs {
		texts[i] = a.String()
	}
	return strings.Join(texts, ", ")
}

// reachable returns the address at which a program of this machine reaches a listener.
func reachable(listen string) string {
	host, port, err := net.SplitHostPort(listen)
	if ip, bad := netip.ParseAddr(host); err == nil && (host == "" || bad == nil && ip.IsUnspecified()) {
		return net.JoinHostPort("localhost", port)
	}
	return listen
}
