package conf

import (
	"cmp"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/BurntSushi/toml"

	"tunnel/pkg/auth"
	"tunnel/pkg/tunnel"
)

// Cloud is the configuration of a replica, [mode.cloud].
type Cloud struct {
	Warnings []string // what is accepted but should not stay so

	Server      Server        // where edges dial, [mode.cloud.stream.server]
	DNS         DNS           // [mode.cloud.stream.dns]
	Peers       Peers         // [mode.cloud.stream.peers]
	Join        Join          // [mode.cloud.join]
	HTTPS       HTTPS         // [mode.cloud.https]
	TCP         []TCPListener // [mode.cloud.tcp] and [mode.cloud.tcpallow], in the order of Listen
	Limits      Limits        // [mode.cloud.limits]
	Egress      Egress        // [mode.cloud.egress]
	AdminSocket string        // [mode.cloud.admin] socket; "" is off

	src *source
}

// Server is the gRPC server.
type Server struct {
	GRPCPort     int    // on all interfaces
	Cert, Key    string // files
	TokenFile    string
	AllowShared  bool   // the token file's default: line counts
	LogPort      int    // /healthz /readyz /metrics on all interfaces; 0 is off
	ChannelzAddr string // on loopback; "" is off
}

// TLSMode says what becomes of a connection to an HTTPS port.
type TLSMode int

// The modes. Auto passes a connection through when its SNI is a node's name, and
// terminates the others if there is a ClientCA.
const (
	TLSAuto TLSMode = iota
	TLSPassthrough
	TLSTerminate
)

// String returns the mode as the file spells it.
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

// HTTPS is the front door that looks like a kubelet. Without Ports it is off.
type HTTPS struct {
	Ports     map[string]string // port here → host:port as the edge sees it
	Listen    string            // IP address to listen on; "" is 0.0.0.0
	TLS       TLSMode
	AllowFrom auth.Sources // who may connect; empty is anyone

	// For connections that are terminated.
	Cert, Key   string   // files
	ClientCA    string   // file
	ClientNames []string // common names of callers; empty is kube-apiserver-kubelet-client
	Callers     []Caller // callers that may do some things only
	Kubernetes  *bool    // Kubernetes is asked which node has a pod; nil: if something else here needs Kubernetes
	Kubelet     Kubelet
}

// Caller is a caller that may not do everything.
type Caller struct {
	Name string // common name
	May  []auth.Class
}

// Kubelet is how the cloud presents itself to a kubelet on behalf of a caller. With
// no Cert that is left to the edge ([Edge] HTTPS).
type Kubelet struct {
	Cert, Key string // files
	CA        string // file
	Insecure  bool   // do not verify the kubelet's certificate
}

// The defaults are the front door's own; here they are only spoken of.
const (
	defaultClientName  = "kube-apiserver-kubelet-client"
	defaultHTTPSListen = "0.0.0.0"
)

// Terminates reports whether any connection is terminated here.
func (h HTTPS) Terminates() bool { return h.TLS != TLSPassthrough && h.ClientCA != "" }

// MayAskKubernetes reports whether Kubernetes is asked for the node of a pod, if something here
// needs Kubernetes.
func (h HTTPS) MayAskKubernetes() bool {
	return len(h.Ports) > 0 && h.Terminates() && (h.Kubernetes == nil || *h.Kubernetes)
}

// AsksKubernetes reports whether Kubernetes is needed to find the node of a pod.
func (h HTTPS) AsksKubernetes() bool { return h.MayAskKubernetes() && h.Kubernetes != nil }

// TCPListener is one line of [mode.cloud.tcp].
type TCPListener struct {
	Listen string
	Node   tunnel.NodeName // "" is any connected node of Among
	Among  tunnel.Selector // empty is all
	Target string          // host:port as the edge sees it
	Allow  auth.Sources    // who may connect; empty, on loopback only, is anyone
}

