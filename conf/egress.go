package conf

import (
	"path/filepath"
	"slices"
	"strings"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/tunnel"
)

// Egress configures the front door for kube-apiserver's egress selector, [mode.cloud.egress]. Without
// GRPC, HTTPConnect and Mirror it is off.
type Egress struct {
	// GRPC and HTTPConnect list where the front door listens for each of the two protocols. Listeners of
	// HTTPConnect also accept SOCKS5. An entry is unix:///path or tls://host:port.
	GRPC, HTTPConnect []string

	// Listeners on tls:// need these four.
	Cert, Key, ClientCA string   // files: our certificate and key, and the CAs of callers' certificates
	ClientNames         []string // common names of callers' certificates

	Strategies   []string        // how to find the node for an address, in this order; empty: all strategies
	DefaultNodes tunnel.Selector // the nodes from which strategy "default" chooses; empty: all
	// Kubernetes is true if the Node objects say what each node reaches. If false, the edges themselves say it.
	Kubernetes          bool
	KonnectivityMetrics bool // export metrics under Konnectivity's names as well
	AgentPort           int  // port for stock konnectivity agents, on all interfaces; 0: off

	ProxyFrom auth.Sources // balancers that send a PROXY header to tls:// listeners and AgentPort; empty: none

	Mirror bool // the front door also has the callers of [mode.cloud.services.mirror]
}

const egressTable = "mode.cloud.egress."

// newEgress makes an Egress from the keys. It reports values that are wrong by themselves.
func newEgress(t *egressKeys, r *report) Egress {
	path := r.src.path
	if t.ClientNames != nil && (len(t.ClientNames) == 0 || slices.Contains(t.ClientNames, "")) {
		r.add(egressTable+"clientnames", "the list is empty or holds an empty name: "+
			"write the common names of the callers' certificates, such as [\"kube-apiserver\"]")
	}
	e := Egress{
		GRPC: t.GRPC, HTTPConnect: t.HTTPConnect, Cert: path(t.Cert), Key: path(t.Key), ClientCA: path(t.ClientCA),
		ClientNames: t.ClientNames, Strategies: t.Strategies, Kubernetes: t.Kubernetes,
		KonnectivityMetrics: t.OldMetrics, AgentPort: t.AgentPort,
		ProxyFrom: r.balancers(egressTable+"proxyfrom", t.ProxyFrom),
	}
	// A missing key means all nodes. An empty list is reported by selector.
	if t.DefaultNodes != nil {
		e.DefaultNodes = r.selector(egressTable+"defaultnodes", t.DefaultNodes)
	}
	return e
}

// selector parses a list of nodes. It reports an empty list: an empty Selector would mean every node.
func (r *report) selector(key string, names []string) tunnel.Selector {
	if len(names) == 0 {
		r.add(key, `the list is empty: name nodes, or remove "default" from strategies`)
		return nil
	}
	// ParseSelector splits at commas, so one entry with a comma would become two names.
	if i := slices.IndexFunc(names, func(n string) bool { return strings.Contains(n, ",") }); i >= 0 {
		r.add(key, "%q holds a comma: put each name into quotes of its own", names[i])
		return nil
	}
	s, err := tunnel.ParseSelector(strings.Join(names, ","))
	if err != nil {
		r.add(key, "%v", err)
	}
	return s
}

// Listens reports whether there is a listener.
func (e Egress) Listens() bool { return len(e.GRPC)+len(e.HTTPConnect) > 0 }

// Configured reports whether the front door can have callers, by a listener or by [mode.cloud.services.mirror].
func (e Egress) Configured() bool { return e.Listens() || e.Mirror }

// AsksKubernetes reports whether the front door is on and reads from Node objects what nodes reach.
func (e Egress) AsksKubernetes() bool { return e.Configured() && e.Kubernetes }

// UsesTLS reports whether a listener uses TLS.
func (e Egress) UsesTLS() bool {
	return slices.ContainsFunc(slices.Concat(e.GRPC, e.HTTPConnect), func(u string) bool {
		return strings.HasPrefix(u, schemeTLS)
	})
}

const (
	schemeTLS  = "tls://"  // host:port follows
	schemeUnix = "unix://" // an absolute path follows
	// maxSocketPath is the longest path of a unix socket, in bytes (sun_path in unix(7)).
	maxSocketPath = 107
)

// check reports all problems of the table.
func (e Egress) check(r *report) {
	const t = egressTable
	e.checkListeners(r)
	e.checkStrategies(r)
	// A warning, not an error: without Kubernetes there is no other source.
	if e.Listens() && !e.Kubernetes {
		r.warn(t+"kubernetes", "missing: what edges say they reach is believed, "+
			"and one that lies attracts what is meant for others; "+
			"write kubernetes = true where nodes have Node objects")
	}
	if e.AgentPort != 0 {
		r.port(t+"agentport", e.AgentPort)
	}
	if len(e.ProxyFrom) > 0 && !e.UsesTLS() && e.AgentPort == 0 {
		r.warn(t+"proxyfrom", "not used: it is for tls:// and agentport")
	}
	e.checkCallers(r)
}

