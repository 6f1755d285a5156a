package conf

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/tunnel"
)

// DNS says how the names of nodes come to resolve to this cloud, [mode.cloud.stream.dns]: through the
// ConfigMap that CoreDNS mounts, through the cloud's own DNS server, through both, or not at all.
type DNS struct {
	// The ConfigMap. Without ConfigMap the other fields of this group must be empty. With debug = true
	// newDNS leaves all of them empty.
	ConfigMap    string // name of the ConfigMap that the cloud writes; "": Kubernetes is not used for names
	Namespace    string // of ConfigMap and Service
	Identity     string // of this replica, in the election of the replica that writes
	Service      string // the Service whose endpoints are the replicas; "": none
	NodeSelector string // label selector of the nodes that get a name; the control plane never does
	Hosts        string // the file of the ConfigMap that CoreDNS reads, to measure its lag; "": off

	// The cloud's own DNS server.
	Listen   string           // host:port for UDP and TCP; "": off
	Upstream []netip.AddrPort // DNS servers for names that are not nodes', asked in order; empty: NXDOMAIN
	// AllowFrom are the networks for whose queries the server asks Upstream. Empty: private addresses and
	// loopback. Everybody gets answers about names of nodes.
	AllowFrom auth.Sources

	// Addrs are the addresses to which the names of nodes resolve, IPv4 first, at most one of each
	// family. Empty if neither ConfigMap nor Listen is set.
	Addrs []netip.Addr

	elsewhere bool // Env.Elsewhere
}

// podIP is the key under which problems of POD_IP are muted. It is not a key of the file.
const podIP = "POD_IP"

const defaultDNSPort = 53

// newDNS makes a DNS from the keys and the environment. It reports values that are wrong by themselves.
func newDNS(t *dnsKeys, env Env, r *report) DNS {
	if r.muted[dnsTable+"debug"] {
		return DNS{} // the other keys cannot be interpreted without debug
	}
	d := DNS{
		Listen: t.Listen, Upstream: r.upstream(t.Upstream),
		AllowFrom: r.sources(dnsTable+"allowfrom", t.AllowFrom),
	}
	// With debug = true, the cloud does not use Kubernetes for names, and ignores the other keys. SuperEdge's
	// files have both.
	if !t.Debug {
		d.ConfigMap, d.Service, d.NodeSelector, d.Hosts = t.ConfigMap, t.Service, t.NodeSelector, r.src.path(t.Hosts)
	}
	if d.ConfigMap != "" {
		d.Namespace, d.Identity = env.PodNamespace, cmp.Or(env.PodName, env.HostName)
	}
	if d.ConfigMap != "" || d.Listen != "" {
		d.Addrs = r.addrs(d, env.PodIP)
	}
	d.elsewhere = env.Elsewhere
	return d
}

// upstream parses the addresses of DNS servers, with port 53 by default.
func (r *report) upstream(list []string) []netip.AddrPort {
	var all []netip.AddrPort
	for _, text := range list {
		at, err := netip.ParseAddrPort(text)
		if ip, errIP := netip.ParseAddr(text); errIP == nil {
			at, err = netip.AddrPortFrom(ip, defaultDNSPort), nil
		}
		if err != nil {
			r.add(dnsTable+"upstream",
				"%q is not an IP address with a port: write the DNS server as \"10.96.0.10:53\"", text)
			continue
		}
		all = append(all, netip.AddrPortFrom(at.Addr().Unmap(), at.Port()))
	}
	return all
}

