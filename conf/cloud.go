package conf

import (
	"cmp"
	"maps"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/BurntSushi/toml"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/tunnel"
)

// Cloud is the configuration of a replica, [mode.cloud].
type Cloud struct {
	// Warnings are for the log: settings that are accepted but should be changed.
	Warnings []string

	Server      Server        // [mode.cloud.stream.server]: the port that edges dial
	DNS         DNS           // [mode.cloud.stream.dns]
	Peers       Peers         // [mode.cloud.stream.peers]
	Join        Join          // [mode.cloud.join]
	HTTPS       HTTPS         // [mode.cloud.https]
	TCP         []TCPListener // [mode.cloud.tcp] and the tables beside it, in the order of Listen
	UDP         []UDPListener // [mode.cloud.udp] and [mode.cloud.udpallow], in the order of Listen
	Limits      Limits        // [mode.cloud.limits]
	Egress      Egress        // [mode.cloud.egress]
	Services    CloudServices // [mode.cloud.services]
	AdminSocket string        // [mode.cloud.admin] socket, a path; "": off
	Audit       string        // [mode.cloud.audit] file, a path or AuditStdout; "": off
	Inventory   string        // [mode.cloud.admin] inventory, a path or configmap:NAME; "": the cloud keeps none
	Namespace   string        // namespace of the inventory's ConfigMap
	elsewhere   bool          // Env.Elsewhere
	Expected    string        // [mode.cloud.admin] nodeselector, which nodes should have an edge; "": see ReadsNodes
	Forwards    string        // [mode.cloud.admin] forwards, a path; "": no file of forwards
	Page        string        // [mode.cloud.admin] page, host:port of the status page on loopback; "": off
	Traces      Traces        // [mode.cloud.traces]

	src *source // where the keys are in the file; nil: the Cloud was not read from a file
}

// Server configures the gRPC server that edges dial, and the ports for the operator.
type Server struct {
	// Edges dial GRPCPort or Listen, and so do other replicas ([Peers]). At least one of both is set. Cert
	// must be good for the name that edges verify (dns in the edge's file). The files are read again when
	// they change.
	GRPCPort    int          // on all interfaces; 0: off
	Listen      string       // host:port of the one port, for edges, callers of HTTPS, and health; "": off
	WebSocket   string       // host:port for WebSockets of an HTTP ingress, without TLS; "": none
	ProxyFrom   auth.Sources // balancers that send a PROXY header to GRPCPort and Listen; empty: none
	Cert, Key   string       // files: the server's certificate and its key
	TokenFile   string       // file with the tokens and revocations of nodes, see auth.Tokens
	AllowShared bool         // accept default: lines in TokenFile
	Congestion  string       // congestion control of edges' connections: "system" or an algorithm's name; "": auto
	// For the operator. The ports have no authentication.
	LogPort      int    // port for /healthz /readyz /metrics on all interfaces; 0: off
	ChannelzAddr string // where channelz is served, on loopback; "": off
}

// TLSMode says what the https front door does with a TLS connection.
type TLSMode int

// The modes. TLSPassthrough forwards the TLS connection to the kubelet. TLSTerminate ends it here.
// TLSAuto passes a connection through if its SNI is the name of a node. Otherwise it terminates the
// connection if there is a ClientCA, and else closes it.
const (
	// TLSAuto is the zero value, the default of the key.
	TLSAuto TLSMode = iota
	TLSPassthrough
	TLSTerminate
)

// String returns the mode as it is written in the file.
func (m TLSMode) String() string {
	switch m {
	case TLSAuto:
		return "auto"
	case TLSPassthrough:
		return "passthrough"
	case TLSTerminate:
		return "terminate"
	default:
		return "tls mode " + strconv.Itoa(int(m))
	}
}

