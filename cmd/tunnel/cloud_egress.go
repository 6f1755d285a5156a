package main

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"log/slog"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"tunnel/conf"
	"tunnel/pkg/auth"
	"tunnel/pkg/egress"
	"tunnel/pkg/konnectivity"
	"tunnel/pkg/kube"
	"tunnel/pkg/reload"
	"tunnel/pkg/stream"
	"tunnel/pkg/tunnel"
)

// everywhere is this replica, and through it the others.
type everywhere interface {
	tunnel.Dialer
	egress.Claims
	Holds(tunnel.NodeName) bool
}

// addEgress adds the egress front door, if there is one, and returns its metrics.
func (d *daemon) addEgress(c conf.Egress, limits conf.Limits, counters *tunnel.Counters, files *reload.Files, k cluster, all everywhere, directory *tunnel.Directory, log *slog.Logger) ([]prometheus.Collector, error) {
	if !c.Configured() {
		return nil, nil
	}
	cfg := egress.Config{GRPC: c.GRPC, HTTPConnect: c.HTTPConnect, Sessions: directory, Counters: counters, KonnectivityMetrics: c.KonnectivityMetrics, Strangers: limits.Strangers, StrangersPerAddress: limits.StrangersPerAddress}
	cfg.Among = c.DefaultNodes
	for _, s := range c.Strategies {
		cfg.Strategies = append(cfg.Strategies, egress.Strategy(s))
	}
	if c.UsesTLS() {
		var err error
		if cfg.TLS, err = egressCallers(c, files); err != nil {
			return nil, err
		}
	}
	if k.reaches != nil {
		cfg.Identifiers, cfg.Kubernetes = nodeReaches{k.reaches}, true
	} else {
		cfg.Identifiers = egress.Believed(all, log)
	}
	door, err := egress.New(cfg, all, all, log)
	if err != nil {
		return nil, fmt.Errorf("mode.cloud.egress: %w", err)
	}
	d.add(door, door.Ready, slices.Concat(c.GRPC, c.HTTPConnect)...)
	collectors := []prometheus.Collector{door.Collector()}
	if k.reaches != nil {
		collectors = append(collectors, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "tunnel_egress_contested_addresses", Help: "Addresses and pod networks of Nodes that do not count, because they belong to others or two Nodes claim them.",
		}, func() float64 { return float64(k.reaches.Contested()) }))
	}
	return collectors, nil
}

// addAgents adds the door of stock konnectivity agents, if there is one. shown is our certificate.
func (d *daemon) addAgents(c *conf.Cloud, shown func(*tls.ClientHelloInfo) (*tls.Certificate, error), gate *auth.Gate, peers *stream.Peers, directory *tunnel.Directory, counters *tunnel.Counters, log *slog.Logger) {
	if c.Egress.AgentPort == 0 {
		return
	}
	l, byDefault := c.Limits, stream.DefaultLimits()
	cfg := konnectivity.AgentsConfig{
		Listen: fmt.Sprintf(":%d", c.Egress.AgentPort),
		TLS:    &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: shown},
		Auth:   gate, Conns: cmp.Or(l.Conns, byDefault.Conns), Dials: cmp.Or(l.Dials, byDefault.Dials),
		Joining: cmp.Or(l.Joining, byDefault.Joining), JoiningPerAddress: cmp.Or(l.JoiningPerAddress, byDefault.JoiningPerAddress),
		JoinTimeout: cmp.Or(l.JoinTimeout, byDefault.JoinTimeout), Counters: counters, Log: log,
	}
	if peers != nil {
		cfg.Replicas = peers.Replicas
	}
	agents := konnectivity.NewAgents(cfg, directory)
	d.add(agents, agents.Ready, cfg.Listen)
}

// egressCallers returns how callers over TLS are known.
func egressCallers(c conf.Egress, files *reload.Files) (*tls.Config, error) {
	pair, err := files.Pair("mode.cloud.egress", c.Cert, c.Key)
	if err != nil {
		return nil, err
	}
	pool, err := files.Pool("mode.cloud.egress clientca", c.ClientCA)
	if err != nil {
		return nil, err
	}
	now := func() *tls.Config {
		return &tls.Config{
			MinVersion: tls.VersionTLS12, GetCertificate: pair.GetCertificate,
			ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool.Pool(),
			SessionTicketsDisabled: true, // they would outlive a CA that is taken back
			VerifyPeerCertificate: func(_ [][]byte, chains [][]*x509.Certificate) error {
				if name := chains[0][0].Subject.CommonName; !slices.Contains(c.ClientNames, name) {
					return fmt.Errorf("%q is not in clientnames of [mode.cloud.egress]", name)
				}
				return nil
			},
		}
	}
	conf := now()
	conf.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) { return now(), nil }
	return conf, nil
}

// nodeReaches is what Kubernetes says that nodes reach.
type nodeReaches struct{ *kube.Reaches }

// Identifiers implements egress.Source.
func (n nodeReaches) Identifiers() map[tunnel.NodeName]konnectivity.Identifiers {
	all := make(map[tunnel.NodeName]konnectivity.Identifiers)
	for name, r := range n.All() {
		all[name] = konnectivity.Identifiers{Hosts: r.Hosts, Networks: r.PodCIDRs, Refused: r.Refused}
	}
	return all
}

// Name implements tunnel.Module.
func (nodeReaches) Name() string { return "node-reach" }

// Routes implements tunnel.Module.
func (nodeReaches) Routes() map[string]tunnel.Handler { return nil }