// The tables, as problems name them.
const (
	serverTable  = "mode.cloud.stream.server."
	dnsTable     = "mode.cloud.stream.dns."
	httpsTable   = "mode.cloud.https."
	kubeletTable = "mode.cloud.https.kubelet."
)

func addrKey(port string) string    { return httpsTable + toml.Key{"addr", port}.String() }
func tcpKey(listen string) string   { return toml.Key{"mode", "cloud", "tcp", listen}.String() }
func allowKey(listen string) string { return toml.Key{"mode", "cloud", "tcpallow", listen}.String() }

// newCloud reads what the values mean. What a value alone cannot tell is left to check.
func newCloud(t *cloudTable, env Env, r *report) *Cloud {
	s, peers, h := t.Stream.Server, t.Stream.Peers, t.HTTPS
	path := r.src.path
	return &Cloud{
		Server: Server{
			GRPCPort: s.GRPCPort,
			Cert:     path(s.Cert), Key: path(s.Key), TokenFile: path(s.TokenFile),
			AllowShared:  s.AllowShared,
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
			Cert:      path(h.Cert), Key: path(h.Key),
			ClientCA:    path(h.ClientCA),
			ClientNames: r.clientNames(h.ClientNames),
			Callers:     r.callers(h.Callers, h.ClientNames),
			Kubernetes:  h.Kubernetes,
			Kubelet:     Kubelet{Cert: path(h.Kubelet.Cert), Key: path(h.Kubelet.Key), CA: path(h.Kubelet.CA), Insecure: h.Kubelet.Insecure},
		},
		TCP:         r.tcpListeners(t.TCP, t.TCPAllow),
		Limits:      newLimits(&t.Limits, r),
		Egress:      newEgress(&t.Egress, r),
		AdminSocket: path(t.Admin.Socket),
		src:         r.src,
	}
}

// path resolves a relative path of the file.
func (s *source) path(p string) string {
	if p == "" || filepath.IsAbs(p) {
		return p
	}
	return filepath.Join(filepath.Dir(s.file), p)
}

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

// clientNames refuses a list without a name: whether it means the default, anyone or
// nobody is not for us to guess.
func (r *report) clientNames(names []string) []string {
	if names != nil && (len(names) == 0 || slices.Contains(names, "")) {
		r.add(httpsTable+"clientnames", "the list is empty or holds an empty name: name who may call, or remove it for the default, [%q]", defaultClientName)
	}
	return names
}

