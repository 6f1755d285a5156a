package conf

import (
	"net"
	"slices"
	"strings"

	"github.com/BurntSushi/toml"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/dial"
	"tunnel.example/tunnel/pkg/tunnel"
)

// Edge is the configuration of an edge, [mode.edge].
type Edge struct {
	// Warnings are for the log: settings that are accepted but should be changed.
	Warnings []string

	// [mode.edge]
	Node     tunnel.NodeName // the name of this node
	NodeFrom string          // the source of the name, for a log line
	Allow    []string        // entries for auth.ParsePolicy: what this edge may dial

	// [mode.edge.stream.client]: how to reach the cloud.
	Addr       string   // host:port of the cloud (servername in the file); "": Servers
	Servers    []string // in the form of dial.ParseServer, in the order in which the edge tries them; empty: Addr
	ServerName string   // the name to verify in the cloud's certificate (dns in the file)
	CA         string   // file with the CA that signs the cloud's certificate (cert in the file)

	// The proxy to the cloud: at most one of Proxy and ProxyFile. With neither, the environment decides.
	Proxy     auth.Secret // in the form of dial.ParseProxy; a Secret, since it may have a password; ProxyNone: no proxy
	ProxyFile string      // a file that holds only the URL of the proxy
	ProxyCA   string      // file with the CAs of https:// proxies and wss:// servers; "": the system's

	// The edge's proof is one of Token, TokenFile and NodeCert.
	Token     auth.Secret // the token itself
	TokenFile string      // a file that holds only the token
	// NodeCert is a file with this node's certificate. Without NodeKey the file also holds the key, and the
	// edge renews the certificate. With NodeKey another program renews both files.
	NodeCert string
	NodeKey  string // file; "": the key is in NodeCert
	// Updates is true if the edge accepts the CAs and addresses that its cloud tells with each new certificate. NearCA may
	// then be empty.
	Updates bool

	AllReplicas  bool   // open a session with every replica, not only with one
	Connections  int    // how many TCP connections a session may have, with its own connection; 0: the default
	Congestion   string // congestion control: "system", or the name of an algorithm; "": auto
	Multipath    bool   // use all uplinks at once: Multipath TCP
	LogPort      int    // port for /healthz /readyz /metrics on all interfaces; 0: off
	ChannelzAddr string // where channelz is served, on loopback; "": off

	HTTPS             EdgeHTTPS    // [mode.edge.https]
	Limits            EdgeLimits   // [mode.edge.limits]
	EgressIdentifiers string       // [mode.edge.egress] identifiers: the names and addresses that this edge reaches
	Konnectivity      Konnectivity // [mode.edge.konnectivity]
	CNI               CNI          // [mode.edge.cni]
	Services          EdgeServices // [mode.edge.services]
	AdminSocket       string       // [mode.edge.admin] socket, a path; "": off
	Collector         string       // [mode.edge.traces] endpoint, as Traces.Endpoint; "": off

	src *source // where the keys are in the file; nil: the Edge was not read from a file
}

// EdgeHTTPS is the client certificate for kubelets, if the edge holds it, as with SuperEdge. It is
// safer on the cloud: see [Kubelet].
type EdgeHTTPS struct {
	Cert, Key string // files; "": no certificate
}

// MaxConnections is the largest value of connections in [mode.edge.stream.client].
const MaxConnections = 64

// ProxyNone is the value of proxy in [mode.edge.stream.client] that forbids any proxy. proxyEnv is the default.
const (
	ProxyNone = "none"
	proxyEnv  = "env"
)

const (
	// Prefixes of keys, as problems name them.
	edgeTablePrefix = "mode.edge."
	clientTable     = "mode.edge.stream.client."
)

