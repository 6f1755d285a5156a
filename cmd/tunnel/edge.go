package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/cobra"

	"tunnel/conf"
	"tunnel/pkg/admin"
	"tunnel/pkg/auth"
	"tunnel/pkg/egress"
	"tunnel/pkg/https"
	"tunnel/pkg/konnectivity"
	"tunnel/pkg/reload"
	"tunnel/pkg/stream"
	"tunnel/pkg/tcp"
	"tunnel/pkg/tunnel"
)

func newEdgeCommand(logs *logFlags) *cobra.Command {
	var file string
	cmd := &cobra.Command{
		Use:   "edge -c FILE",
		Short: "Run the end on a node",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runEdge(cmd.Context(), file, logs.logger(cmd.ErrOrStderr()), &logs.now)
		},
	}
	fileFlag(cmd, &file)
	return cmd
}

// runEdge runs an edge until ctx is done.
func runEdge(ctx context.Context, file string, log *slog.Logger, level *slog.LevelVar) error {
	e, err := conf.LoadEdge(file, environment())
	if err != nil {
		return configError(err)
	}
	warn(log, e.Warnings)
	d, err := newEdge(e, log)
	if err != nil {
		return configError(err)
	}
	d.level = level
	return d.run(ctx)
}

// newEdge wires an edge together.
func newEdge(e *conf.Edge, log *slog.Logger) (*daemon, error) {
	counters := new(tunnel.Counters)
	policy, err := auth.ParsePolicy(e.Allow)
	if err != nil {
		return nil, fmt.Errorf("mode.edge allow: %w", err)
	}
	files := reload.NewFiles(log.With("node", e.Node))
	pool, err := files.Pool("mode.edge.stream.client cert", e.CA)
	if err != nil {
		return nil, err
	}
	var kubelet func() *tls.Certificate
	if e.HTTPS.Cert != "" {
		var pair *reload.Pair
		if pair, err = files.Pair("mode.edge.https", e.HTTPS.Cert, e.HTTPS.Key); err != nil {
			return nil, err
		}
		kubelet = pair.Certificate
	}
	proof, err := newProof(e, files, log)
	if err != nil {
		return nil, err
	}
	egressEdge := egress.NewEdge(policy)
	dialers := []tunnel.Module{
		https.NewEdge(policy.DialRequest, kubelet, nil),
		tcp.NewEdge(policy.DialRequest),
		egressEdge,
	}
	if _, err = konnectivity.ParseIdentifiers(e.EgressIdentifiers); err != nil {
		return nil, fmt.Errorf("mode.edge.egress identifiers: %w", err)
	}
	client, err := stream.NewClient(stream.ClientConfig{
		Address:  e.Addr,
		Limits:   edgeLimits(e.Limits),
		TLS:      func() *tls.Config { return proof.tls(e.ServerName, pool.Pool()) },
		Node:     e.Node,
		Token:    proof.token,
		Counters: counters,
		Log:      log,
		Software: software(),
		All:      e.AllReplicas,

		Connections: cmp.Or(e.Connections, stream.DefaultConnections),
		Reach:       e.EgressIdentifiers,
	}, dialers...)
	if err != nil {
		return nil, err
	}

	log = log.With("node", e.Node)
	d := &daemon{mode: "edge", log: log, routes: client.Router().Routes(), about: []any{
		"node_from", e.NodeFrom, "cloud", e.Addr, "allow", policy.String(),
	}}
	d.add(client, client.Ready)
	d.add(files, nil)
	if e.NodeCert != "" && e.NodeKey == "" {
		d.add(auth.NewRenewal(auth.RenewalConfig{Node: e.Node, File: e.NodeCert, Renew: client.Renew, Log: log}), nil)
	}
	for _, m := range dialers {
		d.add(m, nil)
	}
	if err = d.addKonnectivity(e, files, egressEdge.Dial, client, counters, log); err != nil {
		return nil, err
	}
	if e.ChannelzAddr != "" {
		d.add(admin.NewChannelz(e.ChannelzAddr, log), nil, e.ChannelzAddr)
	}
	d.serveHealth(shown{
		port: e.LogPort, socket: e.AdminSocket, conns: e.Limits.Health,
		counters: counters,
		sessions: func() []*tunnel.Session {
			if s := client.Session(); s != nil {
				return []*tunnel.Session{s}
			}
			return nil
		},
		collectors: []prometheus.Collector{files.Collector()},
	})
	return d, nil
}

// proof is what proves to the cloud which node this is: a token or a certificate.
type proof struct {
	token func() (auth.Secret, error) // nil: the certificate
	pair  *reload.Pair
}

// tls returns how to dial the cloud.
func (p proof) tls(serverName string, roots *x509.CertPool) *tls.Config {
	cfg := &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots, ServerName: serverName}
	if p.pair != nil {
		cfg.Certificates = []tls.Certificate{*p.pair.Certificate()}
	}
	return cfg
}

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
			return proof{}, fmt.Errorf("mode.edge.stream.client: nodecert: %s is no node's certificate: %w; tunnel join makes one", e.NodeCert, err)
		case node != e.Node:
			return proof{}, fmt.Errorf("mode.edge.stream.client: nodecert: %s is of node %s, and this is node %s (%s): set node in [mode.edge], or join as %s", e.NodeCert, node, e.Node, e.NodeFrom, e.Node)
		}
		return proof{pair: pair}, nil
	case e.TokenFile != "":
		if _, err := auth.ReadTokenFile(e.TokenFile, log); err != nil {
			return proof{}, err
		}
		quiet := slog.New(slog.DiscardHandler) // who may read the file has been said once
		return proof{token: func() (auth.Secret, error) { return auth.ReadTokenFile(e.TokenFile, quiet) }}, nil
	}
	return proof{token: func() (auth.Secret, error) { return e.Token, nil }}, nil
}
