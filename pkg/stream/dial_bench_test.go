package stream

import (
	"context"
	"crypto/tls"
	"io"
	"log/slog"
	"net"
	"testing"
	"time"

	"tunnel/pkg/auth"
	"tunnel/pkg/tunnel"
)

// BenchmarkDial measures what a new conn costs both ends, from the open request to the
// last bookkeeping, with a target in memory.
func BenchmarkDial(b *testing.B) {
	ca, err := auth.NewCA("bench", time.Hour)
	if err != nil {
		b.Fatal(err)
	}
	cert, key, err := ca.Issue(auth.Leaf{CommonName: "cloud", DNSNames: []string{"cloud"}, Server: true, TTL: time.Hour})
	if err != nil {
		b.Fatal(err)
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		b.Fatal(err)
	}
	log := slog.New(slog.NewTextHandler(io.Discard, nil)) //nolint:sloglint // what a logger costs counts
	dir := &tunnel.Directory{}
	server, err := NewServer(ServerConfig{
		Listen: "127.0.0.1:0", TLS: &tls.Config{Certificates: []tls.Certificate{pair}},
		Auth: &fakeAuth{}, Log: log, Software: "bench", Limits: Limits{Opens: 1e9},
	}, dir)
	if err != nil {
		b.Fatal(err)
	}
	run(b, server)
	for server.Addr() == nil {
		time.Sleep(time.Millisecond)
	}
	client, err := NewClient(ClientConfig{
		Address: server.Addr().String(), TLS: func() *tls.Config { return &tls.Config{RootCAs: poolOf(ca), ServerName: "cloud"} },
		Node: "edge1", Token: func() (auth.Secret, error) { return "token-edge1", nil },
		Log: log, Software: "bench",
	}, &edgeModule{"tcp", func(context.Context, tunnel.Request) (net.Conn, error) {
		near, far := net.Pipe()
		far.Close()
		return near, nil
	}})
	if err != nil {
		b.Fatal(err)
	}
	run(b, client)
	for !dir.Holds("edge1") {
		time.Sleep(time.Millisecond)
	}
	b.ReportAllocs()
	for b.Loop() {
		c, err := dir.Dial(b.Context(), tunnel.Request{Node: "edge1", Category: "tcp", Network: "tcp", Addr: "target:1"})
		if err != nil {
			b.Fatal(err)
		}
		c.Close()
	}
}

// run runs m until the benchmark ends.
func run(b *testing.B, m tunnel.Module) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- m.Run(ctx) }()
	b.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			b.Error(err)
		}
	})
}