// callers reads the list of callers that may do some things only.
func (r *report) callers(lines []callerKeys, names []string) []Caller {
	const key = httpsTable + "callers"
	if len(names) == 0 {
		names = []string{defaultClientName}
	}
	var all []Caller
	for _, l := range lines {
		switch {
		case l.Name == "":
			r.add(key, `a caller has no name: write {name = "metrics-server", may = ["metrics"]}, with the common name of its certificate`)
			continue
		case slices.Contains(names, l.Name):
			r.add(key, "%q is in clientnames, and may do everything: remove it here or there (clientnames is [%q] where it is not written)", l.Name, defaultClientName)
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

// sources reads a list of networks.
func (r *report) sources(key string, list []string) auth.Sources {
	if list != nil && len(list) == 0 {
		r.add(key, "the list is empty, and nobody could connect: write networks such as \"10.0.0.0/8\", or remove it")
	}
	var all auth.Sources
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

// tcpListeners reads [mode.cloud.tcp] and [mode.cloud.tcpallow].
func (r *report) tcpListeners(lines map[string]string, allow map[string][]string) []TCPListener {
	var ls []TCPListener
	for _, listen := range slices.Sorted(maps.Keys(lines)) {
		l := TCPListener{Listen: listen, Target: lines[listen]}
		if node, target, named := strings.Cut(l.Target, "/"); named {
			l.Target = target
			var name tunnel.NodeName
			var err error
			if strings.ContainsAny(node, ",*") {
				l.Among, err = tunnel.ParseSelector(node)
			} else {
				name, err = tunnel.ParseNodeName(node)
			}
			if err != nil {
				r.add(tcpKey(listen), "%v: write \"node/host:port\", or \"host:port\" for any node", err)
				r.mute(tcpKey(listen))
			}
			l.Node = name
		}
		if list, ok := allow[listen]; ok {
			l.Allow = r.sources(allowKey(listen), list)
			if len(l.Allow) == 0 {
				r.mute(tcpKey(listen)) // the line is there; what is wrong with it has been said
			}
		}
		ls = append(ls, l)
	}
	for _, listen := range slices.Sorted(maps.Keys(allow)) {
		if _, ok := lines[listen]; ok || r.muted[tcpKey(listen)] {
			continue
		}
		if near, ok := nearest(listen, slices.Sorted(maps.Keys(lines))); ok {
			r.add(allowKey(listen), "[mode.cloud.tcp] has no such listener: did you mean %q?", near)
			continue
		}
		r.add(allowKey(listen), "[mode.cloud.tcp] has no such listener: add it there, or remove this line")
	}
	return ls
}

// Validate reports everything that is wrong, as [Problems]. It changes nothing, but
// it opens the files that are named.
func (c *Cloud) Validate() error {
	r := newReport(c.src)
	c.check(r)
	return r.err()
}

func (c *Cloud) check(r *report) {
	c.Server.check(r)
	c.DNS.check(r)
	c.Peers.check(r)
	c.Join.check(r)
	c.HTTPS.check(r)
	for _, l := range c.TCP {
		l.check(r)
	}
	c.Egress.check(r)
	r.ports(c.listeners())
}

func (s Server) check(r *report) {
	const t = serverTable
	if s.GRPCPort == 0 {
		r.add(t+"grpcport", "missing: write the port that edges dial, such as grpcport = 9000")
	} else {
		r.port(t+"grpcport", s.GRPCPort)
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
}

func (s Server) checkTokenFile(r *report) {
	const k = serverTable + "tokenfile"
	r.required(k, s.TokenFile, `without tokens nobody can join: write tokenfile = "tokens", a file with a line node:token for each edge`)
	r.file(k, s.TokenFile)
}

func (h HTTPS) check(r *report) {
	const t = httpsTable
	for _, port := range slices.Sorted(maps.Keys(h.Ports)) {
		if _, ok := parsePort(port); !ok {
			r.add(addrKey(port), "the key is not a port from 1 to 65535: write \"10250\" = \"127.0.0.1:10250\"")
		}
		r.target(addrKey(port), h.Ports[port])
	}
	if _, err := netip.ParseAddr(h.Listen); err != nil && h.Listen != "" {
		r.add(t+"listen", "%q is not an IP address: write one without a port, such as \"127.0.0.1\"; the ports are in [mode.cloud.https.addr]", h.Listen)
	}
	r.pair(t, h.Cert, h.Key)
	r.file(t+"clientca", h.ClientCA)
	if h.TLS < TLSAuto || h.TLS > TLSTerminate {
		r.add(t+"tls", "there is no %v", h.TLS)
	}
	h.checkTLS(r)
	h.Kubelet.check(r)
	if h.configured() && len(h.Ports) == 0 {
		r.warn(t+"addr", `no port is opened, so [mode.cloud.https] is off: write "10250" = "127.0.0.1:10250" in [mode.cloud.https.addr]`)
	}
}

// checkTLS finds combinations that would not do what the file seems to ask for.
func (h HTTPS) checkTLS(r *report) {
	const t = httpsTable
	switch {
	case h.TLS == TLSTerminate && h.ClientCA == "":
		r.add(t+"clientca", `tls = "terminate" needs it, or anybody could call the kubelets: write the CA that signs the callers' certificates`)
	case h.TLS == TLSPassthrough && (h.ClientCA != "" || len(h.ClientNames)+len(h.Callers) > 0):
		r.warn(t+"tls", `with "passthrough" callers are verified by the kubelet alone: clientca, clientnames and callers do not count`)
	case h.Kubernetes != nil && *h.Kubernetes && !h.Terminates():
		r.warn(t+"kubernetes", "not used: no connection is terminated without clientca, and a connection that is passed through names its node")
	case h.TLS == TLSAuto && h.ClientCA == "" && h.Cert != "":
		r.warn(t+"clientca", "missing, so cert is not used: connections whose SNI is a node's name are passed through, all others are closed (kubectl exec without --kubelet-certificate-authority among them)")
	}
	if (h.TLS == TLSTerminate || h.Terminates()) && h.Cert == "" && h.Key == "" {
		what := "clientca"
		if h.TLS == TLSTerminate {
			what = `tls = "terminate"`
		}
		r.add(t+"cert", "%s needs a certificate to terminate connections with: write cert and key", what)
	}
	if h.TLS == TLSAuto && h.ClientCA == "" {
		for key, n := range map[string]int{"clientnames": len(h.ClientNames), "callers": len(h.Callers)} {
			if n > 0 {
				r.warn(t+key, "not used without clientca: no connection is terminated, so no caller is known by name")
			}
		}
	}
	if !h.Terminates() && h.TLS != TLSTerminate && h.Kubelet != (Kubelet{}) {
		r.warn(kubeletTable[:len(kubeletTable)-1], "not used: no connection is terminated without clientca")
	}
}

func (k Kubelet) check(r *report) {
	const t = kubeletTable
	r.pair(t, k.Cert, k.Key)
	r.file(t+"ca", k.CA)
	switch {
	case k.Cert == "" && k.Key == "" && (k.CA != "" || k.Insecure):
		r.add(t+"cert", "missing: write the client certificate that kubelets accept, and its key")
	case k.CA != "" && k.Insecure:
		r.add(t+"insecure", "the kubelet's certificate is either verified with ca or not at all: remove one of them")
	case k.Cert != "" && k.CA == "" && !k.Insecure:
		r.add(t+"ca", "missing: write the CA that signs the kubelets' certificates, or insecure = true if they sign their own")
	}
}

// configured reports whether anything beside the ports is set.
func (h HTTPS) configured() bool {
	return len(h.ClientNames)+len(h.Callers) > 0 || h.Kubernetes != nil || h.Cert != "" || h.ClientCA != "" || h.TLS != TLSAuto || h.Listen != "" || len(h.AllowFrom) > 0 || h.Kubelet != (Kubelet{})
}

func (l TCPListener) check(r *report) {
	key := tcpKey(l.Listen)
	host, _, ok := splitListen(l.Listen)
	if !ok {
		r.add(key, "the key is not an address to listen on: write \"host:port\" with a port from 1 to 65535, such as \"127.0.0.1:6443\"")
		return
	}
	r.target(key, l.Target)
	if len(l.Allow) == 0 && !isLoopback(host) {
		r.add(key, "it is not on loopback, and nobody is allowed to connect: add %q = [\"10.0.0.0/8\"] (who may connect) to [mode.cloud.tcpallow]", l.Listen)
	}
}

// listeners lists everything that is opened, in the order of the documentation.
func (c *Cloud) listeners() []listener {
	ls := []listener{
		{serverTable + "grpcport", "", c.Server.GRPCPort},
		{serverTable + "logport", "", c.Server.LogPort},
		listenerOf(serverTable+"channelzaddr", c.Server.ChannelzAddr),
		listenerOf(dnsTable+"listen", c.DNS.Listen), // UDP and TCP
	}
	for _, text := range slices.Sorted(maps.Keys(c.HTTPS.Ports)) {
		port, _ := parsePort(text)
		ls = append(ls, listener{addrKey(text), cmp.Or(c.HTTPS.Listen, defaultHTTPSListen), port})
	}
	for _, l := range c.TCP {
		ls = append(ls, listenerOf(tcpKey(l.Listen), l.Listen))
	}
	return append(ls, c.Egress.listeners()...)
}