// HTTPS configures the front door that looks like a kubelet. Without Ports it is off.
type HTTPS struct {
	Ports  map[string]string // port to listen on → host:port that the edge dials
	Listen string            // IP address to listen on; "" and 0.0.0.0: all, IPv4 and IPv6
	TLS    TLSMode           // which connections are passed through, and which are terminated
	// AllowFrom are the networks that may connect. Empty: any. Listed networks are exempt from
	// Limits.ConnsPerAddress.
	AllowFrom auth.Sources
	ProxyFrom auth.Sources // balancers that send a PROXY header to Ports; empty: none

	// For terminated connections.
	Cert, Key string // files: the certificate that callers see, and its key
	ClientCA  string // file with the CAs of callers' certificates; "": no connection is terminated
	// Callers are told apart by the common name of their client certificate. ClientNames and Callers
	// must not overlap.
	ClientNames []string // common names that may send any request; empty: kube-apiserver-kubelet-client
	Callers     []Caller // common names that may send some requests only
	// Kubernetes says whether the front door asks Kubernetes for the node of a pod. nil: it asks if another
	// setting makes the cloud use Kubernetes.
	Kubernetes *bool
	Kubelet    Kubelet // [mode.cloud.https.kubelet]
}

// Caller is a caller of the https front door that may send some requests only.
type Caller struct {
	Name string       // common name of its certificate
	May  []auth.Class // requests that it may send
}

// Kubelet configures the connection from the cloud to a kubelet, for a terminated connection. Without
// Cert, the edge speaks TLS to the kubelet, with its own certificate ([Edge] HTTPS).
type Kubelet struct {
	Cert, Key string // files: client certificate that kubelets accept, and its key
	CA        string // file with the CAs of kubelets' certificates
	Insecure  bool   // do not verify the kubelet's certificate
}

// Defaults of pkg/https, for messages and for the check of ports.
const (
	defaultClientName  = "kube-apiserver-kubelet-client"
	defaultHTTPSListen = "0.0.0.0"
)

// OnePort returns the port of Ports whose callers may also use the one port ([Server] Listen): the port of
// kubelets, 10250, or else the lowest port. It returns "" if Ports is empty.
func (h HTTPS) OnePort() string {
	const kubelets = "10250"
	if _, ok := h.Ports[kubelets]; ok {
		return kubelets
	}
	if len(h.Ports) == 0 {
		return ""
	}
	return slices.MinFunc(slices.Collect(maps.Keys(h.Ports)), func(a, b string) int {
		return cmp.Or(cmp.Compare(len(a), len(b)), cmp.Compare(a, b))
	})
}

// Terminates reports whether the front door terminates connections.
func (h HTTPS) Terminates() bool { return h.TLS != TLSPassthrough && h.ClientCA != "" }

// MayAskKubernetes reports whether the front door asks Kubernetes for the node of a pod if the cloud uses
// Kubernetes.
func (h HTTPS) MayAskKubernetes() bool {
	return len(h.Ports) > 0 && h.Terminates() && (h.Kubernetes == nil || *h.Kubernetes)
}

// AsksKubernetes reports whether this table alone makes the cloud use Kubernetes.
func (h HTTPS) AsksKubernetes() bool { return h.MayAskKubernetes() && h.Kubernetes != nil }

// TCPListener is one line of [mode.cloud.tcp].
type TCPListener struct {
	Listen string          // host:port
	Node   tunnel.NodeName // "": any connected node of Among
	// At most one of Node and Among is set. A selector protects from stolen edges: with neither, any edge
	// may receive the connection.
	Among  tunnel.Selector // the nodes to choose from; empty: all
	Target string          // host:port that the edge dials
	Allow  auth.Sources    // networks that may connect; empty: any, which is allowed on loopback only

	ProxyFrom auth.Sources // [mode.cloud.tcpproxyfrom]: balancers that send a PROXY header; empty: none
	SendProxy int          // [mode.cloud.tcpsendproxy]: the version of the header for the target; 0: none
}

// UDPListener is one line of [mode.cloud.udp]. With neither Node nor Among, one connected node serves
// all callers of the port at a time.
type UDPListener struct {
	Listen string          // host:port; also the key in [mode.cloud.udp]
	Node   tunnel.NodeName // the only node to dial through
	Among  tunnel.Selector // the nodes to choose from; empty: all
	Target string          // host:port that the edge dials
	Allow  auth.Sources    // networks that may send; empty: any, which is allowed on loopback only
}

// line returns the listener as a TCPListener, for check.
func (l UDPListener) line() TCPListener {
	return TCPListener{Listen: l.Listen, Node: l.Node, Among: l.Among, Target: l.Target, Allow: l.Allow}
}

// The prefixes of keys, as problems name them.
const (
	serverTable  = "mode.cloud.stream.server."
	dnsTable     = "mode.cloud.stream.dns."
	httpsTable   = "mode.cloud.https."
	kubeletTable = "mode.cloud.https.kubelet."
)

