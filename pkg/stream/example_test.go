package stream_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"log/slog"
	"net"
	"time"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/stream"
	"tunnel.example/tunnel/pkg/tunnel"
)

// echo is an edge's module that dials a target in memory, which sends back what it gets.
type echo struct{}

func (echo) Name() string { return "echo" }

func (echo) Routes() map[string]tunnel.Handler {
	return map[string]tunnel.Handler{
		tunnel.TypeOpen: func(_ context.Context, in *tunnel.Incoming) error {
			return in.Serve(func(context.Context, tunnel.Request) (net.Conn, error) {
				near, far := net.Pipe()
				go func() {
					io.Copy(far, far)
					far.Close()
				}()
				return near, nil
			})
		},
	}
}

func (echo) Run(ctx context.Context) error { <-ctx.Done(); return nil }

// oneToken lets node1 join with its token.
type oneToken struct{}

func (oneToken) Authenticate(_ context.Context, c auth.Credential) (auth.Grant, error) {
	if c.Node != "node1" || c.Token.Reveal() != "secret" {
		return auth.Grant{}, auth.ErrUnauthenticated
	}
	return auth.Grant{Node: "node1", By: "token"}, nil
}

// A cloud and an edge in one process, and a conn through both.
func Example() {
	certificate, pool, err := certificateOf("cloud")
	if err != nil {
		fmt.Println(err)
		return
	}
	log := slog.New(slog.DiscardHandler)
	ctx, stop := context.WithTimeout(context.Background(), time.Minute)
	defer stop()
	ended := make(chan error, 2)

	// The cloud.
	dir := &tunnel.Directory{}
	srv, err := stream.NewServer(stream.ServerConfig{
		Listen: "127.0.0.1:0", TLS: &tls.Config{Certificates: []tls.Certificate{certificate}},
		Auth: oneToken{}, Log: log,
	}, dir)
	if err != nil {
		fmt.Println(err)
		return
	}
	go func() { ended <- tunnel.Run(ctx, srv) }()
	for srv.Addr() == nil {
		select {
		case err := <-ended:
			fmt.Println("the cloud does not listen:", err)
			return
		case <-time.After(time.Millisecond):
		}
	}

	// The edge.
	mods := []tunnel.Module{echo{}}
	cl, err := stream.NewClient(stream.ClientConfig{
		Address: srv.Addr().String(), Node: "node1", Log: log, Connections: stream.DefaultConnections,
		TLS:   func() *tls.Config { return &tls.Config{RootCAs: pool, ServerName: "cloud"} },
		Token: auth.StaticToken("secret"),
	}, mods...)
	if err != nil {
		fmt.Println(err)
		return
	}
	go func() { ended <- tunnel.Run(ctx, append(mods, cl)...) }()
	for !dir.Holds("node1") {
		select {
		case err := <-ended:
			fmt.Println("the edge does not join:", err)
			return
		case <-time.After(time.Millisecond):
		}
	}

	// A front door of the cloud.
	conn, err := dir.Dial(ctx, tunnel.Request{Node: "node1", Category: "echo", Addr: "target:1"})
	if err != nil {
		fmt.Println(err)
		return
	}
	answer := make([]byte, len("hello"))
	fmt.Fprint(conn, "hello")
	_, err = io.ReadFull(conn, answer)
	fmt.Println(string(answer), err)
	conn.Close()

	stop()
	fmt.Println(<-ended, <-ended)
	// Output:
	// hello <nil>
	// <nil> <nil>
}

// certificateOf makes a server's certificate, and the pool with its CA.
func certificateOf(name string) (tls.Certificate, *x509.CertPool, error) {
	ca, err := auth.NewCA("example", time.Hour)
	if err != nil {
		return tls.Certificate{}, nil, err
	}
	cert, key, err := ca.Issue(auth.Leaf{CommonName: name, DNSNames: []string{name}, Server: true, TTL: time.Hour})
	if err != nil {
		return tls.Certificate{}, nil, err
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(ca.CertPEM())
	pair, err := tls.X509KeyPair(cert, key)
	return pair, pool, err
}
