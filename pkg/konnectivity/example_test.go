package konnectivity_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"log/slog"
	"net"
	"time"

	"golang.org/x/sync/errgroup"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/konnectivity"
	"tunnel.example/tunnel/pkg/tunnel"
)

// A cloud lets stock konnectivity-agents join as its nodes. Front doors reach them by directory.Dial.
func ExampleAgents() {
	serve := func(ctx context.Context, cert tls.Certificate, gate auth.Authenticator) error {
		directory := new(tunnel.Directory)
		agents := konnectivity.NewAgents(konnectivity.AgentsConfig{
			Listen:  "0.0.0.0:8091",
			TLS:     &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{cert}},
			Auth:    gate, // decides which token or certificate is which node
			Joining: 1024, JoiningPerAddress: 64, JoinTimeout: 10 * time.Second,
			Log: slog.Default(),
		}, directory)
		var g errgroup.Group
		g.Go(func() error { return agents.Run(ctx) })
		g.Go(func() error {
			request := tunnel.Request{Node: "edge1", Category: "egress", Network: "tcp", Addr: "127.0.0.1:10250"}
			conn, err := directory.Dial(ctx, request)
			if err != nil {
				return err
			}
			return conn.Close()
		})
		return g.Wait()
	}
	_ = serve
}

// An edge joins the stock proxy-servers behind a load balancer, and dials what they ask for.
func ExampleAgent() {
	serve := func(ctx context.Context, cas *x509.CertPool, policy *auth.Policy, budget tunnel.Budget) error {
		agent, err := konnectivity.NewAgent(konnectivity.AgentConfig{
			Servers: []string{"tls://proxy-servers.example.com:8132"},
			TLS:     func() *tls.Config { return &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: cas} },
			Token:   auth.TokenFile("token"),
			Node:    "edge1", Identifiers: "ipv4=10.0.0.5&cidr=10.88.1.0/24",
			Dial: func(ctx context.Context, r tunnel.Request) (net.Conn, error) {
				return policy.DialRequest(ctx, r) // decides which targets are allowed
			},
			Budget: budget,
			Log:    slog.Default(),
		})
		if err != nil {
			return err
		}
		return agent.Run(ctx)
	}
	_ = serve
}