// addrKey returns the key of a line whose name the operator chooses.
func addrKey(port string) string { return httpsTable + toml.Key{"addr", port}.String() }

// forwarding is the tables of a front door whose lines are "listen" = "target".
type forwarding struct {
	table   string // "tcp" or "udp"; the names of the tables beside it begin with the same letters
	example string // an address to listen on
	verb    string // what a permitted caller does
}

var (
	forwardTCP = forwarding{"tcp", "127.0.0.1:6443", "connect"} //nolint:gochecknoglobals // a constant
	forwardUDP = forwarding{"udp", "127.0.0.1:5353", "send"}    //nolint:gochecknoglobals // a constant
)

// key returns the key of a line.
func (f forwarding) key(listen string) string { return f.keyIn("", listen) }

// keyIn returns the key of a line of a table beside the table of targets: "allow", "proxyfrom" or "sendproxy".
func (f forwarding) keyIn(beside, listen string) string {
	return toml.Key{"mode", "cloud", f.table + beside, listen}.String()
}

// newCloud makes a Cloud from the tables. It reports values that are wrong by themselves; check reports
// the rest.
func newCloud(t *cloudTable, env Env, r *report) *Cloud {
	s, peers, h := t.Stream.Server, t.Stream.Peers, t.HTTPS
	path := r.src.path
	r.src.settings = settingsOf(toml.Key{"mode", "cloud"}, *t)
	c := &Cloud{
		Server: Server{
			GRPCPort: s.GRPCPort, Listen: s.Listen, WebSocket: s.WebSocket,
			ProxyFrom: r.balancers(serverTable+"proxyfrom", s.ProxyFrom),
			Cert:      path(s.Cert), Key: path(s.Key), TokenFile: path(s.TokenFile),
			AllowShared:  s.AllowShared,
			Congestion:   r.congestion(serverTable+"congestion", s.Congestion),
			LogPort:      s.LogPort,
			ChannelzAddr: r.channelz(serverTable+"channelzaddr", s.ChannelzAddr),
		},
		DNS: newDNS(&t.Stream.DNS, env, r),
		Peers: Peers{
			Service: peers.Service, Addresses: peers.Addresses,
			CA: path(peers.CA), Cert: path(peers.Cert), Key: path(peers.Key), ServerName: peers.ServerName,
		},
		Join: newJoin(&t.Join, r),
		HTTPS: HTTPS{
			Ports:     h.Addr,
			Listen:    h.Listen,
			TLS:       r.tlsMode(h.TLS),
			AllowFrom: r.sources(httpsTable+"allowfrom", h.AllowFrom),
			ProxyFrom: r.balancers(httpsTable+"proxyfrom", h.ProxyFrom),
			Cert:      path(h.Cert), Key: path(h.Key),
			ClientCA:    path(h.ClientCA),
			ClientNames: r.clientNames(h.ClientNames),
			Callers:     r.callers(h.Callers, h.ClientNames),
			Kubernetes:  h.Kubernetes,
			Kubelet: Kubelet{
				Cert: path(h.Kubelet.Cert), Key: path(h.Kubelet.Key),
				CA: path(h.Kubelet.CA), Insecure: h.Kubelet.Insecure,
			},
		},
		TCP:         r.tcpListeners(t),
		UDP:         udpListeners(r.listeners(forwardUDP, t.UDP, t.UDPAllow)),
		Limits:      newLimits(&t.Limits, r),
		Egress:      newEgress(&t.Egress, r),
		Services:    newCloudServices(t.Services, env, r),
		AdminSocket: path(t.Admin.Socket),
		Audit:       r.src.auditFile(t.Audit.File),
		Inventory:   r.src.inventory(t.Admin.Inventory),
		Namespace:   env.PodNamespace,
		elsewhere:   env.Elsewhere,
		Expected:    t.Admin.NodeSelector,
		Forwards:    path(t.Admin.Forwards),
		Page:        t.Admin.Page,
		Traces: Traces{
			Endpoint:   r.collector(cloudTracesTable, t.Traces.Endpoint),
			PerMillion: t.Traces.PerMillion,
		},
		src: r.src,
	}
	c.Egress.Mirror = c.Services.Mirror.On()
	return c
}

