package conf

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	"tunnel/pkg/auth"
	"tunnel/pkg/tunnel"
)

// DNS says how nodes' names come to lead to this cloud: by the ConfigMap that CoreDNS
// mounts, by our own answers, by both, or not at all.
type DNS struct {
	// Through Kubernetes. Without ConfigMap all of it is empty, as it is with debug = true.
	ConfigMap    string // "" is no Kubernetes
	Namespace    string // of ConfigMap and Service
	Identity     string // of this replica among those that would write
	Service      string // whose endpoints are the replicas
	NodeSelector string // label selector of the nodes that may appear; "" is all
	Hosts        string // file: ConfigMap as CoreDNS mounts it

	Listen   string           // where DNS is answered, UDP and TCP; "" is nowhere
	Upstream []netip.AddrPort // who is asked for names that are no node's
	// AllowFrom is for whom Upstream is asked; empty is private addresses and loopback.
	AllowFrom auth.Sources

	Addrs []netip.Addr // what names lead to, IPv4 first; empty when none of the above is set
}

// podIP stands for POD_IP where keys are muted: it is no key of the file.
const podIP = "POD_IP"

const defaultDNSPort = 53

func newDNS(t *dnsKeys, env Env, r *report) DNS {
	if r.muted[dnsTable+"debug"] {
		return DNS{} // what counts depends on it
	}
	d := DNS{Listen: t.Listen, Upstream: r.upstream(t.Upstream), AllowFrom: r.sources(dnsTable+"allowfrom", t.AllowFrom)}
	if !t.Debug {
		d.ConfigMap, d.Service, d.NodeSelector, d.Hosts = t.ConfigMap, t.Service, t.NodeSelector, r.src.path(t.Hosts)
	}
	if d.ConfigMap != "" {
		d.Namespace, d.Identity = env.PodNamespace, cmp.Or(env.PodName, env.HostName)
	}
	if d.ConfigMap != "" || d.Listen != "" {
		d.Addrs = r.addrs(d, env.PodIP)
	}
	return d
}

// upstream reads a list of DNS servers.
func (r *report) upstream(list []string) []netip.AddrPort {
	var all []netip.AddrPort
	for _, text := range list {
		at, err := netip.ParseAddrPort(text)
		if ip, errIP := netip.ParseAddr(text); errIP == nil {
			at, err = netip.AddrPortFrom(ip, defaultDNSPort), nil
		}
		if err != nil {
			r.add(dnsTable+"upstream", "%q is not an IP address with a port: write the DNS server as \"10.96.0.10:53\"", text)
			continue
		}
		all = append(all, netip.AddrPortFrom(at.Addr().Unmap(), at.Port()))
	}
	return all
}

// addrs returns what names are to lead to: POD_IP, else the one address that is
// listened on.
func (r *report) addrs(d DNS, podIPs string) []netip.Addr {
	if podIPs == "" {
		host, _, _ := splitListen(d.Listen)
		ip, err := netip.ParseAddr(host)
		if ip = ip.Unmap(); err != nil || d.ConfigMap != "" || !leads(ip) {
			return nil
		}
		return []netip.Addr{ip}
	}
	var all []netip.Addr
	for text := range strings.SplitSeq(podIPs, ",") {
		ip, err := netip.ParseAddr(strings.TrimSpace(text))
		if err != nil {
			r.add(d.addrsKey(), "POD_IP %q is not an IP address, or one IPv4 and one IPv6 address with a comma between: set it from the pod's status.podIP or status.podIPs", podIPs)
			r.mute(podIP)
			return nil
		}
		all = append(all, ip.Unmap())
	}
	slices.SortFunc(all, netip.Addr.Compare) // IPv4 first
	return all
}

// addrsKey is the key that Addrs is needed for.
func (d DNS) addrsKey() string {
	if d.ConfigMap != "" {
		return dnsTable + "configmap"
	}
	return dnsTable + "listen"
}

// leads reports whether an address in DNS could lead anybody anywhere.
func leads(ip netip.Addr) bool {
	return ip.IsValid() && ip.Zone() == "" && !ip.IsUnspecified() && !ip.IsMulticast()
}

func (d DNS) check(r *report) {
	d.checkKubernetes(r)
	d.checkResponder(r)
	if (d.ConfigMap != "" || d.Listen != "") && !r.muted[podIP] {
		d.checkAddrs(r)
	}
}

func (d DNS) checkKubernetes(r *report) {
	const t = dnsTable
	if d.ConfigMap == "" {
		if !r.muted[t+"configmap"] {
			d.checkAlone(r)
		}
		return
	}
	if !isSubdomain(d.ConfigMap) {
		r.add(t+"configmap", "%q is not the name of a ConfigMap: use lower-case letters, digits, '-' and '.', at most 253 of them, such as \"tunnel-nodes\"", d.ConfigMap)
	}
	switch {
	case d.Namespace == "":
		r.add(t+"configmap", "POD_NAMESPACE does not say in which namespace it is: set it from the pod's metadata.namespace, or set debug = true to do without Kubernetes")
	case !isLabel(d.Namespace):
		r.add(t+"configmap", "POD_NAMESPACE %q is not the name of a namespace: set it from the pod's metadata.namespace", d.Namespace)
	}
	if d.Identity == "" {
		r.add(t+"configmap", "neither POD_NAME nor the host name tells this replica from others: set POD_NAME from the pod's metadata.name")
	}
	if d.Service != "" && !isLabel(d.Service) {
		r.add(t+"service", "%q is not the name of a Service: use lower-case letters, digits and '-', at most 63 of them, such as \"tunnel-cloud\"; its namespace is POD_NAMESPACE", d.Service)
	}
}

