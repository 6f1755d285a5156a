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

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"
	"golang.org/x/net/http/httpproxy"
	"golang.org/x/oauth2"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/pkg/admin"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/dial"
	"tunnel.example/tunnel/pkg/egress"
	"tunnel.example/tunnel/pkg/https"
	"tunnel.example/tunnel/pkg/konnectivity"
	"tunnel.example/tunnel/pkg/multipath"
	"tunnel.example/tunnel/pkg/netwatch"
	"tunnel.example/tunnel/pkg/ping"
	"tunnel.example/tunnel/pkg/reload"
	"tunnel.example/tunnel/pkg/stream"
	"tunnel.example/tunnel/pkg/tcp"
	"tunnel.example/tunnel/pkg/tunnel"
	"tunnel.example/tunnel/pkg/udp"
)

func newEdgeCommand(logs *logFlags) *cobra.Command {
	var file configFlag
	cmd := &cobra.Command{
		Use:   "edge [-c FILE]",
		Short: "Run the end on a node",
		Args:  noArgs,
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
func runEdge(ctx context.Context, file string, log *slog.Logger, level *slog.LevelVar) error {
	hangups := takeHangups()
	e, err := conf.LoadEdge(file, environment())
	if err != nil {
		return configError(err)
	}
	warn(log, e.Warnings)
	w, err := wireEdge(e, log)
	if err != nil {
		return configError(err)
	}
	w.level = level
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	r := newEdgeReloader(w, file, hangups, stop)
	w.add(r, nil)
	w.handlers = r.handlers()
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
	client    *stream.Client
	// multipath dials the cloud; nil: a net.Dialer does.
	multipath *multipath.Endpoints
}

// newEdge wires an edge together. It opens no listener and connects to nothing.
func newEdge(e *conf.Edge, log *slog.Logger) (*daemon, error) {
	w, err := wireEdge(e, log)
	if err != nil {
		return nil, err
	}
	return w.daemon, nil
}

// wireEdge is newEdge, and returns the whole wiring.
func wireEdge(e *conf.Edge, log *slog.Logger) (*edgeWiring, error) {
	named := log.With("node", e.Node)
	w := &edgeWiring{
		daemon: &daemon{mode: "edge", log: named}, conf: e,
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
	w.routes = w.client.Router().Routes()
	w.about = []any{"node_from", e.NodeFrom, "cloud", strings.Join(e.Places(), ", "), "allow", w.policy.String()}

	// The modules of an edge, in order.
	w.add(w.client, w.client.Ready)
	w.add(w.files, nil)
	w.showCongestion()
	if e.Multipath {
		w.add(w.multipath, nil)
	}
	w.add(netwatch.New(w.client.NetworkChanged, w.log), nil)
	if e.NodeCert != "" && e.NodeKey == "" {
		w.add(auth.NewRenewal(auth.RenewalConfig{Node: e.Node, File: e.NodeCert, Renew: w.client.Renew, Log: w.log}), nil)
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
	if e.ChannelzAddr != "" {
		w.add(admin.NewChannelz(e.ChannelzAddr, w.log), nil, e.ChannelzAddr)
	}
	w.newAPI()
	w.serveHealth(shown{
		port: e.LogPort, socket: e.AdminSocket, conns: e.Limits.Health,
		counters: w.counters, sessions: w.sessions,
		collectors: []prometheus.Collector{w.files.Collector(), w.udp.Collector()},
	})
	return w, nil
}

// sessions returns the newest live session, if there is one.
func (w *edgeWiring) sessions() []*tunnel.Session {
	if s := w.client.Session(); s != nil {
		return []*tunnel.Session{s}
	}
	return nil
}

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
	proof, err := newProof(e, w.files, log)
	if err != nil {
		return err
	}
	w.egress = egress.NewEdge(w.policy, log)
	w.datagrams = udp.NewEdge(w.policy, udp.EdgeConfig{
		Flows: e.Limits.Flows, Counters: w.udp, Core: w.counters, Log: w.log,
	})
	w.dialers = []tunnel.Module{
		https.NewEdge(w.policy.DialRequest, kubelet, nil),
		tcp.NewEdge(w.policy.DialRequest),
		w.datagrams,
		w.egress,
		ping.NewEdge(),
	}
	if _, err = konnectivity.ParseIdentifiers(e.EgressIdentifiers); err != nil {
		return fmt.Errorf("mode.edge.egress identifiers: %w", err)
	}
	var connect func(ctx context.Context, network, addr string) (net.Conn, error) // nil: plain TCP
	if e.Multipath {
		w.multipath = multipath.New(w.sessions, w.log)
		connect = w.multipath.DialContext
	}
	dialer, err := newDialer(e, w.files, connect)
	if err != nil {
		return err
	}
	w.client, err = stream.NewClient(stream.ClientConfig{
		Address:  dialer.String(),
		Connect:  dialer.Dial,
		Limits:   edgeLimits(e.Limits),
		TLS:      func() *tls.Config { return proof.tls(e.ServerName, pool.Pool()) },
		Node:     e.Node,
		Token:    proof.token,
		Counters: w.counters,
		Log:      log,
		Software: software(),
		All:      e.AllReplicas,

		Connections: cmp.Or(e.Connections, stream.DefaultConnections),
		Reach:       e.EgressIdentifiers,
		Congestion:  w.congestion,
	}, w.dialers...)
	return err
}

// newDialer returns the dialer that reaches the cloud by the ways that the configuration permits. connect makes
// its TCP connections; nil: a net.Dialer.
func newDialer(
	e *conf.Edge, files *reload.Files, connect func(ctx context.Context, network, addr string) (net.Conn, error),
) (*dial.Dialer, error) {
	const table = "mode.edge.stream.client"
	cfg := dial.Config{UserAgent: software(), Connect: connect}
	for _, place := range e.Places() {
		s, err := dial.ParseServer(place)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", table, err)
		}
		cfg.Servers = append(cfg.Servers, s)
	}
	switch {
	case e.ProxyFile != "":
		cfg.Proxy = dial.FromFile(e.ProxyFile, "proxyfile")
		if _, err := cfg.Proxy(cfg.Servers[0]); err != nil {
			return nil, fmt.Errorf("%s: %w", table, err)
		}
	case e.Proxy == "":
		cfg.Proxy = dial.FromEnvironment(httpproxy.FromEnvironment())
		for _, s := range cfg.Servers {
			if _, err := cfg.Proxy(s); err != nil {
				return nil, err
			}
		}
	case e.Proxy != conf.ProxyNone:
		p, err := dial.ParseProxy(e.Proxy.Reveal(), "proxy in ["+table+"]")
		if err != nil {
			return nil, err
		}
		cfg.Proxy = dial.Through(p)
	}
	if e.ProxyCA != "" {
		pool, err := files.Pool(table+" proxyca", e.ProxyCA)
		if err != nil {
			return nil, err
		}
		cfg.Roots = pool.Pool
	}
	return dial.New(cfg)
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
		return proof{pair: pair}, nil
	case e.TokenFile != "":
		if _, err := auth.ReadTokenFile(e.TokenFile, log); err != nil {
			return proof{}, err
		}
		return proof{token: auth.TokenFile(e.TokenFile)}, nil // the line above has warned about the mode of the file
	}
	return proof{token: auth.StaticToken(e.Token)}, nil
}