// path resolves a path of the file, relative to the file's folder. "" stays "".
func (s *source) path(p string) string {
	if p == "" || filepath.IsAbs(p) {
		return p
	}
	return filepath.Join(filepath.Dir(s.file), p)
}

// AuditStdout in [mode.cloud.audit] file means standard output.
const AuditStdout = "stdout"

// auditFile returns the path of the audit file, or AuditStdout.
func (s *source) auditFile(file string) string {
	if file == AuditStdout {
		return file
	}
	return s.path(file)
}

// inventoryMap stands before the name of a ConfigMap in [mode.cloud.admin] inventory.
const inventoryMap = "configmap:"

// InventoryMap returns the name of the ConfigMap that holds the inventory; "": a file holds it, or there is none.
func (c *Cloud) InventoryMap() string {
	name, is := strings.CutPrefix(c.Inventory, inventoryMap)
	if !is {
		return ""
	}
	return name
}

// AsksKubernetes reports whether the cloud needs Kubernetes for anything but the inventory.
func (c *Cloud) AsksKubernetes() bool {
	return c.ReadsNodes() || c.HTTPS.AsksKubernetes()
}

// ReadsNodes reports whether the cloud reads from Kubernetes which nodes there are: those that get a name or may join.
func (c *Cloud) ReadsNodes() bool {
	return c.DNS.ConfigMap != "" || c.Egress.AsksKubernetes() || c.Join.AsksKubernetes()
}

// inventory returns Cloud.Inventory for the value of the key: a path, or configmap:NAME unchanged.
func (s *source) inventory(where string) string {
	if strings.HasPrefix(where, inventoryMap) {
		return where
	}
	return s.path(where)
}

// checkInventory checks the name of a ConfigMap.
func (c *Cloud) checkInventory(r *report) {
	const key = adminTable + "inventory"
	name, is := strings.CutPrefix(c.Inventory, inventoryMap)
	switch {
	case !is:
	case !isSubdomain(name):
		r.add(key, "%q is not the name of a ConfigMap: use lower-case letters, digits, '-' and '.', "+
			"at most 253 of them, such as \"configmap:tunnel-inventory\"", name)
	case name == c.DNS.ConfigMap:
		r.add(key, "the ConfigMap %s holds the names of nodes: give the inventory one of its own, "+
			"such as \"configmap:tunnel-inventory\"", name)
	case c.Namespace == "" && c.elsewhere:
	case !isLabel(c.Namespace):
		r.add(key, "POD_NAMESPACE %q is not the namespace of the ConfigMap: set it from the pod's metadata.namespace, "+
			"or write the path of a file", c.Namespace)
	}
}

// tlsMode parses the key tls.
func (r *report) tlsMode(s string) TLSMode {
	switch s {
	case "", "auto":
		return TLSAuto
	case "passthrough":
		return TLSPassthrough
	case "terminate":
		return TLSTerminate
	default:
		r.add(httpsTable+"tls", "%q is none of \"auto\", \"passthrough\", \"terminate\": write one of them", s)
		return TLSAuto
	}
}

// clientNames reports an empty list or an empty name. An empty list could mean the default, anybody or
// nobody.
func (r *report) clientNames(names []string) []string {
	if names != nil && (len(names) == 0 || slices.Contains(names, "")) {
		r.add(httpsTable+"clientnames", "the list is empty or holds an empty name: "+
			"name who may call, or remove it for the default, [%q]", defaultClientName)
	}
	return names
}

// callers parses the key callers. names is the list of clientnames. callers reports a line whose name is in names,
// because clientnames permits that caller every request already.
func (r *report) callers(lines []callerKeys, names []string) []Caller {
	const key = httpsTable + "callers"
	// pkg/https uses the default name if the list is empty, so a caller must not have that name either.
	if len(names) == 0 {
		names = []string{defaultClientName}
	}
	var all []Caller
	for _, l := range lines {
		switch {
		case l.Name == "":
			r.add(key, `a caller has no name: write {name = "metrics-server", may = ["metrics"]}, `+
				`with the common name of its certificate`)
			continue
		case slices.Contains(names, l.Name):
			r.add(key, "%q is in clientnames, and may do everything: "+
				"remove it here or there (clientnames is [%q] where it is not written)", l.Name, defaultClientName)
		case slices.ContainsFunc(all, func(c Caller) bool { return c.Name == l.Name }):
			r.add(key, "%q is there twice: write one line with all that it may do", l.Name)
		}
		if len(l.May) == 0 {
			r.add(key, "%q may do nothing: write may = [...] with some of %q", l.Name, auth.Classes())
		}
		c := Caller{Name: l.Name}
		for _, class := range l.May {
			if !slices.Contains(auth.Classes(), auth.Class(class)) {
				r.add(key, "%q may do %q, which is not known: write some of %q", l.Name, class, auth.Classes())
			}
			c.May = append(c.May, auth.Class(class))
		}
		all = append(all, c)
	}
	return all
}

