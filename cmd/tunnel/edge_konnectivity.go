package main

import (
	"crypto/tls"
	"fmt"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/konnectivity"
	"tunnel.example/tunnel/pkg/reload"
)

// addKonnectivity adds an agent of stock konnectivity servers, if the configuration names any.
// The dials that these servers ask for share the edge's budget with those of the cloud.
func (w *edgeWiring) addKonnectivity() error {
	k := w.conf.Konnectivity
	if len(k.Servers) == 0 {
		return nil
	}
	pool, err := w.files.Pool("mode.edge.konnectivity ca", k.CA)
	if err != nil {
		return err
	}
	var pair *reload.Pair
	if k.Cert != "" {
		if pair, err = w.files.Pair("mode.edge.konnectivity", k.Cert, k.Key); err != nil {
			return err
		}
	}
	cfg := konnectivity.AgentConfig{
		Servers: k.Servers, Node: w.conf.Node, Identifiers: w.conf.EgressIdentifiers,
		Dial: w.egress.Dial, Budget: w.client, Counters: w.counters, Log: w.log,
		TLS: func() *tls.Config {
			c := &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: pool.Pool()}
			if pair != nil {
				c.GetClientCertificate = pair.GetClientCertificate
			}
			return c
		},
	}
	if k.TokenFile != "" {
		if _, err = auth.ReadTokenFile(k.TokenFile, w.log); err != nil {
			return fmt.Errorf("mode.edge.konnectivity tokenfile: %w", err)
		}
		cfg.Token = auth.TokenFile(k.TokenFile) // the lines above have warned about the mode of the file
	}
	agent, err := konnectivity.NewAgent(cfg)
	if err != nil {
		return fmt.Errorf("mode.edge.egress identifiers: %w", err)
	}
	w.add(agent, agent.Ready)
	return nil
}
