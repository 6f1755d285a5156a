package conf

import (
	"path/filepath"
	"slices"
	"strings"

	"tunnel/pkg/tunnel"
)

// Egress is the front door for kube-apiserver's egress selector. Without listeners it is off.
type Egress struct {
	GRPC, HTTPConnect   []string        // unix:///path or tls://host:port
	Cert, Key, ClientCA string          // files, for tls://
	ClientNames         []string        // common names of callers over tls://, which needs some
	Strategies          []string        // empty is all of them
	DefaultNodes        tunnel.Selector // whom the strategy default takes; empty is any node
	Kubernetes          bool            // what nodes reach stands in their Node objects; else edges say it
	KonnectivityMetrics bool            // under the names of its server, too
	AgentPort           int             // where stock konnectivity agents join, on all interfaces; 0 is off
}

const egressTable = "mode.cloud.egress."

func newEgress(t *egressKeys, r *report) Egress {
	path := r.src.path
	if t.ClientNames != nil && (len(t.ClientNames) == 0 || slices.Contains(t.ClientNames, "")) {
		r.add(egressTable+"clientnames", "the list is empty or holds an empty name: write the common names of the callers' certificates, such as [\"kube-apiserver\"]")
	}
	e := Egress{
		GRPC: t.GRPC, HTTPConnect: t.HTTPConnect, Cert: path(t.Cert), Key: path(t.Key), ClientCA: path(t.ClientCA),
		ClientNames: t.ClientNames, Strategies: t.Strategies, Kubernetes: t.Kubernetes, KonnectivityMetrics: t.OldMetrics, AgentPort: t.AgentPort,
	}
	if t.DefaultNodes != nil {
		e.DefaultNodes = r.selector(egressTable+"defaultnodes", t.DefaultNodes)
	}
	return e
}

// selector reads a list of nodes. An empty list does not mean every node, as an empty Selector
// does.
func (r *report) selector(key string, names []string) tunnel.Selector {
	if len(names) == 0 {
		r.add(key, `the list is empty: name nodes, or remove "default" from strategies`)
		return nil
	}
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

// Configured reports whether there is a listener.
func (e Egress) Configured() bool { return len(e.GRPC)+len(e.HTTPConnect) > 0 }

// AsksKubernetes reports whether Node objects say what nodes reach, and somebody dials by that.
func (e Egress) AsksKubernetes() bool { return e.Configured() && e.Kubernetes }

// UsesTLS reports whether one of them is for TLS.
func (e Egress) UsesTLS() bool {
	return slices.ContainsFunc(slices.Concat(e.GRPC, e.HTTPConnect), func(u string) bool { return strings.HasPrefix(u, schemeTLS) })
}

const (
	schemeTLS  = "tls://"
	schemeUnix = "unix://"
	// longestSocket is how long the path of a unix socket may be (sun_path in unix(7)).
	longestSocket = 107
)

func (e Egress) check(r *report) {
	const t = egressTable
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
	check(t+"grpc", e.GRPC)
	check(t+"httpconnect", e.HTTPConnect)
	for i, s := range e.Strategies {
		if slices.Contains(e.Strategies[:i], s) {
			r.add(t+"strategies", "%q is there twice: each is asked once, in the order in which they stand", s)
			continue
		}
		if !slices.Contains([]string{"destHost", "cidr", "defaultRoute", "default"}, s) {
			r.add(t+"strategies", "%q is not known: write some of \"destHost\", \"cidr\", \"defaultRoute\", \"default\"", s)
		}
	}
	if len(e.DefaultNodes) > 0 && len(e.Strategies) > 0 && !slices.Contains(e.Strategies, "default") {
		r.warn(t+"defaultnodes", "not used: strategies has no \"default\"")
	}
	if e.Configured() && !e.Kubernetes {
		r.warn(t+"kubernetes", "missing: what edges say they reach is believed, and one that lies attracts what is meant for others; write kubernetes = true where nodes have Node objects")
	}
	if e.AgentPort != 0 {
		r.port(t+"agentport", e.AgentPort)
	}
	r.pair(t, e.Cert, e.Key)
	r.file(t+"clientca", e.ClientCA)
	switch {
	case e.UsesTLS():
		r.required(t+"cert", e.Cert, "tls:// needs a certificate: write cert and key")
		r.required(t+"clientca", e.ClientCA, "anybody who reaches tls:// could reach every node: write the CA that signs the callers' certificates")
		if e.ClientNames == nil {
			r.add(t+"clientnames", "missing: whoever has a client certificate of clientca could reach every node: write the common names of the callers' certificates, such as [\"kube-apiserver\"]")
		}
	case e.Configured() && (e.Cert != "" || e.ClientCA != "" || len(e.ClientNames) > 0):
		r.warn(t+"cert", "not used: cert, key, clientca and clientnames are for tls://, and callers of a unix socket are known by its permissions")
	case !e.Configured() && (len(e.Strategies)+len(e.ClientNames)+len(e.DefaultNodes) > 0 || e.Kubernetes || e.KonnectivityMetrics || e.Cert != "" || e.ClientCA != ""):
		what := "off"
		if e.AgentPort != 0 {
			what = "agentport alone: what else stands here is for callers"
		}
		r.warn(t[:len(t)-1], `%s: write grpc = ["unix:///run/tunnel/egress-grpc.sock"], or httpconnect`, what)
	}
}

// listener reports a URL that nobody could listen on.
func (r *report) listener(key, u string) {
	switch path, unix := strings.CutPrefix(u, schemeUnix); {
	case unix && !filepath.IsAbs(path):
		r.add(key, "%q has no absolute path: write one such as \"unix:///run/tunnel/egress.sock\"", u)
	case unix && len(path) > longestSocket:
		r.add(key, "%q is too long for a socket: %d bytes are allowed", path, longestSocket)
	case unix:
	case !strings.HasPrefix(u, schemeTLS):
		r.add(key, "%q is neither unix:///PATH nor tls://HOST:PORT: write one of them", u)
	default:
		if _, _, ok := splitListen(u[len(schemeTLS):]); !ok {
			r.add(key, "%q has no address to listen on: write one such as \"tls://0.0.0.0:8090\"", u)
		}
	}
}

// listeners lists the ports.
func (e Egress) listeners() []listener {
	ls := []listener{{egressTable + "agentport", "", e.AgentPort}}
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