// sources parses a list of networks. It reports an empty list.
func (r *report) sources(key string, list []string) auth.Sources {
	// An empty list could mean nobody or, as for a missing key, everybody.
	if list != nil && len(list) == 0 {
		r.add(key, "the list is empty, and nobody could connect: write networks such as \"10.0.0.0/8\", or remove it")
	}
	return r.networks(key, list)
}

// balancers parses a list of networks with balancers that send a PROXY header. It reports an empty
// list. It also reports a network of all addresses: any caller could then claim any address in a header.
func (r *report) balancers(key string, list []string) auth.Sources {
	if list != nil && len(list) == 0 {
		r.add(key, "the list is empty: write the addresses of the balancers that send a PROXY header, "+
			"such as \"10.0.0.5\", or remove it")
	}
	all := r.networks(key, list)
	for _, p := range all {
		if p.Bits() == 0 {
			r.add(key, "with %s every caller could pretend to be another one: write the addresses of the balancers", p)
		}
	}
	return all
}

// networks parses a list of networks.
func (r *report) networks(key string, list []string) auth.Sources {
	var all auth.Sources
	// One entry at a time, so that all bad entries are reported.
	for _, entry := range list {
		one, err := auth.ParseSources([]string{entry})
		if err != nil {
			r.add(key, "%v", err)
			continue
		}
		all = append(all, one...)
	}
	return all
}

// tcpListeners parses [mode.cloud.tcp] and the tables with the same addresses: [mode.cloud.tcpallow],
// [mode.cloud.tcpproxyfrom] and [mode.cloud.tcpsendproxy].
func (r *report) tcpListeners(t *cloudTable) []TCPListener {
	ls := r.listeners(forwardTCP, t.TCP, t.TCPAllow)
	for i := range ls {
		l := &ls[i]
		l.ProxyFrom = r.balancers(forwardTCP.keyIn("proxyfrom", l.Listen), t.TCPProxyFrom[l.Listen])
		if version, ok := t.TCPSendProxy[l.Listen]; ok {
			l.SendProxy = r.proxyVersion(forwardTCP.keyIn("sendproxy", l.Listen), version)
		}
	}
	listens := slices.Sorted(maps.Keys(t.TCP))
	r.strays(forwardTCP, "proxyfrom", slices.Sorted(maps.Keys(t.TCPProxyFrom)), listens)
	r.strays(forwardTCP, "sendproxy", slices.Sorted(maps.Keys(t.TCPSendProxy)), listens)
	return ls
}

// listeners parses the table of a front door's targets, and the table of the networks that may use them.
func (r *report) listeners(f forwarding, lines map[string]string, allow map[string][]string) []TCPListener {
	// Sorted by address, since the order of a map is random. Problems and log lines then keep their order.
	listens := slices.Sorted(maps.Keys(lines))
	var ls []TCPListener
	for _, listen := range listens {
		l := r.forward(f, listen, lines[listen])
		if list, ok := allow[listen]; ok {
			l.Allow = r.sources(f.keyIn("allow", listen), list)
			if len(l.Allow) == 0 {
				r.mute(f.key(listen)) // its allow line was reported as wrong; do not report it as missing, too
			}
		}
		ls = append(ls, l)
	}
	r.strays(f, "allow", slices.Sorted(maps.Keys(allow)), listens)
	return ls
}

func udpListeners(lines []TCPListener) (ls []UDPListener) {
	for _, l := range lines {
		ls = append(ls, UDPListener{l.Listen, l.Node, l.Among, l.Target, l.Allow})
	}
	return ls
}

