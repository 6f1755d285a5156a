package check

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/http/httpproxy"
	"golang.org/x/oauth2"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/pkg/api"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/dial"
	"tunnel.example/tunnel/pkg/setup"
	"tunnel.example/tunnel/pkg/stream"
	"tunnel.example/tunnel/pkg/tunnel"
)

// EdgeConfig is what the checks of an edge look at.
type EdgeConfig struct {
	Conf     *conf.Edge
	Dial     dial.Config        // how the edge reaches the cloud
	TLS      func() *tls.Config // the edge's TLS: its CAs, the name to verify, and its certificate
	Token    oauth2.TokenSource // the token that proves the node; nil: the certificate proves the node
	Software string             // the name and version of this program, for the cloud
	// Told returns the CAs by which the edge verifies the cloud now: those of the configuration, or those that the cloud
	// has told and the edge has kept in ToldFile. nil: the edge accepts no CAs from the cloud.
	Told     func() []*x509.Certificate
	ToldFile string
	// Kubelet is the host:port of the kubelet; "": DefaultKubelet, if this machine has a kubelet.
	Kubelet string
	// Environment has the proxies that the operator's environment names. The checks try these proxies only if no
	// configured way leads to the cloud.
	Environment *httpproxy.Config
}

// DefaultKubelet is where a kubelet serves, and the target in the example of [mode.cloud.https.addr].
const DefaultKubelet = "127.0.0.1:10250"

// stepTimeout bounds one step of a check that waits for another program.
const stepTimeout = 10 * time.Second

// edge has what the checks of an edge have found so far. The checks run one after the other.
type edge struct {
	EdgeConfig
	ways   []*way
	walked bool
	daemon daemon
}

// Edge returns the checks of an edge.
func Edge(cfg EdgeConfig) []Check {
	e := &edge{EdgeConfig: cfg, daemon: daemon{mode: "edge", socket: cfg.Conf.AdminSocket}}
	list := []Check{
		{"identity", "proof", e.proof},
		{"identity", "ca", e.authorities},
	}
	c := cfg.Conf
	list = append(list,
		readable("identity", c.NodeCert, c.NodeKey, c.TokenFile, c.ProxyFile, c.HTTPS.Key, c.Konnectivity.Key,
			c.Konnectivity.TokenFile, cfg.ToldFile, c.Services.State)...)
	for _, server := range cfg.Dial.Servers {
		w := newWay(&e.EdgeConfig, server)
		e.ways = append(e.ways, w)
		for _, step := range w.steps() {
			list = append(list, Check{"way to " + server.String(), string(step), func(ctx context.Context) Result {
				e.walk(ctx)
				return w.result(step)
			}})
		}
	}
	list = append(list,
		Check{"edge", "daemon", e.daemon.running},
		Check{"edge", "session", e.session},
		Check{"edge", "modules", e.daemon.modules},
		Check{"edge", "other edge", e.otherEdge},
		Check{"node", "kubelet", e.kubelet},
	)
	if cfg.Conf.CNI.On {
		list = append(list, podNetwork(cfg.Conf.CNI)...)
	}
	if cfg.Conf.Services.On {
		list = append(list, relayedServices(cfg.Conf.Services, &e.daemon)...)
	}
	return list
}

// walk follows all ways to the cloud at once, the first time it is called. Then it turns failures of a way into
// warnings if another way leads to the cloud, or if the running edge has a session. A session does not excuse a
// failure that came after a certificate: the edge could not reconnect, for instance with an unknown CA.
func (e *edge) walk(ctx context.Context) {
	if e.walked {
		return
	}
	e.walked = true
	var walking sync.WaitGroup
	for _, w := range e.ways {
		walking.Go(func() { w.walk(ctx) })
	}
	walking.Wait()
	leads := false
	for _, w := range e.ways {
		leads = leads || w.answer != nil
	}
	st := e.daemon.status(ctx)
	for _, w := range e.ways {
		switch {
		case w.answer != nil:
		case leads:
			w.forgive("the edge uses another server", "")
		case st != nil && st.Mode == e.daemon.mode && len(st.Sessions) > 0 && !w.shown:
			w.forgive("the running edge has a session: its environment or its route differs", sameEnvironment)
		}
	}
}