// addrs returns the addresses to which names resolve: those of POD_IP, or else the address of the DNS
// server, if Kubernetes is not used and the server listens on a single address.
func (r *report) addrs(d DNS, podIPs string) []netip.Addr {
	if podIPs == "" {
		host, _, _ := splitListen(d.Listen)
		ip, err := netip.ParseAddr(host)
		if ip = ip.Unmap(); err != nil || d.ConfigMap != "" || !isUsable(ip) {
			return nil
		}
		return []netip.Addr{ip}
	}
	var all []netip.Addr
	for text := range strings.SplitSeq(podIPs, ",") {
		ip, err := netip.ParseAddr(strings.TrimSpace(text))
		if err != nil {
			r.add(d.addrsKey(), "POD_IP %q is not an IP address, "+
				"or one IPv4 and one IPv6 address with a comma between: "+
				"set it from the pod's status.podIP or status.podIPs", podIPs)
			r.mute(podIP)
			return nil
		}
		all = append(all, ip.Unmap())
	}
	slices.SortFunc(all, netip.Addr.Compare) // IPv4 sorts before IPv6
	return all
}

// addrsKey returns the key that needs Addrs. Problems of Addrs are reported under it.
func (d DNS) addrsKey() string {
	if d.ConfigMap != "" {
		return dnsTable + "configmap"
	}
	return dnsTable + "listen"
}

// isUsable reports whether a program could connect to this address if a DNS answer had it.
func isUsable(ip netip.Addr) bool {
	return ip.IsValid() && ip.Zone() == "" && !ip.IsUnspecified() && !ip.IsMulticast()
}

// check reports all problems of the table.
func (d DNS) check(r *report) {
	d.checkKubernetes(r)
	d.checkResponder(r)
	if (d.ConfigMap != "" || d.Listen != "") && !r.muted[podIP] {
		d.checkAddrs(r)
	}
}

// checkKubernetes checks the settings for the ConfigMap.
func (d DNS) checkKubernetes(r *report) {
	const t = dnsTable
	if d.ConfigMap == "" {
		if !r.muted[t+"configmap"] {
			d.checkWithoutConfigMap(r)
		}
		return
	}
	if !isSubdomain(d.ConfigMap) {
		r.add(t+"configmap", "%q is not the name of a ConfigMap: use lower-case letters, digits, '-' and '.', "+
			"at most 253 of them, such as \"tunnel-nodes\"", d.ConfigMap)
	}
	switch {
	case d.Namespace == "" && d.elsewhere:
	case d.Namespace == "":
		r.add(t+"configmap", "POD_NAMESPACE does not say in which namespace it is: "+
			"set it from the pod's metadata.namespace, or set debug = true to do without Kubernetes")
	case !isLabel(d.Namespace):
		r.add(t+"configmap", "POD_NAMESPACE %q is not the name of a namespace: "+
			"set it from the pod's metadata.namespace", d.Namespace)
	}
	if d.Identity == "" {
		r.add(t+"configmap", "neither POD_NAME nor the host name tells this replica from others: "+
			"set POD_NAME from the pod's metadata.name")
	}
	if d.Service != "" && !isLabel(d.Service) {
		r.add(t+"service", "%q is not the name of a Service: use lower-case letters, digits and '-', "+
			"at most 63 of them, such as \"tunnel-cloud\"; its namespace is POD_NAMESPACE", d.Service)
	}
}