// newEdge makes an Edge from the tables. It reports values that are wrong by themselves; check reports
// the rest.
func newEdge(t *edgeTable, env Env, r *report) *Edge {
	c, k := t.Stream.Client, t.Konnectivity
	// Paths in the file are relative to the file.
	path := r.src.path
	r.src.settings = settingsOf(toml.Key{"mode", "edge"}, *t)
	e := &Edge{
		Allow:        t.Allow,
		Addr:         c.ServerName,
		Servers:      c.Servers,
		Proxy:        auth.Secret(c.Proxy),
		ProxyFile:    path(c.ProxyFile),
		ProxyCA:      path(c.ProxyCA),
		ServerName:   c.DNS,
		CA:           path(c.Cert),
		Token:        auth.Secret(c.Token),
		TokenFile:    path(c.TokenFile),
		NodeCert:     path(c.NodeCert),
		NodeKey:      path(c.NodeKey),
		Updates:      c.Updates,
		Congestion:   r.congestion(clientTable+"congestion", c.Congestion),
		Multipath:    c.Multipath,
		LogPort:      c.LogPort,
		ChannelzAddr: r.channelz(clientTable+"channelzaddr", c.ChannelzAddr),

		HTTPS:             EdgeHTTPS{Cert: path(t.HTTPS.Cert), Key: path(t.HTTPS.Key)},
		Limits:            newEdgeLimits(&t.Limits, r),
		EgressIdentifiers: t.Egress.Identifiers,
		Konnectivity: Konnectivity{
			Servers: k.Servers, CA: path(k.CA), Cert: path(k.Cert), Key: path(k.Key), TokenFile: path(k.TokenFile),
		},
		CNI:         newCNI(t.CNI, r),
		Services:    newEdgeServices(t.Services, r),
		AdminSocket: path(t.Admin.Socket),
		Collector:   r.collector(edgeTablePrefix+"traces.", t.Traces.Endpoint),
		src:         r.src,
	}
	if n := c.Connections; n < 0 || n > MaxConnections {
		r.add(clientTable+"connections",
			"%d is not from 1 to %d: write a number between them, or remove it for the default", n, MaxConnections)
	} else {
		e.Connections = n
	}
	if c.Proxy == proxyEnv {
		e.Proxy = ""
	}
	if c.Servers != nil && len(c.Servers) == 0 {
		r.add(clientTable+"servers", "the list is empty: write the addresses of the cloud, or remove it")
	}
	e.Node, e.NodeFrom = r.node(t.Node, env)
	switch c.Sessions {
	case "", "one":
	case "all":
		e.AllReplicas = true
	default:
		r.add(clientTable+"sessions", "%q is neither \"one\" nor \"all\": write one of them", c.Sessions)
	}
	return e
}

// node returns the name of this node, and its source. The file comes first, then NODE_NAME, then the
// host name in lower case.
func (r *report) node(own string, env Env) (tunnel.NodeName, string) {
	const k = edgeTablePrefix + "node"
	// Kernel host names may have upper case; names of Kubernetes nodes have none.
	name, from := strings.ToLower(env.HostName), "the host name"
	switch {
	case own != "":
		name, from = own, "node in [mode.edge]"
	case env.NodeName != "":
		name, from = env.NodeName, "NODE_NAME"
	}
	// The key has the wrong type, and this is reported. So do not use another source of the name.
	if r.muted[k] {
		return "", from
	}
	if name == "" {
		r.add(k, "missing, and neither NODE_NAME nor the host name is set: "+
			"write node = \"edge1\", the node's name in Kubernetes")
		r.mute(k)
		return "", from
	}
	n, err := tunnel.ParseNodeName(name)
	switch {
	case err != nil && own != "":
		r.add(k, "%v", err)
		r.mute(k)
	case err != nil:
		r.add(k, "%v (it comes from %s): write node = \"edge1\", the node's name in Kubernetes", err, from)
		r.mute(k)
	}
	return n, from
}

// Validate returns all problems, as [Problems]. It changes nothing, but it opens the configured files.
func (e *Edge) Validate() error {
	r := newReport(e.src)
	e.check(r)
	return r.err()
}

// check reports all problems that can be found without the tables of the file.
func (e *Edge) check(r *report) {
	const t = clientTable
	if n, err := tunnel.ParseNodeName(string(e.Node)); err != nil {
		r.add(edgeTablePrefix+"node", "%v", err)
	} else if err = n.MayJoin(); err != nil {
		r.add(edgeTablePrefix+"node", "%v", err)
	}
	if e.Allow != nil && len(e.Allow) == 0 {
		r.add(edgeTablePrefix+"allow", "the list is empty, and without an entry the edge dials its own machine at "+
			"every port: name what it may dial, or remove it")
	}
	// One entry at a time, so that all bad entries are reported.
	for _, entry := range e.Allow {
		if _, err := auth.ParsePolicy([]string{entry}); err != nil {
			r.add(edgeTablePrefix+"allow", "%v", err)
		}
	}
	r.socket(edgeTablePrefix+"admin.socket", e.AdminSocket)
	e.checkClient(r)
	if e.LogPort != 0 {
		r.port(t+"logport", e.LogPort)
	}
	r.loopback(t+"channelzaddr", e.ChannelzAddr)

	r.pair(edgeTablePrefix+"https.", e.HTTPS.Cert, e.HTTPS.Key)
	if e.HTTPS.Cert != "" {
		r.warn(edgeTablePrefix+"https.cert", "a key that every kubelet obeys lies on this edge: "+
			"keep it on the cloud, in [mode.cloud.https.kubelet], if you can")
	}
	e.Konnectivity.check(r)
	e.checkNear(r)
	listeners := []listener{{key: t + "logport", port: e.LogPort}, listenerOf(t+"channelzaddr", e.ChannelzAddr)}
	if e.Services.Near.IsValid() {
		listeners = append(listeners, listenerOf(edgeTablePrefix+"services.near", e.Services.Near.String()))
	}
	r.ports(listeners)
}