// sameEnvironment is the begin of the next step if the running edge reaches the cloud and this check does not.
const sameEnvironment = "run this check in the environment of the edge, such as with sudo " +
	"--preserve-env=HTTPS_PROXY,HTTP_PROXY,NO_PROXY; else "

// proof checks the token or the certificate by which the edge proves which node it is.
func (e *edge) proof(context.Context) Result {
	c := e.Conf
	switch {
	case c.NodeCert != "":
		certs, r := readCertificates(c.NodeCert)
		if certs == nil {
			return r
		}
		node, err := auth.NodeOf(certs[0])
		if err != nil || node != c.Node {
			return Fail("set node in [mode.edge], or join as "+string(c.Node),
				"%s is a certificate of node %q, and this is node %s", c.NodeCert, node, c.Node)
		}
		const join = "get another one: tunnel token create on the cloud, tunnel join here"
		what := fmt.Sprintf("the certificate of node %s in %s", node, c.NodeCert)
		if c.NodeKey != "" {
			return validity(what, certs[0], byHand, "whoever writes nodecert must replace it")
		}
		return validity(what, certs[0], byItself, join)
	case c.TokenFile != "":
		if _, err := auth.TokenOf(e.Token); err != nil {
			return Fail("write the token of node "+string(c.Node)+" into the file, or run tunnel join", "%v", err)
		}
		return OK("%s holds the token of node %s", c.TokenFile, c.Node)
	}
	return OK("the configuration holds the token of node %s", c.Node)
}

// authorities checks the dates of the CAs by which the edge verifies the cloud.
func (e *edge) authorities(context.Context) Result {
	const do = "get the CA from the cloud: cloudca in its [mode.cloud.join]"
	if e.Told != nil {
		return anyValid(e.caFiles(), e.Told(), do)
	}
	return bundle(e.Conf.CA, do)
}

// caFiles names the files with the CAs by which the edge verifies the cloud.
func (e *EdgeConfig) caFiles() string {
	if e.Told == nil {
		return e.Conf.CA
	}
	return e.Conf.CA + ", or as the cloud has told in " + e.ToldFile
}

// session checks whether the running edge has a session.
func (e *edge) session(ctx context.Context) Result {
	st := e.daemon.status(ctx)
	if st == nil {
		return Skipped("the edge does not answer")
	}
	if len(st.Sessions) == 0 {
		for _, c := range st.Checks {
			if c.Name == "stream" {
				return Fail("the lines above say which step fails; the log of the edge repeats the reason", "%s", c.Text)
			}
		}
		return Fail("wait a moment, and look again", "the edge has no session with the cloud")
	}
	var all []string
	for _, s := range st.Sessions {
		all = append(all, fmt.Sprintf("%s for %s", s.Remote, setup.Spell(st.Time.Sub(s.Since))))
	}
	return OK("with %s", strings.Join(all, ", "))
}