// forward parses a line of a table of targets.
func (r *report) forward(f forwarding, listen, target string) TCPListener {
	l := TCPListener{Listen: listen, Target: target}
	node, target, named := strings.Cut(l.Target, "/")
	if !named {
		r.warnLikeNode(f, l)
		return l
	}
	l.Target = target
	var err error
	// "edge1,gw-*" is a selector; "edge1" is one node.
	if strings.ContainsAny(node, ",*") {
		l.Among, err = tunnel.ParseSelector(node)
	} else {
		l.Node, err = tunnel.ParseNodeName(node)
	}
	if err != nil {
		r.add(f.key(listen), "%v: write \"node/host:port\", or \"host:port\" for any node", err)
		r.mute(f.key(listen))
	}
	return l
}

// warnLikeNode warns about a target such as "edge1:22", whose host could be the name of a node. The operator may have
// meant port 22 of that node, which is "edge1/127.0.0.1:22".
func (r *report) warnLikeNode(f forwarding, l TCPListener) {
	host, port, err := net.SplitHostPort(l.Target)
	if err != nil || host == "localhost" || strings.Contains(host, ".") {
		return
	}
	if _, err := tunnel.ParseNodeName(host); err != nil {
		return
	}
	r.warn(f.key(l.Listen), "any connected node dials the host %s: if %s is a node, write \"%s/127.0.0.1:%s\", "+
		"and if any node is right, write \"*/%s\"", host, host, host, port, l.Target)
}

// proxyVersion parses a value of [mode.cloud.tcpsendproxy].
func (r *report) proxyVersion(key, s string) int {
	switch s {
	case "v1":
		return 1
	case "v2":
		return 2
	}
	r.add(key, "%q is neither \"v1\" nor \"v2\": write the version of the PROXY protocol that the target expects", s)
	return 0
}

// strays reports each line of a table such as tcpallow for which the table of targets has no line. The address in the
// line is probably mistyped, so a listener lacks the line.
func (r *report) strays(f forwarding, beside string, lines, listens []string) {
	for _, listen := range lines {
		if slices.Contains(listens, listen) || r.muted[f.key(listen)] {
			continue
		}
		if near, ok := nearest(listen, listens); ok {
			r.add(f.keyIn(beside, listen), "[mode.cloud.%s] has no such listener: did you mean %q?", f.table, near)
			continue
		}
		r.add(f.keyIn(beside, listen), "[mode.cloud.%s] has no such listener: add it there, or remove this line", f.table)
	}
}

// Validate returns all problems, as [Problems]. It changes nothing, but it opens the configured files.
func (c *Cloud) Validate() error {
	r := newReport(c.src)
	c.check(r)
	return r.err()
}

// check reports all problems that can be found without the tables of the file.
func (c *Cloud) check(r *report) {
	c.Server.check(r)
	c.DNS.check(r)
	c.Peers.check(r)
	c.checkPeersSendNoHeader(r)
	c.Join.check(r)
	c.HTTPS.check(r)
	for _, l := range c.TCP {
		l.check(forwardTCP, r)
	}
	for _, l := range c.UDP {
		l.line().check(forwardUDP, r)
	}
	c.Egress.check(r)
	c.checkMirror(r)
	c.checkInventory(r)
	if c.Expected != "" && !c.ReadsNodes() {
		r.add(adminTable+"nodeselector", "it selects among the nodes in Kubernetes, and this cloud reads none: remove it")
	}
	r.socket(adminTable+"socket", c.AdminSocket)
	r.page(c.Page)
	c.checkTraces(r)
	r.ports(c.listeners())
	r.ports(c.udpListeners())
}

// check reports problems of [mode.cloud.stream.server].
func (s Server) check(r *report) {
	const t = serverTable
	// 0 is the value of a missing key, so it gets its own message.
	switch {
	case s.GRPCPort != 0:
		r.port(t+"grpcport", s.GRPCPort)
	case s.Listen == "":
		r.add(t+"grpcport", "missing: write the port that edges dial, such as grpcport = 9000")
	}
	if _, _, ok := splitListen(s.Listen); !ok && s.Listen != "" {
		r.add(t+"listen", "%q has no address to listen on: write one such as \":443\"", s.Listen)
	}
	r.required(t+"cert", s.Cert, `write the server's certificate, such as cert = "cloud.crt"`)
	r.required(t+"key", s.Key, `write the certificate's private key, such as key = "cloud.key"`)
	r.file(t+"cert", s.Cert)
	r.file(t+"key", s.Key)
	r.secret(t+"key", s.Key)
	s.checkTokenFile(r)
	if s.LogPort != 0 {
		r.port(t+"logport", s.LogPort)
	}
	r.loopback(t+"channelzaddr", s.ChannelzAddr)
	if _, _, ok := splitListen(s.WebSocket); s.WebSocket != "" && !ok {
		r.add(t+"websocket", "%q is not an address to listen on: write one such as \"127.0.0.1:8080\"", s.WebSocket)
	}
}