// checkListeners reports each URL in grpc and httpconnect that is not valid, or that appears in them more than once.
func (e Egress) checkListeners(r *report) {
	// One set for both protocols: two listeners cannot share an address.
	seen := make(map[string]bool)
	check := func(key string, urls []string) {
		for _, u := range urls {
			r.listener(key, u)
			if seen[u] {
				r.add(key, "%q is there twice: each listener needs an address of its own", u)
			}
			seen[u] = true
		}
	}
	check(egressTable+"grpc", e.GRPC)
	check(egressTable+"httpconnect", e.HTTPConnect)
}

// checkStrategies reports each strategy that is unknown or listed twice. It also reports DefaultNodes without the
// strategy "default", because only that strategy uses DefaultNodes.
func (e Egress) checkStrategies(r *report) {
	const t = egressTable
	if e.Strategies != nil && len(e.Strategies) == 0 {
		r.add(t+"strategies", "the list is empty, and without an entry all strategies are used: name some, or remove it")
	}
	for i, s := range e.Strategies {
		if slices.Contains(e.Strategies[:i], s) {
			r.add(t+"strategies", "%q is there twice: each is asked once, in the order in which they stand", s)
			continue
		}
		if !slices.Contains([]string{"destHost", "cidr", "defaultRoute", "default"}, s) {
			r.add(t+"strategies",
				"%q is not known: write some of \"destHost\", \"cidr\", \"defaultRoute\", \"default\"", s)
		}
	}
	if len(e.DefaultNodes) > 0 && len(e.Strategies) > 0 && !slices.Contains(e.Strategies, "default") {
		r.warn(t+"defaultnodes", "not used: strategies has no \"default\"")
	}
}

// checkCallers reports problems of the keys that say who may call. Without these keys, tls:// would be
// open to all. Without tls://, these keys have no effect.
func (e Egress) checkCallers(r *report) {
	const t = egressTable
	r.pair(t, e.Cert, e.Key)
	r.file(t+"clientca", e.ClientCA)
	switch {
	// Every caller reaches every node, so tls:// needs a CA and a list of callers' names.
	case e.UsesTLS():
		r.required(t+"cert", e.Cert, "tls:// needs a certificate: write cert and key")
		r.required(t+"clientca", e.ClientCA, "anybody who reaches tls:// could reach every node: "+
			"write the CA that signs the callers' certificates")
		if e.ClientNames == nil {
			r.add(t+"clientnames", "missing: whoever has a client certificate of clientca could reach every node: "+
				"write the common names of the callers' certificates, such as [\"kube-apiserver\"]")
		}
	// Only unix sockets: the file system's permissions decide who may call.
	case e.Configured() && (e.Cert != "" || e.ClientCA != "" || len(e.ClientNames) > 0):
		r.warn(t+"cert", "not used: cert, key, clientca and clientnames are for tls://, "+
			"and callers of a unix socket are known by its permissions")
	// There are settings for a listener but no listener. agentport needs none of these settings.
	case !e.Configured() && (len(e.Strategies)+len(e.ClientNames)+len(e.DefaultNodes) > 0 ||
		e.Kubernetes || e.KonnectivityMetrics || e.Cert != "" || e.ClientCA != ""):
		what := "off"
		if e.AgentPort != 0 {
			what = "agentport alone: what else stands here is for callers"
		}
		r.warn(t[:len(t)-1], `%s: write grpc = ["unix:///run/tunnel/egress-grpc.sock"], or httpconnect`, what)
	}
}

// listener reports a URL that is not valid for a listener.
func (r *report) listener(key, u string) {
	switch path, unix := strings.CutPrefix(u, schemeUnix); {
	// A relative path would depend on the working directory of the process.
	case unix && !filepath.IsAbs(path):
		r.add(key, "%q has no absolute path: write one such as \"unix:///run/tunnel/egress.sock\"", u)
	case unix:
		r.socket(key, path)
	case !strings.HasPrefix(u, schemeTLS):
		r.add(key, "%q is neither unix:///PATH nor tls://HOST:PORT: write one of them", u)
	default:
		if _, _, ok := splitListen(u[len(schemeTLS):]); !ok {
			r.add(key, "%q has no address to listen on: write one such as \"tls://0.0.0.0:8090\"", u)
		}
	}
}

// socket reports a path that is too long for a unix socket. The folder may be missing yet: systemd makes that of
// RuntimeDirectory= when the daemon starts. "" is allowed.
func (r *report) socket(key, path string) {
	if len(path) > maxSocketPath {
		r.add(key, "%q is too long for a socket: %d bytes are allowed", path, maxSocketPath)
	}
}

// listeners returns the TCP ports that the table opens.
func (e Egress) listeners() []listener {
	// Listeners on unix sockets take no port.
	ls := []listener{{key: egressTable + "agentport", port: e.AgentPort}}
	add := func(key string, urls []string) {
		for _, u := range urls {
			if addr, ok := strings.CutPrefix(u, schemeTLS); ok {
				ls = append(ls, listenerOf(egressTable+key, addr))
			}
		}
	}
	add("grpc", e.GRPC)
	add("httpconnect", e.HTTPConnect)
	return ls
}