// checkWithoutConfigMap reports keys that have no effect without configmap.
func (d DNS) checkWithoutConfigMap(r *report) {
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

// checkResponder checks the settings of the cloud's own DNS server.
func (d DNS) checkResponder(r *report) {
	const t = dnsTable
	if d.Listen == "" {
		if len(d.Upstream) > 0 && !r.muted[t+"listen"] {
			r.add(t+"upstream", "nobody asks us, so we ask nobody: "+
				"write listen = \"127.0.0.1:5353\", where to answer DNS, or remove it")
		}
		return
	}
	host, port, ok := splitListen(d.Listen)
	if !ok {
		r.add(t+"listen", "%q is not an address to listen on: "+
			"write \"host:port\" with a port from 1 to 65535, such as \"127.0.0.1:5353\"", d.Listen)
		r.mute(podIP) // Addrs may depend on the address to listen on
		return
	}
	if ip, isIP := parseHost(host); isIP && ip.IsMulticast() {
		r.add(t+"listen", "%s is a multicast address, and what is asked there has no one answer: "+
			"write an address of this machine", host)
	}
	// A server that is its own upstream would forward each query to itself, without end.
	for _, up := range d.Upstream {
		switch {
		case !up.IsValid() || up.Port() == 0 || up.Addr().IsUnspecified() || up.Addr().IsMulticast():
			r.add(t+"upstream", "%q is not the address of a DNS server: write one such as \"10.96.0.10:53\"", up)
		case int(up.Port()) == port && d.answersAt(host, up.Addr()):
			r.add(t+"upstream", "%s is this server itself (listen = %q), and a question would go round in circles: "+
				"write another DNS server, or remove it", up, d.Listen)
		}
	}
	if len(d.AllowFrom) > 0 && len(d.Upstream) == 0 && !r.muted[t+"upstream"] {
		r.add(t+"allowfrom", "it is for whom upstream is asked, and there is none: "+
			"write upstream = [\"10.96.0.10:53\"], or remove it")
	}
	if d.openToAll() && !isLoopback(host) {
		r.warn(t+"allowfrom", "any name is resolved for whoever reaches %s, also to flood others with the answers: "+
			"write the networks of those who may ask", d.Listen)
	}
}

// openToAll reports whether AllowFrom holds every address of a family, so that the server is an open
// resolver.
func (d DNS) openToAll() bool {
	return slices.ContainsFunc(d.AllowFrom, func(p netip.Prefix) bool { return p.Bits() == 0 })
}

// answersAt reports whether a server that listens on host receives queries to ip.
func (d DNS) answersAt(host string, ip netip.Addr) bool {
	on, ok := parseHost(host)
	switch {
	case !ok: // host is a name, and may resolve to any address
		return false
	// Listening on all addresses includes loopback and the pod's own addresses.
	case on.IsUnspecified():
		return ip.IsLoopback() || slices.Contains(d.Addrs, ip)
	default:
		return on == ip
	}
}

// checkAddrs checks the addresses to which names resolve.
func (d DNS) checkAddrs(r *report) {
	key := d.addrsKey()
	const fix = "set it from the pod's status.podIP or status.podIPs"
	if len(d.Addrs) == 0 && d.elsewhere {
		return
	}
	if len(d.Addrs) == 0 && d.ConfigMap != "" {
		r.add(key, "POD_IP does not say which address the names are to lead to: %s", fix)
	}
	if len(d.Addrs) == 0 && d.ConfigMap == "" {
		r.add(key, "%s does not say which address the names are to lead to: "+
			"set POD_IP to one of this machine, or listen on one", d.Listen)
	}
	// Kubernetes gives a pod at most one address of each family (status.podIPs).
	families := make(map[bool]netip.Addr)
	for _, ip := range d.Addrs {
		switch other, twice := families[ip.Is4()]; {
		case !isUsable(ip) || ip.Is4In6():
			r.add(key, "names cannot lead to %s, which POD_IP holds: %s", ip, fix)
		case d.ConfigMap != "" && !ip.IsGlobalUnicast():
			// See isProxyableHostname in kubernetes/pkg/registry/core/node/strategy.go.
			r.add(key, "kube-apiserver goes to no node at %s, which POD_IP holds: %s", ip, fix)
		case twice:
			r.add(key, "POD_IP holds two addresses of one family, %s and %s: "+
				"set it to one IPv4 and one IPv6 address at most", other, ip)
		}
		families[ip.Is4()] = ip
	}
	if !slices.IsSortedFunc(d.Addrs, netip.Addr.Compare) {
		r.add(key, "the IPv6 address is before the IPv4 address: write IPv4 first")
	}
}

// isSubdomain is Kubernetes' IsDNS1123Subdomain. Names of nodes have the same form.
func isSubdomain(s string) bool {
	_, err := tunnel.ParseNodeName(s)
	return err == nil
}

// isLabel is Kubernetes' IsDNS1123Label.
func isLabel(s string) bool {
	return len(s) <= 63 && isSubdomain(s) && !strings.Contains(s, ".")
}