// checkNear checks the keys near and nearca, by which edges of one site reach each other without the cloud.
func (e *Edge) checkNear(r *report) {
	const t = edgeTablePrefix + "services."
	if !e.Services.Near.IsValid() {
		return
	}
	if !e.Updates {
		r.required(t+"nearca", e.Services.NearCA, "write updates = true into [mode.edge.stream.client], so that the cloud "+
			"tells the CA of the nodes' certificates, or name a copy of ca of [mode.cloud.join], such as "+
			"nearca = \"nodes-ca.crt\"")
	}
	r.file(t+"nearca", e.Services.NearCA)
	if e.NodeCert == "" {
		r.add(t+"near", "edges prove to each other which nodes they are by nodecert of [mode.edge.stream.client]: "+
			"tunnel join gets a certificate, or remove near and nearca")
	}
}

// checkClient checks the settings for joining a cloud.
func (e *Edge) checkClient(r *report) {
	const t = clientTable
	switch {
	case e.Addr != "" && len(e.Servers) > 0:
		r.add(t+"servers", "there is servername as well: remove one of them, "+
			"with its address in the list if the edge may use it")
	case e.Addr == "" && len(e.Servers) == 0:
		r.add(t+"servername", "missing: write the address of the cloud to dial, "+
			"such as servername = \"tunnel.example.com:9000\"")
	case e.Addr != "":
		r.address(t+"servername", e.Addr, "tunnel.example.com:9000")
	}
	e.checkWay(r)
	switch {
	case e.ServerName == "":
		r.add(t+"dns", "missing: write the name that the cloud's certificate is made out to, "+
			"such as dns = \"tunnel.cloud.io\"")
	case !IsHost(e.ServerName):
		r.add(t+"dns", "%q is neither a name nor an address: "+
			"write the one that the cloud's certificate is made out to, without a port", e.ServerName)
	}
	r.required(t+"cert", e.CA, `write the CA that signed the cloud's certificate, such as cert = "ca.crt"`)
	r.file(t+"cert", e.CA)
	switch {
	// The edge must have exactly one proof.
	case e.Token != "" && e.TokenFile != "":
		r.add(t+"tokenfile", "there is a token as well: remove one of them")
	case e.NodeCert != "" && (e.Token != "" || e.TokenFile != ""):
		r.add(t+"nodecert", "there is a token as well: remove one of them")
	case e.Token == "" && e.TokenFile == "" && e.NodeCert == "":
		r.add(t+"tokenfile", "missing: run tunnel join, which writes all of this; "+
			"or write tokenfile, a file that holds this node's token alone, or token, or nodecert")
	}
	if e.NodeKey != "" && e.NodeCert == "" {
		r.add(t+"nodecert", "missing: nodekey is useless without its certificate, write nodecert or remove nodekey")
	}
	if e.Updates && !e.Renews() {
		r.add(t+"updates", "the cloud tells them when the edge renews its certificate, and this edge renews none: "+
			"remove it, or join with tunnel join")
	}
	r.file(t+"tokenfile", e.TokenFile)
	// Without nodekey, tunnel join makes the file and the edge renews it, so the advice is to join again.
	if e.NodeKey == "" {
		r.fileMadeBy(t+"nodecert", e.NodeCert, "with a new join token, tunnel join writes it")
		r.secret(t+"nodecert", e.NodeCert)
	} else {
		r.file(t+"nodecert", e.NodeCert)
		r.file(t+"nodekey", e.NodeKey)
		r.secret(t+"nodekey", e.NodeKey)
	}
	// A token in the configuration makes the configuration a secret file.
	if e.Token != "" && e.src != nil {
		r.secret(t+"token", e.src.file)
	}
}

// Renews reports whether this edge renews its certificate.
func (e *Edge) Renews() bool { return e.NodeCert != "" && e.NodeKey == "" }

// Places returns all servers by which the edge can reach the cloud, in the form of dial.ParseServer.
func (e *Edge) Places() []string {
	if len(e.Servers) > 0 {
		return e.Servers
	}
	return []string{e.Addr}
}

// checkWay checks the settings for networks that do not let an edge dial the cloud directly.
func (e *Edge) checkWay(r *report) {
	const t = clientTable
	for i, text := range e.Servers {
		if s, err := dial.ParseServer(text); err != nil {
			r.add(t+"servers", "%v", err)
		} else if host, _, _ := net.SplitHostPort(s.Addr()); !IsHost(host) {
			r.add(t+"servers", "%q is neither a name nor an address", host)
		}
		if slices.Contains(e.Servers[:i], text) {
			r.add(t+"servers", "%q is there twice: remove one of them", text)
		}
	}
	if e.Proxy != "" && e.ProxyFile != "" {
		r.add(t+"proxyfile", "there is proxy as well: remove one of them")
	}
	if e.Proxy != "" && e.Proxy != ProxyNone {
		p, err := dial.ParseProxy(e.Proxy.Reveal(), "proxy in [mode.edge.stream.client]")
		switch {
		case err != nil:
			r.add(t+"proxy", "%v; or write \"env\" or \"none\"", err)
		case p.HasPassword() && e.src != nil:
			r.secret(t+"proxy", e.src.file) // a password makes the configuration a secret file
		}
	}
	r.file(t+"proxyfile", e.ProxyFile)
	r.secret(t+"proxyfile", e.ProxyFile)
	r.file(t+"proxyca", e.ProxyCA)
}