// checkAlone reports keys that mean nothing without configmap.
func (d DNS) checkAlone(r *report) {
	const t, fix = dnsTable, "write configmap as well, or remove it"
	if d.Hosts != "" {
		r.add(t+"hosts", "it is configmap as CoreDNS mounts it, and there is none: %s", fix)
	}
	if d.Service != "" {
		r.add(t+"service", "it is looked up in Kubernetes, which is used with configmap only: %s", fix)
	}
	if d.NodeSelector != "" {
		r.add(t+"nodeselector", "it selects among the nodes in Kubernetes, which is used with configmap only: %s", fix)
	}
}

func (d DNS) checkResponder(r *report) {
	const t = dnsTable
	if d.Listen == "" {
		if len(d.Upstream) > 0 && !r.muted[t+"listen"] {
			r.add(t+"upstream", "nobody asks us, so we ask nobody: write listen = \"127.0.0.1:5353\", where to answer DNS, or remove it")
		}
		return
	}
	host, port, ok := splitListen(d.Listen)
	if !ok {
		r.add(t+"listen", "%q is not an address to listen on: write \"host:port\" with a port from 1 to 65535, such as \"127.0.0.1:5353\"", d.Listen)
		r.mute(podIP) // what it would publish is not known either
		return
	}
	if ip, isIP := parseHost(host); isIP && ip.IsMulticast() {
		r.add(t+"listen", "%s is a multicast address, and what is asked there has no one answer: write an address of this machine", host)
	}
	for _, up := range d.Upstream {
		switch {
		case !up.IsValid() || up.Port() == 0 || up.Addr().IsUnspecified() || up.Addr().IsMulticast():
			r.add(t+"upstream", "%q is not the address of a DNS server: write one such as \"10.96.0.10:53\"", up)
		case int(up.Port()) == port && d.answers(host, up.Addr()):
			r.add(t+"upstream", "%s is this server itself (listen = %q), and a question would go round in circles: write another DNS server, or remove it", up, d.Listen)
		}
	}
	if len(d.AllowFrom) > 0 && len(d.Upstream) == 0 && !r.muted[t+"upstream"] {
		r.add(t+"allowfrom", "it is for whom upstream is asked, and there is none: write upstream = [\"10.96.0.10:53\"], or remove it")
	}
	if d.forAnybody() && !isLoopback(host) {
		r.warn(t+"allowfrom", "any name is resolved for whoever reaches %s, also to flood others with the answers: write the networks of those who may ask", d.Listen)
	}
}

// forAnybody reports whether Upstream is asked for every address of a family.
func (d DNS) forAnybody() bool {
	return slices.ContainsFunc(d.AllowFrom, func(p netip.Prefix) bool { return p.Bits() == 0 })
}

// answers reports whether who asks at ip asks us, who listen on host.
func (d DNS) answers(host string, ip netip.Addr) bool {
	on, ok := parseHost(host)
	switch {
	case !ok: // a name that only a resolver knows
		return false
	case on.IsUnspecified():
		return ip.IsLoopback() || slices.Contains(d.Addrs, ip)
	default:
		return on == ip
	}
}

func (d DNS) checkAddrs(r *report) {
	key := d.addrsKey()
	const fix = "set it from the pod's status.podIP or status.podIPs"
	if len(d.Addrs) == 0 && d.ConfigMap != "" {
		r.add(key, "POD_IP does not say which address the names are to lead to: %s", fix)
	}
	if len(d.Addrs) == 0 && d.ConfigMap == "" {
		r.add(key, "%s does not say which address the names are to lead to: set POD_IP to one of this machine, or listen on one", d.Listen)
	}
	families := make(map[bool]netip.Addr)
	for _, ip := range d.Addrs {
		switch other, twice := families[ip.Is4()]; {
		case !leads(ip) || ip.Is4In6():
			r.add(key, "names cannot lead to %s, which POD_IP holds: %s", ip, fix)
		case d.ConfigMap != "" && !ip.IsGlobalUnicast():
			// isProxyableHostname in kubernetes/pkg/registry/core/node/strategy.go.
			r.add(key, "kube-apiserver goes to no node at %s, which POD_IP holds: %s", ip, fix)
		case twice:
			r.add(key, "POD_IP holds two addresses of one family, %s and %s: set it to one IPv4 and one IPv6 address at most", other, ip)
		}
		families[ip.Is4()] = ip
	}
	if !slices.IsSortedFunc(d.Addrs, netip.Addr.Compare) {
		r.add(key, "the IPv6 address is before the IPv4 address: write IPv4 first")
	}
}

// isSubdomain and isLabel are Kubernetes' IsDNS1123Subdomain and IsDNS1123Label. A node
// name is the former.
func isSubdomain(s string) bool {
	_, err := tunnel.ParseNodeName(s)
	return err == nil
}

func isLabel(s string) bool {
	return len(s) <= 63 && isSubdomain(s) && !strings.Contains(s, ".")
}