// otherEdge looks for another edge with the name of this node. The cloud's answer names the session that the cloud has
// of this node. If the running edge does not have that session, another edge has it.
func (e *edge) otherEdge(ctx context.Context) Result {
	var at *way
	for _, w := range e.ways {
		if w.answer != nil {
			at = w
			break
		}
	}
	if at == nil {
		return Skipped("the cloud has not answered")
	}
	node := e.Conf.Node
	for round := 1; ; round++ {
		st := e.daemon.status(ctx)
		switch {
		case *at.answer == (stream.Answer{}):
			return Skipped("a cloud of an older release does not tell whose session it has")
		case at.answer.Session == "":
			return OK("no other edge is connected as node %s", node)
		case e.daemon.socket == "":
			return Skipped("[mode.edge.admin] has no socket, so the session of node %s, from %s since %s, may belong to "+
				"another machine", node, at.answer.Remote, when(at.answer.Since))
		case st == nil || st.Mode != e.daemon.mode:
			return Skipped("the edge does not answer, so it is not known whose session this is: from %s since %s",
				at.answer.Remote, when(at.answer.Since))
		case holds(st, at.answer.Session):
			return OK("node %s is connected by this edge alone", node)
		case round == otherEdgeRounds && len(st.Sessions) == 0:
			return Warn("look again in a minute; if the session stays, stop the edge there, or give each machine a name and a "+
				"proof of its own: tunnel token create --node, tunnel join",
				"the edge has no session, and the cloud has one of node %s, from %s since %s: that of another edge, or one "+
					"whose end the cloud has not noticed", node, at.answer.Remote, when(at.answer.Since))
		case round == otherEdgeRounds:
			return Fail("stop the edge there, or give each machine a name and a proof of its own: "+
				"tunnel token create --node, tunnel join",
				"another edge is connected as node %s, from %s since %s", node, at.answer.Remote, when(at.answer.Since))
		}
		// Ask both again: the edge may have opened another session, or another process may have taken over, between
		// the two answers.
		select {
		case <-time.After(otherEdgePause):
		case <-ctx.Done():
			return Skipped("the check was stopped")
		}
		if now, err := at.ask(ctx); err == nil {
			at.answer = &now
		}
		e.daemon.ask(ctx)
	}
}

// If the cloud's session is not the edge's, otherEdge compares both otherEdgeRounds times, with a pause in between.
const (
	otherEdgeRounds = 3
	otherEdgePause  = 2 * time.Second
)

// holds reports whether one of an edge's sessions has this ID.
func holds(st *api.Status, session string) bool {
	for _, s := range st.Sessions {
		if s.ID == session {
			return true
		}
	}
	return false
}

// kubelet checks whether the kubelet of this machine answers, and whether the edge may dial it.
func (e *edge) kubelet(ctx context.Context) Result {
	if e.Kubelet == "" && !hasKubelet() {
		return Skipped("this machine has no kubelet; --kubelet HOST:PORT names one")
	}
	addr := cmp.Or(e.Kubelet, DefaultKubelet)
	policy, err := auth.ParsePolicy(e.Conf.Allow)
	if err != nil {
		return Fail("correct allow in [mode.edge]", "%v", err)
	}
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	conn, err := policy.Dial(ctx, "tcp", addr)
	if err != nil {
		if refusal, ok := errors.AsType[*tunnel.Refusal](err); ok && refusal.Code == tunnel.Denied {
			return Fail("add it to allow in [mode.edge], then tunnel reload", "the edge may not dial the kubelet: %v", err)
		}
		return Fail("start the kubelet: systemctl status kubelet; or name another address with --kubelet",
			"the kubelet does not answer: %v", err)
	}
	defer conn.Close()
	//nolint:gosec // this check needs only the dates of the certificate; the cloud or its caller verifies the kubelet
	tc := tls.Client(conn, &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS12})
	if err := tc.HandshakeContext(ctx); err != nil {
		return Fail("does another program have the port of the kubelet? ss -ltnp shows it",
			"the program at %s does not speak TLS as a kubelet does: %v", addr, err)
	}
	leaf := tc.ConnectionState().PeerCertificates[0]
	return validity("the kubelet answers at "+addr+"; its certificate", leaf, byItself,
		"see the kubelet's settings serverTLSBootstrap and tlsCertFile")
}

// hasKubelet reports whether this machine has the folder of a kubelet. The kubelet in k3s has the same folder.
func hasKubelet() bool {
	info, err := os.Stat("/var/lib/kubelet")
	return err == nil && info.IsDir()
}

// names returns a text with the names and addresses of a certificate, and the name of its CA.
func names(cert *x509.Certificate) string {
	all := append([]string(nil), cert.DNSNames...)
	for _, ip := range cert.IPAddresses {
		all = append(all, ip.String())
	}
	if len(all) == 0 {
		all = []string{fmt.Sprintf("%q", cert.Subject)}
	}
	const most = 4
	if len(all) > most {
		all = append(all[:most:most], "…")
	}
	return fmt.Sprintf("made out to %s and signed by %q", strings.Join(all, ", "), cert.Issuer)
}