// checkTokenFile is the only check that ReadCloud makes.
func (s Server) checkTokenFile(r *report) {
	r.required(tokenFileKey, s.TokenFile, `without tokens nobody can join: `+
		`write tokenfile = "tokens", a file with a line node:token for each edge`)
	r.file(tokenFileKey, s.TokenFile)
}

// tokenFileKey is the key of the token file.
const tokenFileKey = serverTable + "tokenfile"

// check reports problems of [mode.cloud.https] and its sub-tables.
func (h HTTPS) check(r *report) {
	const t = httpsTable
	// The keys of this table are ports that the operator chose, so decode has accepted any text.
	for _, port := range slices.Sorted(maps.Keys(h.Ports)) {
		if _, ok := parsePort(port); !ok {
			r.add(addrKey(port), "the key is not a port from 1 to 65535: write \"10250\" = \"127.0.0.1:10250\"")
		}
		r.target(addrKey(port), h.Ports[port])
	}
	if _, err := netip.ParseAddr(h.Listen); err != nil && h.Listen != "" {
		r.add(t+"listen", "%q is not an IP address: write one without a port, such as \"127.0.0.1\"; "+
			"the ports are in [mode.cloud.https.addr]", h.Listen)
	}
	r.pair(t, h.Cert, h.Key)
	r.file(t+"clientca", h.ClientCA)
	// The value cannot come from a file: tlsMode returns only values in range.
	if h.TLS < TLSAuto || h.TLS > TLSTerminate {
		r.add(t+"tls", "there is no %v", h.TLS)
	}
	h.checkTLS(r)
	h.Kubelet.check(r)
	// Settings without a port have no effect. The operator has probably forgotten the table addr.
	if h.configured() && len(h.Ports) == 0 {
		r.warn(t+"addr", `no port is opened, so [mode.cloud.https] is off: `+
			`write "10250" = "127.0.0.1:10250" in [mode.cloud.https.addr]`)
	}
}

// checkTLS reports combinations of settings that would not do what the file seems to ask for.
func (h HTTPS) checkTLS(r *report) {
	const t = httpsTable
	switch {
	case h.TLS == TLSTerminate && h.ClientCA == "":
		r.add(t+"clientca", `tls = "terminate" needs it, or anybody could call the kubelets: `+
			`write the CA that signs the callers' certificates`)
	case h.TLS == TLSPassthrough && (h.ClientCA != "" || len(h.ClientNames)+len(h.Callers) > 0):
		r.warn(t+"tls", `with "passthrough" callers are verified by the kubelet alone: `+
			`clientca, clientnames and callers do not count`)
	case h.Kubernetes != nil && *h.Kubernetes && !h.Terminates():
		r.warn(t+"kubernetes", "not used: no connection is terminated without clientca, "+
			"and a connection that is passed through names its node")
	case h.TLS == TLSAuto && h.ClientCA == "" && h.Cert != "":
		r.warn(t+"clientca", "missing, so cert is not used: "+
			"connections whose SNI is a node's name are passed through, "+
			"all others are closed (kubectl exec without --kubelet-certificate-authority among them)")
	}
	// A terminated connection needs a server certificate.
	if (h.TLS == TLSTerminate || h.Terminates()) && h.Cert == "" && h.Key == "" {
		what := "clientca"
		if h.TLS == TLSTerminate {
			what = `tls = "terminate"`
		}
		r.add(t+"cert", "%s needs a certificate to terminate connections with: write cert and key", what)
	}
	// The cloud knows callers by the names in their client certificates, and needs a CA to verify these certificates.
	if h.TLS == TLSAuto && h.ClientCA == "" {
		for key, n := range map[string]int{"clientnames": len(h.ClientNames), "callers": len(h.Callers)} {
			if n > 0 {
				r.warn(t+key, "not used without clientca: no connection is terminated, so no caller is known by name")
			}
		}
	}
	// The cloud itself connects to a kubelet only for terminated connections.
	if !h.Terminates() && h.TLS != TLSTerminate && h.Kubelet != (Kubelet{}) {
		r.warn(kubeletTable[:len(kubeletTable)-1], "not used: no connection is terminated without clientca")
	}
}

