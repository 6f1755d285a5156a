package main

import (
	"cmp"
	"crypto/tls"
	"fmt"
	"slices"

	"github.com/prometheus/client_golang/prometheus"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/pkg/egress"
	"tunnel.example/tunnel/pkg/konnectivity"
	"tunnel.example/tunnel/pkg/kube"
	"tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/reload"
	"tunnel.example/tunnel/pkg/stream"
	"tunnel.example/tunnel/pkg/tunnel"
)

// newEgress sets doors.egress, if the configuration has the egress front door. The server needs it, because edges send
// messages to it.
func (w *cloudWiring) newEgress() error {
	c, limits := w.conf.Egress, w.conf.Limits
	if !c.Configured() {
		return nil
	}
	cfg := egress.Config{
		GRPC: c.GRPC, HTTPConnect: c.HTTPConnect, Sessions: w.directory, Counters: w.counters,
		Sink:                w.sink(),
		Sockets:             w.sockets,
		KonnectivityMetrics: c.KonnectivityMetrics,
		Strangers:           limits.Strangers, StrangersPerAddress: limits.StrangersPerAddress,
		ProxyFrom: c.ProxyFrom,
	}
	cfg.Among = c.DefaultNodes
	for _, s := range c.Strategies {
		cfg.Strategies = append(cfg.Strategies, egress.Strategy(s))
	}
	if c.UsesTLS() {
		w.doors.egressNames.Store(&c.ClientNames)
		var err error
		if cfg.TLS, err = egressCallers(c, func() []string { return *w.doors.egressNames.Load() }, w.files); err != nil {
			return err
		}
	}
	reaches := w.cluster.reaches
	if reaches != nil {
		cfg.Identifiers, cfg.Kubernetes = nodeReaches{reaches}, true
	} else {
		cfg.Identifiers = egress.Believed(w.reach, w.log)
	}
	if w.conf.Services.On {
		cfg.Services = w.endpoints
	}
	door, err := egress.New(cfg, w.reach, w.reach, w.log)
	if err != nil {
		return fmt.Errorf("mode.cloud.egress: %w", err)
	}
	w.doors.egress = door
	return nil
}

// addEgress adds the egress front door, if there is one.
func (w *cloudWiring) addEgress() {
	door := w.doors.egress
	if door == nil {
		return
	}
	w.add(door, door.Ready, slices.Concat(w.conf.Egress.GRPC, w.conf.Egress.HTTPConnect)...)
	w.collectors = append(w.collectors, door.Collector())
	if reaches := w.cluster.reaches; reaches != nil {
		w.collectors = append(w.collectors, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "tunnel_egress_contested_addresses",
			Help: "Addresses and pod networks of Nodes that are not accepted, " +
				"because they belong to others or two Nodes claim them.",
		}, func() float64 { return float64(reaches.Contested()) }))
	}
}

// addAgents adds the port for stock konnectivity agents, if the configuration has one.
func (w *cloudWiring) addAgents() {
	if w.conf.Egress.AgentPort == 0 {
		return
	}
	l, byDefault := w.conf.Limits, stream.DefaultLimits()
	cfg := konnectivity.AgentsConfig{
		Listen: fmt.Sprintf(":%d", w.conf.Egress.AgentPort), ProxyFrom: w.conf.Egress.ProxyFrom,
		TLS:  &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: w.certificate},
		Auth: w.gate, Conns: cmp.Or(l.Conns, byDefault.Conns), Dials: cmp.Or(l.Dials, byDefault.Dials),
		Joining:           cmp.Or(l.Joining, byDefault.Joining),
		JoiningPerAddress: cmp.Or(l.JoiningPerAddress, byDefault.JoiningPerAddress),
		JoinTimeout:       cmp.Or(l.JoinTimeout, byDefault.JoinTimeout), Counters: w.counters, Audit: w.trail,
		Sockets: w.sockets, Log: w.log,
	}
	if w.peers != nil {
		cfg.Replicas = w.peers.Replicas
	}
	agents := konnectivity.NewAgents(cfg, w.directory)
	w.add(agents, agents.Ready, cfg.Listen)
}

// egressCallers returns the TLS configuration that admits callers by their client certificate. names returns
// the common names that may call now.
func egressCallers(c conf.Egress, names func() []string, files *reload.Files) (*tls.Config, error) {
	pair, err := files.Pair("mode.cloud.egress", c.Cert, c.Key)
	if err != nil {
		return nil, err
	}
	pool, err := files.Pool("mode.cloud.egress clientca", c.ClientCA)
	if err != nil {
		return nil, err
	}
	now := func() *tls.Config { // uses the present content of the files
		roots := pool.Pool()
		return &tls.Config{
			MinVersion: tls.VersionTLS12, GetCertificate: pair.GetCertificate,
			ClientAuth: tls.RequireAnyClientCert, ClientCAs: roots, VerifyPeerCertificate: listen.VerifyShown(roots),
			SessionTicketsDisabled: true, // a ticket would outlive a CA that the operator removes
			VerifyConnection: func(s tls.ConnectionState) error {
				if name := s.PeerCertificates[0].Subject.CommonName; !slices.Contains(names(), name) {
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

// nodeReaches tells the egress front door what each node reaches, as Kubernetes has it.
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
