package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"golang.org/x/net/http/httpproxy"
	"golang.org/x/oauth2"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/pkg/admin"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/dial"
	"tunnel.example/tunnel/pkg/dns"
	"tunnel.example/tunnel/pkg/egress"
	"tunnel.example/tunnel/pkg/https"
	"tunnel.example/tunnel/pkg/konnectivity"
	"tunnel.example/tunnel/pkg/multipath"
	"tunnel.example/tunnel/pkg/netwatch"
	"tunnel.example/tunnel/pkg/ping"
	"tunnel.example/tunnel/pkg/reload"
	"tunnel.example/tunnel/pkg/services/relay"
	"tunnel.example/tunnel/pkg/stream"
	"tunnel.example/tunnel/pkg/tcp"
	"tunnel.example/tunnel/pkg/trace"
	"tunnel.example/tunnel/pkg/tunnel"
	"tunnel.example/tunnel/pkg/udp"
)

func newEdgeCommand(logs *logFlags) *cobra.Command {
	var file configFlag
	cmd := &cobra.Command{
		Use:   "edge [-c FILE]",
		Short: "Run the end on a node",
		Long: `edge runs the end on a node, until SIGTERM or Ctrl-C. Then it drains for up to 25 s. SIGHUP has it read its
configuration again. While the cloud does not answer, edge tries again, and does not end.

Exit codes: 0 stopped by a signal, 1 failed while running, 2 wrong command line, 3 the configuration has a problem.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			path, err := file.path()
			if err != nil {
				return err
			}
			return runEdge(cmd.Context(), path, logs.logger(cmd.ErrOrStderr()), &logs.now)
		},
	}
	file.register(cmd, edgeFile)
	return cmd
}

// runEdge runs an edge until ctx is done.
func runEdge(ctx context.Context, file string, log *slog.Logger, level *slog.LevelVar) (err error) {
	hangups := takeHangups()
	at, err := newPlace()
	if err != nil {
		return &exitError{exitRuntime, err}
	}
	defer func() { at.failed(err) }()
	e, err := conf.LoadEdge(file, environment())
	if err != nil {
		return configError(err)
	}
	warn(log, e.Warnings)
	w, err := wireEdge(e, log, at)
	if err != nil {
		return configError(err)
	}
	w.level = level
	switch {
	case w.services == nil:
		if relay.RemoveRules(w.log) && at.before != nil {
			w.addWriter(leftRules{func() { relay.RemoveRules(w.log) }})
		}
	case w.names == nil:
		relay.RemoveDNSRules(w.log)
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	r := newEdgeReloader(w, file, hangups, stop)
	w.add(r, nil)
	w.handlers = r.handlers()
	w.handleServices(w.handlers)
	(&restarter{daemon: w.daemon, reloader: r, client: w.client}).handle(w.handlers)
	return w.run(ctx)
}

// edgeWiring is an edge that newEdge wires together. Set once, by newEdge.
type edgeWiring struct {
	*daemon

	conf      *conf.Edge
	counters  *tunnel.Counters
	files     *reload.Files
	policy    *auth.Policy
	egress    *egress.Edge
	udp       *udp.Counters
	datagrams *udp.Edge
	dialers   []tunnel.Module // each dials targets for one front door
	services  *relay.Relay    // nil: off
	near      *relay.Near     // nil: off
	names     *dns.Responder  // nil: off
	client    *stream.Client
	proof     proof
	renewal   *auth.Renewal         // nil: the edge renews no certificate
	told      *auth.Told            // keeps CAs and addresses from the cloud; nil: the edge accepts none
	roots     func() *x509.CertPool // the CAs by which the edge verifies the cloud now
	dialer    *dial.Dialer
}

// newEdge wires an edge together. It opens no listener and connects to nothing.
func newEdge(e *conf.Edge, log *slog.Logger) (*daemon, error) {
	w, err := wireEdge(e, log, place{})
	if err != nil {
		return nil, err
	}
	return w.daemon, nil
}

// wireEdge is newEdge, and returns the whole wiring.
func wireEdge(e *conf.Edge, log *slog.Logger, at place) (*edgeWiring, error) {
	named := log.With("node", e.Node)
	w := &edgeWiring{
		daemon: &daemon{mode: "edge", log: named, place: at}, conf: e,
		counters: new(tunnel.Counters), udp: new(udp.Counters), files: reload.NewFiles(named),
	}
	var err error
	if w.policy, err = auth.ParsePolicy(e.Allow); err != nil {
		return nil, fmt.Errorf("mode.edge allow: %w", err)
	}
	if err = w.controlCongestion("mode.edge.stream.client", e.Congestion, w.counters); err != nil {
		return nil, err
	}
	if err = w.newClient(log); err != nil {
		return nil, err
	}
	w.routes, w.joinAgain = w.client.Router().Routes(), w.client.HurryUp
	w.about = []any{"node_from", e.NodeFrom, "cloud", strings.Join(e.Places(), ", "), "allow", w.policy.String()}

	// The modules of an edge, in order.
	w.add(w.client, w.client.Ready)
	w.add(w.files, nil)
	w.showCongestion()
	if e.Multipath {
		w.add(w.multipath, nil)
	}
	w.add(netwatch.New(w.client.NetworkChanged, w.log), nil)
	if e.Renews() {
		w.renewal = auth.NewRenewal(auth.RenewalConfig{
			Node: e.Node, File: e.NodeCert, Renew: w.client.Renew, Log: w.log,
		})
		w.addWriter(w.renewal)
		w.learnNodeCAs()
	}
	for _, m := range w.dialers {
		w.add(m, nil)
	}
	if err = w.addKonnectivity(); err != nil {
		return nil, err
	}
	if err = w.addCNI(); err != nil {
		return nil, err
	}
	collectors := []prometheus.Collector{w.files.Collector(), w.udp.Collector()}
	if w.services != nil {
		w.addWriter(w.services)
		collectors = append(collectors, w.services.Collector())
	}
	if w.near != nil {
		w.site = w.near
		w.add(w.near, nil, e.Services.Near.String())
	}
	if w.names != nil {
		collectors = append(collectors, w.names.Collector())
	}
	if e.ChannelzAddr != "" {
		channelz := admin.NewChannelz(e.ChannelzAddr, w.log)
		channelz.Sockets = w.sockets
		w.add(channelz, nil, e.ChannelzAddr)
	}
	w.newAPI()
	if w.spans != nil {
		collectors = append(collectors, w.spans.Collector())
	}
	w.serveHealth(shown{
		port: e.LogPort, socket: e.AdminSocket, conns: e.Limits.Health,
		counters: w.counters, sessions: w.sessions,
		collectors: collectors,
	})
	return w, nil
}

// sessions returns the live sessions: one with each replica if all = true.
func (w *edgeWiring) sessions() []*tunnel.Session { return w.client.Sessions() }

// newClient sets dialers and client. log is without the node, which the client adds.
func (w *edgeWiring) newClient(log *slog.Logger) error {
	e := w.conf
	pool, err := w.files.Pool("mode.edge.stream.client cert", e.CA)
	if err != nil {
		return err
	}
	var kubelet func() *tls.Certificate
	if e.HTTPS.Cert != "" {
		var pair *reload.Pair
		if pair, err = w.files.Pair("mode.edge.https", e.HTTPS.Cert, e.HTTPS.Key); err != nil {
			return err
		}
		kubelet = pair.Certificate
	}
	if w.proof, err = newProof(e, w.files, log); err != nil {
		return err
	}
	w.egress = egress.NewEdge(w.policy, log)
	w.datagrams = udp.NewEdge(w.policy, udp.EdgeConfig{
		Flows: e.Limits.Flows, Counters: w.udp, Core: w.counters, Log: w.log,
	})
	traces := trace.NewEdge(w.policy.Try, w.counters, w.log)
	w.dialers = []tunnel.Module{
		https.NewEdge(w.policy.DialRequest, kubelet, nil),
		tcp.NewEdge(w.policy.DialRequest),
		w.datagrams,
		w.egress,
		ping.NewEdge(),
		traces,
	}
	if err = w.addServices(); err != nil {
		return err
	}
	if _, err = konnectivity.ParseIdentifiers(e.EgressIdentifiers); err != nil {
		return fmt.Errorf("mode.edge.egress identifiers: %w", err)
	}
	if err = w.newDialer(); err != nil {
		return err
	}
	w.roots = pool.Pool
	if e.Updates {
		w.told, err = auth.NewTold(auth.ToldConfig{File: toldFile(e), CA: e.CA, Host: e.ServerName, Log: w.log})
		if err != nil {
			return fmt.Errorf("mode.edge.stream.client cert: %w", err)
		}
		w.roots = func() *x509.CertPool {
			trusted := w.told.Roots(pool.Pool())
			preferTold(w.dialer, w.told) // with other CAs in the configuration, told addresses no longer count
			return trusted
		}
		preferTold(w.dialer, w.told)
	}
	cfg := stream.ClientConfig{
		Address:  w.dialer.String(),
		Connect:  w.dialer.Dial,
		Limits:   edgeLimits(e.Limits),
		TLS:      func() *tls.Config { return w.proof.tls(e.ServerName, w.roots()) },
		Node:     e.Node,
		Token:    w.proof.token,
		Counters: w.counters,
		Log:      log,
		Software: software(),
		All:      e.AllReplicas,
		Instance: w.before.Instance(),
		Succeeds: w.succeeds,

		Connections: cmp.Or(e.Connections, stream.DefaultConnections),
		Reach:       e.EgressIdentifiers,
		Services:    w.services != nil,
		Congestion:  w.congestion,
		Tracer:      w.newTracer(e.Collector, string(e.Node), 0),
	}
	if e.Renews() {
		cfg.Trusts = w.trusts
		cfg.AskedToRenew = func(within time.Duration) { w.renewal.Soon(within) } // wireEdge sets renewal later
	}
	if w.told != nil {
		cfg.Told = w.take
	}
	w.client, err = stream.NewClient(cfg, w.dialers...)
	traces.Budget = w.client
	return err
}

// newDialer sets the dialer that reaches the cloud by the ways that the configuration permits.
func (w *edgeWiring) newDialer() error {
	cfg, err := dialConfig(w.conf, w.files)
	if err != nil {
		return err
	}
	if w.services != nil { // the cloud and the cluster's DNS may be Services, and are not to be redirected to the tunnel
		own := &net.Dialer{Control: relay.Unredirected}
		cfg.Connect = own.DialContext
		cfg.LookUp = (&net.Resolver{PreferGo: true, Dial: own.DialContext}).LookupNetIP
	}
	if w.conf.Multipath {
		w.multipath = multipath.New(w.sessions, w.log)
		w.multipath.Left = w.sockets.Left()
		if w.services != nil {
			w.multipath.Control = relay.Unredirected
		}
		cfg.Connect = w.multipath.DialContext
	}
	w.dialer, err = dial.New(cfg)
	return err
}

// dialConfig returns the ways to the cloud that the configuration permits.
func dialConfig(e *conf.Edge, files *reload.Files) (dial.Config, error) {
	const table = "mode.edge.stream.client"
	cfg := dial.Config{UserAgent: software()}
	for _, place := range e.Places() {
		s, err := dial.ParseServer(place)
		if err != nil {
			return cfg, fmt.Errorf("%s: %w", table, err)
		}
		cfg.Servers = append(cfg.Servers, s)
	}
	switch {
	case e.ProxyFile != "":
		cfg.Proxy = dial.FromFile(e.ProxyFile, "proxyfile")
		if _, err := cfg.Proxy(cfg.Servers[0]); err != nil {
			return cfg, fmt.Errorf("%s: %w", table, err)
		}
	case e.Proxy == "":
		cfg.Proxy = dial.FromEnvironment(httpproxy.FromEnvironment())
		for _, s := range cfg.Servers {
			if _, err := cfg.Proxy(s); err != nil {
				return cfg, err
			}
		}
	case e.Proxy != conf.ProxyNone:
		p, err := dial.ParseProxy(e.Proxy.Reveal(), "proxy in ["+table+"]")
		if err != nil {
			return cfg, err
		}
		cfg.Proxy = dial.Through(p)
	}
	if e.ProxyCA != "" {
		pool, err := files.Pool(table+" proxyca", e.ProxyCA)
		if err != nil {
			return cfg, err
		}
		cfg.Roots = pool.Pool
	}
	return cfg, nil
}

// proof is the credential that proves to the cloud which node this is: a token or a certificate.
type proof struct {
	token oauth2.TokenSource // nil: pair is the credential
	pair  *reload.Pair       // nil: token is the credential
}

// tls returns the TLS configuration of the next connection to the cloud.
func (p proof) tls(serverName string, roots *x509.CertPool) *tls.Config {
	cfg := &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots, ServerName: serverName}
	if p.pair != nil {
		cfg.Certificates = []tls.Certificate{*p.pair.Certificate()}
	}
	return cfg
}

// newProof returns the credential that the configuration names, and reads its files once.
func newProof(e *conf.Edge, files *reload.Files, log *slog.Logger) (proof, error) {
	switch {
	case e.NodeCert != "":
		pair, err := files.Pair("mode.edge.stream.client nodecert", e.NodeCert, cmp.Or(e.NodeKey, e.NodeCert))
		switch {
		case err != nil && e.NodeKey == "":
			return proof{}, fmt.Errorf("%w; with a new join token, tunnel join writes another one", err)
		case err != nil:
			return proof{}, err
		}
		node, err := auth.NodeOf(pair.Certificate().Leaf)
		switch {
		case err != nil:
			return proof{}, fmt.Errorf("mode.edge.stream.client: nodecert: %s is not a node's certificate: %w; "+
				"tunnel join makes one", e.NodeCert, err)
		case node != e.Node:
			return proof{}, fmt.Errorf("mode.edge.stream.client: nodecert: %s is of node %s, and this is node %s (%s): "+
				"set node in [mode.edge], or join as %s", e.NodeCert, node, e.Node, e.NodeFrom, e.Node)
		}
		if e.Renews() {
			pair.TakeNewer()
		}
		return proof{pair: pair}, nil
	case e.TokenFile != "":
		if _, err := auth.ReadTokenFile(e.TokenFile, log); err != nil {
			return proof{}, err
		}
		return proof{token: auth.TokenFile(e.TokenFile)}, nil // the line above has warned about the mode of the file
	}
	return proof{token: auth.StaticToken(e.Token)}, nil
}