// check reports problems of [mode.cloud.https.kubelet].
func (k Kubelet) check(r *report) {
	const t = kubeletTable
	r.pair(t, k.Cert, k.Key)
	r.file(t+"ca", k.CA)
	switch {
	case k.Cert == "" && k.Key == "" && (k.CA != "" || k.Insecure):
		r.add(t+"cert", "missing: write the client certificate that kubelets accept, and its key")
	case k.CA != "" && k.Insecure:
		r.add(t+"insecure", "the kubelet's certificate is either verified with ca or not at all: remove one of them")
	// Kubelets sign their own certificates by default, which no CA can verify. The operator must say explicitly that
	// the cloud does not verify them.
	case k.Cert != "" && k.CA == "" && !k.Insecure:
		r.add(t+"ca", "missing: write the CA that signs the kubelets' certificates, "+
			"or insecure = true if they sign their own")
	}
}

// configured reports whether any key besides addr is set.
func (h HTTPS) configured() bool {
	return len(h.ClientNames)+len(h.Callers) > 0 || h.Kubernetes != nil || h.Cert != "" || h.ClientCA != "" ||
		h.TLS != TLSAuto || h.Listen != "" || len(h.AllowFrom)+len(h.ProxyFrom) > 0 || h.Kubelet != (Kubelet{})
}

// check reports an invalid address, an invalid target, and a port that is open to other machines without
// an allow line. It also reports proxyfrom on a loopback port without an allow line.
func (l TCPListener) check(f forwarding, r *report) {
	key := f.key(l.Listen)
	host, _, ok := splitListen(l.Listen)
	if !ok {
		r.add(key, "the key is not an address to listen on: "+
			"write \"host:port\" with a port from 1 to 65535, such as %q", f.example)
		return
	}
	r.target(key, l.Target)
	// The tcp and udp front doors do not authenticate callers. So a port that is open to other machines needs
	// an explicit list of networks.
	if len(l.Allow) == 0 && !isLoopback(host) {
		r.add(key, "it is not on loopback, and nobody is allowed to %s: "+
			"add %q = [\"10.0.0.0/8\"] (who may %s) to [mode.cloud.%sallow]", f.verb, l.Listen, f.verb, f.table)
	}
	if len(l.Allow) == 0 && len(l.ProxyFrom) > 0 && isLoopback(host) {
		r.add(key, "callers behind a balancer are not on loopback, so nobody could connect: "+
			"add %q = [\"10.0.0.0/8\"] (who may connect) to [mode.cloud.tcpallow]", l.Listen)
	}
}

// listeners returns every TCP port that the cloud opens, in the order of cloud.toml: if two collide, ports
// reports the later one.
func (c *Cloud) listeners() []listener {
	ls := []listener{
		{key: serverTable + "grpcport", port: c.Server.GRPCPort},
		listenerOf(serverTable+"listen", c.Server.Listen),
		listenerOf(serverTable+"websocket", c.Server.WebSocket),
		{key: serverTable + "logport", port: c.Server.LogPort},
		listenerOf(serverTable+"channelzaddr", c.Server.ChannelzAddr),
		listenerOf(adminTable+"page", c.Page),
		familyListenerOf(dnsTable+"listen", c.DNS.Listen), // UDP and TCP, so it collides with TCP ports too
	}
	for _, text := range slices.Sorted(maps.Keys(c.HTTPS.Ports)) {
		port, _ := parsePort(text)
		ls = append(ls, listener{key: addrKey(text), host: cmp.Or(c.HTTPS.Listen, defaultHTTPSListen), port: port})
	}
	for _, l := range c.TCP {
		ls = append(ls, familyListenerOf(forwardTCP.key(l.Listen), l.Listen))
	}
	return append(ls, c.Egress.listeners()...)
}

// udpListeners returns every UDP port that the cloud opens.
func (c *Cloud) udpListeners() []listener {
	ls := []listener{listenerOf(dnsTable+"listen", c.DNS.Listen)}
	for _, l := range c.UDP {
		ls = append(ls, listenerOf(forwardUDP.key(l.Listen), l.Listen))
	}
	return ls
}
