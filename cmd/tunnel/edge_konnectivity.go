package main

import (
	"crypto/tls"
	"fmt"
	"log/slog"

	"tunnel/conf"
	"tunnel/pkg/auth"
	"tunnel/pkg/konnectivity"
	"tunnel/pkg/reload"
	"tunnel/pkg/tunnel"
)

// addKonnectivity adds the agent of stock proxy-servers, if there are some. What they ask for counts with what clouds do.
func (d *daemon) addKonnectivity(e *conf.Edge, files *reload.Files, dial tunnel.DialFunc, budget konnectivity.Budget, counters *tunnel.Counters, log *slog.Logger) error {
	k := e.Konnectivity
	if len(k.Servers) == 0 {
		return nil
	}
	pool, err := files.Pool("mode.edge.konnectivity ca", k.CA)
	if err != nil {
		return err
	}
	var pair *reload.Pair
	if k.Cert != "" {
		if pair, err = files.Pair("mode.edge.konnectivity", k.Cert, k.Key); err != nil {
			return err
		}
	}
	cfg := konnectivity.AgentConfig{
		Servers: k.Servers, Node: e.Node, Identifiers: e.EgressIdentifiers, Dial: dial, Budget: budget, Counters: counters, Log: log,
		TLS: func() *tls.Config {
			c := &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: pool.Pool()}
			if pair != nil {
				c.GetClientCertificate = pair.GetClientCertificate
			}
			return c
		},
	}
	if k.TokenFile != "" {
		if _, err = auth.ReadTokenFile(k.TokenFile, log); err != nil {
			return fmt.Errorf("mode.edge.konnectivity tokenfile: %w", err)
		}
		quiet := slog.New(slog.DiscardHandler) // who may read the file has been said once
		cfg.Token = func() (auth.Secret, error) { return auth.ReadTokenFile(k.TokenFile, quiet) }
	}
	agent, err := konnectivity.NewAgent(cfg)
	if err != nil {
		return fmt.Errorf("mode.edge.egress identifiers: %w", err)
	}
	d.add(agent, agent.Ready)
	return nil
}
