package egress

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log/slog"
	"net"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/internal/testkit/testca"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/konnectivity"
	"tunnel.example/tunnel/pkg/tunnel"
)

// toAgent dials every address through the agent of node n1.
type toAgent struct{ *tunnel.Directory }

func (d toAgent) Dial(ctx context.Context, r tunnel.Request) (net.Conn, error) {
	r.Node = "n1"
	return d.Directory.Dial(ctx, r)
}

// anybody authenticates every agent as the node that it claims.
type anybody struct{}

func (anybody) Authenticate(_ context.Context, c auth.Credential) (auth.Grant, error) {
	return auth.Grant{Node: tunnel.NodeName(c.Node), By: "token"}, nil
}

// unbounded is a budget without limits.
type unbounded struct{}

func (unbounded) Admit(context.Context, tunnel.Request) *tunnel.Refusal { return nil }
func (unbounded) Dialled(tunnel.Request, error)                         {}
func (unbounded) Over()                                                 {}

// behindAgent runs konnectivity.Agents and an agent of node n1 that has joined them. It returns a dialer
// for that node.
func behindAgent(t *testing.T) toAgent {
	t.Helper()
	ca := testca.New(t, "agents")
	cert := ca.Pair(t, auth.Leaf{CommonName: "cloud", IPs: []net.IP{net.IPv4(127, 0, 0, 1)}, Server: true})
	pool := ca.Pool()
	dir, addr, log := new(tunnel.Directory), testkit.FreeAddress(t), slog.New(slog.DiscardHandler)
	agents := konnectivity.NewAgents(konnectivity.AgentsConfig{
		Listen: addr, TLS: &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{cert}}, Auth: anybody{},
		Joining: 100, JoiningPerAddress: 50, JoinTimeout: 10 * time.Second, Log: log,
	}, dir)
	agent, err := konnectivity.NewAgent(konnectivity.AgentConfig{
		Servers: []string{"tls://" + addr}, Node: "n1", Budget: unbounded{}, Log: log,
		TLS:   func() *tls.Config { return &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12} },
		Token: auth.StaticToken("token"),
		Dial: func(ctx context.Context, q tunnel.Request) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, q.Network, q.Addr)
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running errgroup.Group
	running.Go(func() error { return agents.Run(ctx) })
	running.Go(func() error { return agent.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		if err := running.Wait(); err != nil {
			t.Error(err)
		}
	})
	joined := func() bool { return agent.Ready() == nil && dir.Holds("n1") }
	for late := time.Now().Add(20 * time.Second); !joined(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(late) {
			t.Fatal("the agent does not join")
		}
	}
	return toAgent{dir}
}

// Over TLS, a target behind a konnectivity agent sees the end of an upload when the caller closes its
// connection. A caller that half-closes its connection still gets the answer.
func TestAgentCallerCloses(t *testing.T) {
	o := newOverTLSTo(t, behindAgent(t), &nodes{refuse: map[tunnel.NodeName]error{}, changed: make(chan struct{})})
	connect := func(serve func(c *net.TCPConn)) *tls.Conn {
		addr := testkit.Serve(t, serve)
		c, err := tls.Dial("tcp", o.connect, o.caller)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		fmt.Fprintf(c, "CONNECT %s HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n", addr)
		head := make([]byte, len("HTTP/1.1 200 Connection Established\r\n\r\n"))
		if _, err := io.ReadFull(c, head); err != nil {
			t.Fatal(err)
		}
		io.WriteString(c, "upload")
		return c
	}
	got := make(chan string, 1)
	c := connect(func(c *net.TCPConn) {
		b, err := io.ReadAll(c)
		got <- fmt.Sprint(string(b), err)
	})
	c.Close()
	select {
	case g := <-got:
		if g != "upload<nil>" {
			t.Errorf("the target sees %s", g)
		}
	case <-time.After(8 * time.Second): // less than the idle timeout of a half-closed konnectivity.Conn
		t.Error("the target waits for the end of the upload")
	}
	c = connect(func(c *net.TCPConn) {
		io.ReadFull(c, make([]byte, len("upload")))
		time.Sleep(200 * time.Millisecond)
		io.WriteString(c, "answer")
	})
	c.CloseWrite()
	if b, err := io.ReadAll(c); err != nil || string(b) != "answer" {
		t.Errorf("half-closed: %q, %v", b, err)
	}
}
