package konnectivity

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/internal/testkit/testca"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/tunnel"
)

// names authenticates nodes whose token is "token of NODE", or that have a node's certificate.
type names struct{ revoked chan struct{} }

func (n names) Authenticate(_ context.Context, c auth.Credential) (auth.Grant, error) {
	if len(c.Chain) > 0 {
		if node, err := auth.NodeOf(c.Chain[0]); err != nil || string(node) != c.Node {
			return auth.Grant{}, auth.ErrUnauthenticated
		}
	} else if c.Token.Reveal() != "token of "+c.Node {
		return auth.Grant{}, auth.ErrUnauthenticated
	}
	return auth.Grant{Node: tunnel.NodeName(c.Node), By: "token", Revoked: n.revoked}, nil
}

// agentsRig runs Agents.
type agentsRig struct {
	*Agents
	dir     *tunnel.Directory
	ca      testca.CA
	pool    *x509.CertPool
	addr    string
	revoked chan struct{}
	budget  budget // of the agents that join
	stop    func()
	// agentGrace is the grace period of agents that join from now on; 0: a second.
	agentGrace time.Duration
}

// budget allows one dial at a time, or any number if wide.
type budget struct {
	wide           bool
	dialled, conns atomic.Int64
}

func (b *budget) Admit(context.Context, tunnel.Request) *tunnel.Refusal {
	if b.dialled.Add(1) > 1 && !b.wide {
		b.dialled.Add(-1)
		return tunnel.Refusef(tunnel.Overloaded, "limit dials: one")
	}
	b.conns.Add(1)
	return nil
}

func (b *budget) Dialled(tunnel.Request, error) { b.dialled.Add(-1) }
func (b *budget) Over()                         { b.conns.Add(-1) }

func newAgentsRig(t *testing.T, change func(*AgentsConfig)) *agentsRig {
	t.Helper()
	ca := testca.New(t, "test")
	cert := ca.Pair(t, auth.Leaf{CommonName: "cloud", IPs: []net.IP{net.IPv4(127, 0, 0, 1)}, Server: true})
	r := &agentsRig{dir: new(tunnel.Directory), ca: ca, pool: ca.Pool(), revoked: make(chan struct{}),
		budget: budget{wide: true}}
	cfg := AgentsConfig{
		Listen: "127.0.0.1:0", TLS: &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{cert}},
		Auth:    names{r.revoked},
		Joining: 100, JoiningPerAddress: 50, JoinTimeout: 10 * time.Second, Counters: new(tunnel.Counters),
		Log: slog.New(slog.DiscardHandler),
	}
	if change != nil {
		change(&cfg)
	}
	r.Agents = NewAgents(cfg, r.dir)
	r.grace = time.Second
	r.stop = testkit.Run(t, r.Run).Stop
	testkit.Eventually(t, "the door is open", func() bool { return r.Ready() == nil })
	r.mu.Lock()
	r.addr = r.Agents.addr.String()
	r.mu.Unlock()
	return r
}

// agent runs an Agent until it has joined. stop ends it.
func (r *agentsRig) agent(t *testing.T, node tunnel.NodeName, dial tunnel.DialFunc) (a *Agent, stop func()) {
	t.Helper()
	if dial == nil {
		dial = func(ctx context.Context, q tunnel.Request) (net.Conn, error) {
			c, err := new(net.Dialer).DialContext(ctx, q.Network, q.Addr)
			if err != nil {
				return nil, tunnel.Refusef(tunnel.Refused, "%v", err)
			}
			return c, nil
		}
	}
	a, err := NewAgent(AgentConfig{
		Servers: []string{"tls://" + r.addr}, Node: node, Identifiers: "cidr=10.1.0.0/16", Dial: dial,
		TLS:    func() *tls.Config { return &tls.Config{RootCAs: r.pool, MinVersion: tls.VersionTLS12} },
		Token:  auth.StaticToken(auth.Secret("token of " + string(node))),
		Budget: &r.budget, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	a.grace, a.quiet = cmp.Or(r.agentGrace, time.Second), 100*time.Millisecond
	stop = testkit.Run(t, a.Run).Stop
	testkit.Eventually(t, "the agent joins", func() bool { return a.Ready() == nil && r.dir.Holds(node) })
	return a, stop
}

func (r *agentsRig) dial(t *testing.T, node tunnel.NodeName, addr string) net.Conn {
	t.Helper()
	c, err := r.dir.Dial(t.Context(), tunnel.Request{Node: node, Category: category, Network: "tcp", Addr: addr})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tunnel.Reset(c) })
	return c
}

// conns returns the number of open conns of a node.
func (r *agentsRig) conns(node tunnel.NodeName) int64 {
	if s := r.dir.Lookup(node); s != nil {
		return s.Conns.Load()
	}
	return 0
}

func TestAgentConns(t *testing.T) {
	r := newAgentsRig(t, nil)
	r.agent(t, "n1", nil)
	if reach := r.dir.Reach()["n1"]; reach != "cidr=10.1.0.0%2F16&host=n1" {
		t.Errorf("the agent says that it reaches %q", reach)
	}
	addr := testkit.Serve(t, testkit.Echo)
	var all sync.WaitGroup
	for i := range 50 {
		all.Go(func() {
			c, err := r.dir.Dial(t.Context(), tunnel.Request{Node: "n1", Category: category, Network: "tcp", Addr: addr})
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			want := testkit.Random(1000 * i * i)
			go c.Write(want)
			got := make([]byte, len(want))
			if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(got, want) {
				t.Errorf("%d bytes do not come back: %v", len(want), err)
			}
		})
	}
	all.Wait()
	testkit.Eventually(t, "no conn is left", func() bool { return r.conns("n1") == 0 })
	l := r.dir.Lookup("n1").Link.(*agentLink)
	testkit.Eventually(t, "no id is left", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return len(l.conns) == 0 && l.unread == 0
	})
}

// All bytes of a target arrive before its end.
func TestAgentTargetEnds(t *testing.T) {
	r := newAgentsRig(t, nil)
	r.agent(t, "n1", nil)
	want := testkit.Random(3 << 20)
	c := r.dial(t, "n1", testkit.Serve(t, func(c *net.TCPConn) { c.Write(want) }))
	if got, err := io.ReadAll(c); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%d bytes of %d, %v", len(got), len(want), err)
	}
	if _, err := c.Write([]byte("x")); err == nil {
		t.Error("who has closed takes bytes")
	}
}

// A caller that has half-closed its conn still gets the answer.
func TestAgentHalfClose(t *testing.T) {
	r := newAgentsRig(t, nil)
	r.agent(t, "n1", nil)
	c := r.dial(t, "n1", testkit.Serve(t, func(c *net.TCPConn) {
		io.ReadFull(c, make([]byte, 4))
		time.Sleep(100 * time.Millisecond)
		io.WriteString(c, "answer")
	}))
	io.WriteString(c, "ask!")
	c.(interface{ CloseWrite() error }).CloseWrite()
	if got, err := io.ReadAll(c); err != nil || string(got) != "answer" {
		t.Errorf("%q, %v", got, err)
	}
}

func TestAgentDialFails(t *testing.T) {
	r := newAgentsRig(t, nil)
	asked, gaveUp := make(chan struct{}), make(chan struct{})
	r.agent(t, "n1", func(ctx context.Context, q tunnel.Request) (net.Conn, error) {
		if q.Addr == "no:1" {
			return nil, tunnel.Refusef(tunnel.Denied, "not that")
		}
		close(asked)
		<-ctx.Done()
		close(gaveUp)
		return nil, ctx.Err()
	})
	dial := func(ctx context.Context, addr string) error {
		_, err := r.dir.Dial(ctx, tunnel.Request{Node: "n1", Category: category, Network: "tcp", Addr: addr})
		return err
	}
	if err := dial(t.Context(), "no:1"); err == nil || tunnel.CodeOf(err) != tunnel.Denied {
		t.Errorf("a denied dial: %v", err)
	}
	if err := dial(testkit.Deadline(t.Context(), asked), "hang:1"); err == nil || tunnel.CodeOf(err) != tunnel.Timeout {
		t.Errorf("a dial that takes too long: %v", err)
	}
	<-gaveUp
	if n := r.conns("n1"); n != 0 {
		t.Errorf("%d conns are left", n)
	}
}

// Targets that do not answer leave room for dials to other targets of the node.
func TestAgentBlackHoles(t *testing.T) {
	r := newAgentsRig(t, func(c *AgentsConfig) { c.Dials = 16 })
	r.agent(t, "n1", func(ctx context.Context, q tunnel.Request) (net.Conn, error) {
		if strings.HasPrefix(q.Addr, "hang") {
			<-ctx.Done()
			return nil, ctx.Err()
		}
		return new(net.Dialer).DialContext(ctx, q.Network, q.Addr)
	})
	addr := testkit.Serve(t, testkit.Echo)
	r.dial(t, "n1", addr).Close()
	ctx, cancel := context.WithCancel(t.Context())
	var callers sync.WaitGroup
	for i := range 64 {
		callers.Go(func() {
			r.dir.Dial(ctx, tunnel.Request{Node: "n1", Network: "tcp", Addr: fmt.Sprintf("hang%d:1", i%8)})
		})
	}
	testkit.Eventually(t, "so many dials wait as may", func() bool { return r.cfg.Counters.Waiting.Load() > 0 })
	for range 10 {
		r.dial(t, "n1", addr).Close()
	}
	cancel()
	callers.Wait()
}

// Dials of proxy-servers count against the limits of the edge.
func TestAgentBudget(t *testing.T) {
	r := newAgentsRig(t, nil)
	r.budget.wide = false
	dialled := make(chan struct{})
	r.agent(t, "n1", func(ctx context.Context, q tunnel.Request) (net.Conn, error) {
		if q.Addr == "hang:1" {
			close(dialled)
			<-ctx.Done()
			return nil, ctx.Err()
		}
		return new(net.Dialer).DialContext(ctx, q.Network, q.Addr)
	})
	addr := testkit.Serve(t, testkit.Echo)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go r.dir.Dial(ctx, tunnel.Request{Node: "n1", Network: "tcp", Addr: "hang:1"})
	<-dialled
	request := tunnel.Request{Node: "n1", Network: "tcp", Addr: addr}
	if _, err := r.dir.Dial(t.Context(), request); tunnel.CodeOf(err) != tunnel.Overloaded {
		t.Errorf("a dial that is one too many: %v", err)
	}
	cancel()
	testkit.Eventually(t, "the dial has ended",
		func() bool { return r.budget.dialled.Load() == 0 && r.budget.conns.Load() == 0 })
	c := r.dial(t, "n1", addr)
	if d, n := r.budget.dialled.Load(), r.budget.conns.Load(); d != 0 || n != 1 {
		t.Errorf("with a conn: %d dials, %d conns", d, n)
	}
	c.Close()
	testkit.Eventually(t, "the conn is over", func() bool { return r.budget.conns.Load() == 0 })
}

// At most maxServers servers are joined behind an address, however many the servers announce.
func TestAgentServers(t *testing.T) {
	w := &endpoint{servers: make(map[string]bool), want: 1, lost: make(chan struct{}, 1)}
	if err := w.add(strings.Repeat("x", maxServerID+1), 1); err == nil {
		t.Error("a long id is held")
	}
	for i := range maxServers {
		if err := w.add(fmt.Sprint("s", i), 1<<30); err != nil {
			t.Fatalf("server %d: %v", i, err)
		}
	}
	if err := w.add("s0", 1<<30); !errors.Is(err, errDuplicate) {
		t.Errorf("the same server: %v", err)
	}
	if err := w.add("another", 1<<30); err == nil || !w.full() {
		t.Errorf("one too many is held (%v), or it looks for more", err)
	}
	w.remove("s0")
	if err := w.add("another", 1<<30); err != nil {
		t.Errorf("in the place of one that is lost: %v", err)
	}
}

// The refusal follows from the cause in an agent's error text, not from words in a target's name.
func TestAgentRefusal(t *testing.T) {
	for text, want := range map[string]tunnel.Code{
		"dial tcp 10.0.0.1:80: connect: connection refused":                             tunnel.Refused,
		"dial tcp 10.0.0.1:80: i/o timeout":                                             tunnel.Timeout,
		"dial tcp 10.0.0.1:80: connect: connection timed out":                           tunnel.Timeout,
		"dial tcp 10.0.0.1:80: connect: no route to host":                               tunnel.Unreachable,
		"dial tcp 10.0.0.1:80: connect: network is unreachable":                         tunnel.Unreachable,
		"dial tcp: lookup refused.example.com on 10.0.0.2:53: no such host":             tunnel.Unreachable,
		"dial tcp: lookup denied.example.com: i/o timeout":                              tunnel.Timeout,
		"dial tcp: lookup timeout.example.com on 10.0.0.2:53: server misbehaving":       tunnel.Internal,
		"dial tcp 10.0.0.1:80: socket: too many open files":                             tunnel.Overloaded,
		tunnel.Refusef(tunnel.Denied, "10.0.0.1:80 is not in allow").Error():            tunnel.Denied,
		tunnel.Refusef(tunnel.Unreachable, "x:1 timed out, connection refused").Error(): tunnel.Unreachable,
		"denied": tunnel.Denied,
		"":       tunnel.Internal,
	} {
		if got := refusalOf(text); got.Code != want {
			t.Errorf("%q is %v, want %v", text, got.Code, want)
		}
	}
	if r := refusalOf("denied: not that"); r.Error() != "denied: not that" {
		t.Errorf("our own edge is said to say %q", r)
	}
	if r := refusalOf(strings.Repeat("ü", maxReason)); len(r.Text) > maxReason || !utf8.ValidString(r.Text) {
		t.Errorf("a long text becomes %q", r.Text)
	}
}

func TestAgentLost(t *testing.T) {
	r := newAgentsRig(t, nil)
	dialled := make(chan struct{})
	_, stop := r.agent(t, "n1", func(ctx context.Context, q tunnel.Request) (net.Conn, error) {
		if q.Addr == "hang:1" {
			close(dialled)
			<-ctx.Done()
			return nil, ctx.Err()
		}
		return new(net.Dialer).DialContext(ctx, q.Network, q.Addr)
	})
	c := r.dial(t, "n1", testkit.Serve(t, testkit.Echo))
	pending := make(chan error, 1)
	go func() {
		_, err := r.dir.Dial(t.Context(), tunnel.Request{Node: "n1", Category: category, Network: "tcp", Addr: "hang:1"})
		pending <- err
	}()
	<-dialled
	r.dir.Lookup("n1").Close(errors.New("cut"))
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, tunnel.ErrReset) {
		t.Errorf("a conn whose agent is lost: %v", err)
	}
	if err := <-pending; err == nil || tunnel.CodeOf(err) != tunnel.Gone {
		t.Errorf("a dial whose agent is lost: %v", err)
	}
	testkit.Eventually(t, "the agent is back",
		func() bool { s := r.dir.Lookup("n1"); return s != nil && !tunnel.IsClosed(s.Done()) })
	stop()
	testkit.Eventually(t, "the agent has gone", func() bool { return !r.dir.Holds("n1") })
}

// An agent joins the server again while a slow target still receives bytes of a closed conn.
func TestAgentLostBehindClose(t *testing.T) {
	r := newAgentsRig(t, nil)
	addr := testkit.Serve(t, func(c *net.TCPConn) {
		for b := make([]byte, 1<<10); t.Context().Err() == nil; time.Sleep(50 * time.Millisecond) {
			if _, err := c.Read(b); err != nil {
				return
			}
		}
	})
	r.agent(t, "n1", nil)
	c := r.dial(t, "n1", addr)
	if _, err := c.Write(make([]byte, 3<<20)); err != nil {
		t.Fatal(err)
	}
	c.Close()
	l := r.dir.Lookup("n1").Link.(*agentLink)
	testkit.Eventually(t, "the agent knows that the conn is closed", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return len(l.conns) == 0
	})
	l.Close(errors.New("cut"))
	testkit.Eventually(t, "the agent is back", func() bool { s := r.dir.Lookup("n1"); return s != nil && s.Link != l })
}

// A reader without progress loses its conn; the others go on.
func TestAgentStalledReader(t *testing.T) {
	r := newAgentsRig(t, nil)
	r.agent(t, "n1", nil)
	endless := testkit.Serve(t, func(c *net.TCPConn) {
		b := make([]byte, 64<<10)
		for {
			if _, err := c.Write(b); err != nil {
				return
			}
		}
	})
	stalled := r.dial(t, "n1", endless)
	other := r.dial(t, "n1", testkit.Serve(t, testkit.Echo))
	testkit.Eventually(t, "the stalled conn is ended",
		func() bool { return r.cfg.Counters.LimitedBy(tunnel.LimitUnread) == 1 })
	want := testkit.Random(1 << 20)
	go other.Write(want)
	got := make([]byte, len(want))
	if _, err := io.ReadFull(other, got); err != nil || !bytes.Equal(got, want) {
		t.Errorf("beside a stalled reader: %v", err)
	}
	if _, err := io.Copy(io.Discard, stalled); !errors.Is(err, tunnel.ErrReset) {
		t.Errorf("the stalled conn ends with %v", err)
	}
}

// A slow reader gets all bytes.
func TestAgentSlowReader(t *testing.T) {
	r := newAgentsRig(t, nil)
	r.agent(t, "n1", nil)
	want := testkit.Random(12 << 20)
	c := r.dial(t, "n1", testkit.Serve(t, func(c *net.TCPConn) { c.Write(want) }))
	var got []byte
	b := make([]byte, 256<<10)
	for {
		n, err := c.Read(b)
		got = append(got, b[:n]...)
		if err != nil {
			if !errors.Is(err, io.EOF) {
				t.Fatal(err)
			}
			break
		}
		time.Sleep(2 * time.Millisecond)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%d bytes of %d", len(got), len(want))
	}
}

// What a target has sent before its reset arrives, also at a caller that reads later.
func TestAgentResetBehindBytes(t *testing.T) {
	r := newAgentsRig(t, nil)
	r.agent(t, "n1", nil)
	want := bytes.Repeat([]byte("before the reset"), 1<<10) // so few that the kernel of the target sends them at once
	for range 20 {
		c := r.dial(t, "n1", testkit.Serve(t, func(c *net.TCPConn) {
			io.ReadFull(c, make([]byte, 1))
			c.Write(want) // it closes with unread input: a reset
		}))
		io.WriteString(c, "xy")
		one := c.(*Conn)
		testkit.Eventually(t, "the reset has come", func() bool {
			one.m.mu.Lock()
			defer one.m.mu.Unlock()
			return one.closeReceived || one.aborted
		})
		got, err := io.ReadAll(c)
		if !bytes.Equal(got, want) || !errors.Is(err, tunnel.ErrReset) {
			t.Fatalf("%d of %d bytes, and then %v", len(got), len(want), err)
		}
		c.Close()
	}
}

// The same through what front doors do, for callers that read at once. A caller that does not read is reset after a
// while, and nothing is left.
func TestAgentResetBehindBytesOfASplice(t *testing.T) {
	r := newAgentsRig(t, nil)
	r.agent(t, "n1", nil)
	splice := func(want []byte) (caller *net.TCPConn, c *Conn, over chan struct{}) {
		c = r.dial(t, "n1", testkit.Serve(t, func(c *net.TCPConn) {
			io.ReadFull(c, make([]byte, 1))
			c.Write(want)
		})).(*Conn)
		l := testkit.NewTarget(t)
		dialled, err := net.Dial("tcp", l.Address())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { dialled.Close() })
		near := l.Next(t)
		over = make(chan struct{})
		go func() {
			tunnel.Splice(t.Context(), near, c)
			close(over)
		}()
		io.WriteString(dialled, "xy")
		return dialled.(*net.TCPConn), c, over
	}
	want := bytes.Repeat([]byte("before the reset"), 1<<10)
	for range 50 {
		began := time.Now()
		caller, _, over := splice(want)
		got, err := io.ReadAll(caller)
		late := time.Since(began) > time.Second // then the reset need not wait for the bytes any more
		if !late && !bytes.Equal(got, want) || !errors.Is(err, syscall.ECONNRESET) {
			t.Fatalf("%d of %d bytes, and then %v", len(got), len(want), err)
		}
		<-over
	}
	_, stalled, over := splice(bytes.Repeat(want, 256)) // 4 MiB: the caller's socket does not take them
	testkit.Eventually(t, "the conn is reset", func() bool {
		stalled.m.mu.Lock()
		defer stalled.m.mu.Unlock()
		return stalled.closeReceived || stalled.aborted
	})
	stalled.m.mu.Lock()
	stalled.lastRead = time.Time{} // it has stalled for long
	if stalled.idleTimer != nil {
		stalled.idleTimer.Reset(0)
	}
	stalled.m.mu.Unlock()
	select {
	case <-over:
	case <-time.After(time.Minute):
		t.Error("a conn whose caller does not read is never freed")
	}
}

func TestAgentDrains(t *testing.T) {
	r := newAgentsRig(t, nil)
	r.agentGrace = 20 * time.Second
	_, stop := r.agent(t, "n1", nil)
	r.agent(t, "n2", nil)
	addr := testkit.Serve(t, testkit.Echo)
	c := r.dial(t, "n1", addr)
	ended := make(chan struct{})
	go func() { stop(); close(ended) }()
	first := r.dir.Lookup("n1")
	testkit.Eventually(t, "the agent leaves", func() bool { return first.Leaving.Load() })
	n2 := r.dir.Lookup("n2")
	for range 5 {
		before := n2.Conns.Load()
		r.dial(t, "", addr)
		if n2.Conns.Load() != before+1 {
			t.Error("a dial of any node went to the one that leaves")
		}
	}
	r.dial(t, "n1", addr).Close() // by the leaving agent: no other has node n1
	io.WriteString(c, "still there")
	if _, err := io.ReadFull(c, make([]byte, 11)); err != nil {
		t.Errorf("a conn of an agent that leaves: %v", err)
	}
	c.Close()
	<-ended
}

// raw opens a stream of AgentService. Its windows are fixed: dynamic ones would accept megabytes from us
// before a peer that does not read blocks us.
func (r *agentsRig) raw(t *testing.T, md ...string) (grpc.ClientStream, context.CancelFunc) {
	t.Helper()
	const window = 64 << 10
	conf := &tls.Config{RootCAs: r.pool, MinVersion: tls.VersionTLS12}
	cc, err := grpc.NewClient(r.addr, grpc.WithTransportCredentials(credentials.NewTLS(conf)),
		grpc.WithStaticStreamWindowSize(window), grpc.WithStaticConnWindowSize(window),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(NewCodec())))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cc.Close() })
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	s, err := cc.NewStream(metadata.NewOutgoingContext(ctx, metadata.Pairs(md...)),
		&grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, "/AgentService/Connect")
	if err != nil {
		t.Fatal(err)
	}
	return s, cancel
}

// Unauthenticated peers get one and the same refusal, which does not tell them what was checked, and in
// which order. An authenticated node is told what is wrong.
func TestWhoMayBeAnAgent(t *testing.T) {
	r := newAgentsRig(t, func(c *AgentsConfig) { c.Replicas = func() int { return 2 } })
	refusal := func(md ...string) *status.Status {
		s, _ := r.raw(t, md...)
		h, err := s.Header()
		if err == nil {
			err = s.RecvMsg(new(Packet))
		}
		if len(h.Get("serverid"))+len(h.Get("servercount")) != 0 {
			t.Errorf("%v: a header %v before the refusal %v", md, h, err)
		}
		return status.Convert(err)
	}
	want := status.New(codes.Unauthenticated, auth.ErrUnauthenticated.Error())
	strangers := map[string][]string{
		"nobody":          {"agentid", "n1"},
		"no metadata":     {},
		"no name":         {"authorization", "Bearer token of n1"},
		"an empty name":   {"agentid", "", "authorization", "Bearer token of n1"},
		"two names":       {"agentid", "n1", "agentid", "n2", "authorization", "Bearer token of n1"},
		"another's name":  {"agentid", "n2", "authorization", "Bearer token of n1"},
		"no bearer":       {"agentid", "n1", "authorization", "token of n1"},
		"an empty bearer": {"agentid", "n1", "authorization", "Bearer "},
		"two bearers": {"agentid", "n1", "authorization", "Bearer token of n1", "authorization",
			"Bearer token of n1"},
		"a wrong token":                  {"agentid", "n1", "authorization", "Bearer x"},
		"a wrong token, bad identifiers": {"agentid", "n1", "authorization", "Bearer x", "agentidentifiers", "x=1"},
		"a wrong token, identifiers twice": {"agentid", "n1", "authorization", "Bearer x", "agentidentifiers", "",
			"agentidentifiers", ""},
		"a wrong token, long identifiers": {"agentid", "n1", "authorization", "Bearer x", "agentidentifiers",
			strings.Repeat("host=n&", maxReach/7+1)},
	}
	for name, md := range strangers {
		if got := refusal(md...); got.Code() != want.Code() || got.Message() != want.Message() {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
	}
	known := map[string][]string{
		"bad identifiers":         {"agentid", "n1", "authorization", "Bearer token of n1", "agentidentifiers", "x=1"},
		"a host that no name has": {"agentid", "n1", "authorization", "Bearer token of n1", "agentidentifiers", "host=%ff"},
		"identifiers twice": {"agentid", "n1", "authorization", "Bearer token of n1", "agentidentifiers", "",
			"agentidentifiers", ""},
		"long identifiers": {"agentid", "n1", "authorization", "Bearer token of n1", "agentidentifiers",
			strings.Repeat("host=n&", maxReach/7+1)},
	}
	for name, md := range known {
		if got := refusal(md...); got.Code() != codes.InvalidArgument ||
			!strings.Contains(got.Message(), "agentidentifiers") {
			t.Errorf("%s: %v", name, got)
		}
	}
	if n := r.cfg.Counters.JoinsRefused.Load(); n != uint64(len(strangers)+len(known)) || r.dir.Len() != 0 {
		t.Errorf("%d joins refused, %d nodes", n, r.dir.Len())
	}
	s, _ := r.raw(t, "agentid", "n1", "authorization", "Bearer token of n1 ")
	h, err := s.Header()
	if err != nil || fmt.Sprint(h.Get("serverid"), h.Get("servercount")) != "["+r.id+"] [3]" {
		t.Errorf("header %v, %v", h, err)
	}
	testkit.Eventually(t, "the agent is a node", func() bool { return r.dir.Holds("n1") })
	close(r.revoked)
	if err := s.RecvMsg(new(Packet)); status.Code(err) != codes.Unauthenticated {
		t.Errorf("revoked: %v", err)
	}
}

// A joined agent no longer holds a stranger's place. A peer that does not join in time is disconnected.
func TestAgentStrangers(t *testing.T) {
	r := newAgentsRig(t, func(c *AgentsConfig) { c.JoiningPerAddress = 1 })
	conf := &tls.Config{RootCAs: r.pool, MinVersion: tls.VersionTLS12, NextProtos: []string{"h2"}}
	for _, node := range []string{"n1", "n2"} {
		s, _ := r.raw(t, "agentid", node, "authorization", "Bearer token of "+node)
		if _, err := s.Header(); err != nil || !r.dir.Holds(tunnel.NodeName(node)) {
			t.Fatalf("%s has not joined: %v", node, err)
		}
	}
	idle, err := tls.Dial("tcp", r.addr, conf)
	if err != nil {
		t.Fatal(err)
	}
	defer idle.Close()
	if c, err := tls.Dial("tcp", r.addr, conf); err == nil {
		c.Close()
		t.Error("there are two strangers of one address")
	}
	if n := r.cfg.Counters.LimitedBy(tunnel.LimitJoiningPerAddress); n != 1 {
		t.Errorf("counted %d times", n)
	}
	r = newAgentsRig(t, func(c *AgentsConfig) { c.JoinTimeout = 50 * time.Millisecond })
	raw, err := net.Dial("tcp", r.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	if _, err := io.Copy(io.Discard, raw); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error(err)
	}
	if n := r.cfg.Counters.LimitedBy(tunnel.LimitJoinTimeout); n != 1 {
		t.Errorf("counted %d times", n)
	}
}

// A stock agent opens further streams to look for other replicas, and ends them at once. They do not
// replace the first stream.
func TestAgentSecondStream(t *testing.T) {
	r := newAgentsRig(t, nil)
	md := []string{"agentid", "n1", "authorization", "Bearer token of n1"}
	r.raw(t, md...)
	testkit.Eventually(t, "the first is there", func() bool { return r.dir.Holds("n1") })
	first := r.dir.Lookup("n1")
	_, hangUp := r.raw(t, md...)
	streams := func() int { r.mu.Lock(); defer r.mu.Unlock(); return len(r.nodes["n1"]) }
	testkit.Eventually(t, "the second is there", func() bool { return streams() == 2 })
	hangUp()
	testkit.Eventually(t, "the second has gone", func() bool { return streams() == 1 })
	if r.dir.Lookup("n1") != first {
		t.Error("a stream that came and went took the place of another")
	}
	r.raw(t, md...) // an agent that has restarted before its old stream was found dead
	testkit.Eventually(t, "the third takes over", func() bool { s := r.dir.Lookup("n1"); return s != nil && s != first })
	if tunnel.IsClosed(first.Done()) {
		t.Error("the first stream was ended")
	}
}

// A node may have maxStreamsPerNode streams. A stream that ends makes room for another.
func TestAgentStreams(t *testing.T) {
	r := newAgentsRig(t, nil)
	md := []string{"agentid", "n1", "authorization", "Bearer token of n1"}
	count := func() int { r.mu.Lock(); defer r.mu.Unlock(); return len(r.nodes["n1"]) }
	var hangUp context.CancelFunc
	for i := range maxStreamsPerNode {
		_, hangUp = r.raw(t, md...)
		testkit.Eventually(t, "the agent joins", func() bool { return count() == i+1 })
	}
	s, _ := r.raw(t, md...)
	if err := s.RecvMsg(new(Packet)); status.Code(err) != codes.ResourceExhausted ||
		!strings.Contains(err.Error(), "limit agentstreams: ") {
		t.Errorf("one too many: %v", err)
	}
	if n := r.cfg.Counters.LimitedBy(tunnel.LimitAgentStreams); n != 1 {
		t.Errorf("counted %d times", n)
	}
	s, _ = r.raw(t, "agentid", "n2", "authorization", "Bearer token of n2")
	if h, err := s.Header(); err != nil || len(h.Get("serverid")) != 1 {
		t.Errorf("another node: %v, %v", h, err)
	}
	hangUp()
	testkit.Eventually(t, "one has gone", func() bool { return count() == maxStreamsPerNode-1 })
	s, _ = r.raw(t, md...)
	if h, err := s.Header(); err != nil || len(h.Get("serverid")) != 1 {
		t.Errorf("in the place of one that has gone: %v, %v", h, err)
	}
}

// An agent that makes us answer and does not read loses its stream.
func TestAgentDoesNotRead(t *testing.T) {
	for what, packets := range map[string][]*Packet{
		"data of no conn": {{Type: PacketData, ConnID: 9, Data: []byte("x")}},
		// The cloud closes the conn of each answer, and the agent confirms that, so that the id is free again.
		"answers to no dial": {{Type: PacketDialRsp, ConnID: 1}, {Type: PacketCloseRsp, ConnID: 1}},
	} {
		t.Run(what, func(t *testing.T) {
			r := newAgentsRig(t, nil)
			s, _ := r.raw(t, "agentid", "n1", "authorization", "Bearer token of n1")
			var err error
			for n := 0; err == nil; n++ { // about 20,000 times
				if n == 1_000_000 {
					t.Fatal("the queue grows without end")
				}
				err = s.SendMsg(packets[n%len(packets)])
			}
			if n := r.cfg.Counters.LimitedBy(tunnel.LimitOutbox); n != 1 {
				t.Errorf("counted %d times", n)
			}
		})
	}
}

// An agent that sends a packet that is too long, or none at all, is hung up on, and the log says why.
func TestAgentSendsWhatNoAgentSends(t *testing.T) {
	log, lines := testkit.NewLog()
	r := newAgentsRig(t, func(c *AgentsConfig) { c.Log = log })
	for what, p := range map[string]*Packet{
		"larger than max": {Type: PacketData, ConnID: 9, Data: make([]byte, 2*maxAgentPacket)},
		"unmarshal":       {Type: PacketDialReq, Protocol: strings.Repeat("x", 17)},
	} {
		s, _ := r.raw(t, "agentid", "n1", "authorization", "Bearer token of n1")
		if err := s.SendMsg(p); err != nil {
			t.Fatal(err)
		}
		if err := s.RecvMsg(new(Packet)); err == nil {
			t.Error("the stream goes on")
		}
		testkit.Eventually(t, "the log has "+what, func() bool { return len(lines.Lines("INFO", what)) > 0 })
	}
	if n := r.cfg.Counters.LimitedBy(tunnel.LimitMessage); n != 1 {
		t.Errorf("counted %d times", n)
	}
}

// An agent that joins again and again is refused; other nodes are not.
func TestAgentJoins(t *testing.T) {
	r := newAgentsRig(t, nil)
	join := func(node string) error {
		s, hangUp := r.raw(t, "agentid", node, "authorization", "Bearer token of "+node)
		defer hangUp()
		if h, err := s.Header(); err == nil && len(h.Get("serverid")) == 1 {
			return nil
		}
		return s.RecvMsg(new(Packet))
	}
	testkit.Within(t, time.Minute, "the node is refused", func() error {
		if err := join("n1"); err == nil || status.Code(err) != codes.ResourceExhausted ||
			!strings.Contains(err.Error(), "limit joins: ") {
			return fmt.Errorf("the answer is %w", err)
		}
		return nil
	})
	if n := r.cfg.Counters.LimitedBy(tunnel.LimitJoins); n == 0 {
		t.Error("not counted")
	}
	if err := join("n2"); err != nil {
		t.Errorf("another node: %v", err)
	}
}

// An address that no packet can carry is refused, and the stream goes on.
func TestAgentGetsNoBadAddress(t *testing.T) {
	r := newAgentsRig(t, nil)
	s, _ := r.raw(t, "agentid", "n1", "authorization", "Bearer token of n1")
	testkit.Eventually(t, "the agent joins", func() bool { return r.dir.Holds("n1") })
	_, err := r.dir.Dial(t.Context(), tunnel.Request{Node: "n1", Network: "tcp", Addr: "\xff.x:80"})
	if tunnel.CodeOf(err) != tunnel.Unreachable {
		t.Errorf("the answer is %v", err)
	}
	go r.dir.Dial(t.Context(), tunnel.Request{Node: "n1", Network: "tcp", Addr: "good:80"}) // it gets no answer
	var p Packet
	if err := s.RecvMsg(&p); err != nil || p.Address != "good:80" {
		t.Errorf("the agent gets %q, %v", p.Address, err)
	}
}

// attachments counts the sessions that a directory attaches.
type attachments struct{ n atomic.Int64 }

func (a *attachments) Attached(*tunnel.Session) { a.n.Add(1) }
func (a *attachments) Detached(*tunnel.Session) {}

// A client certificate proves only the node that it names.
func TestAgentByCertificate(t *testing.T) {
	r := newAgentsRig(t, nil)
	cert := r.ca.Pair(t, auth.Leaf{CommonName: "tunnel:node:n1", Organization: []string{"tunnel:nodes"}, Client: true})
	for node, good := range map[tunnel.NodeName]bool{"n1": true, "n2": false} {
		a, err := NewAgent(AgentConfig{
			Servers: []string{"tls://" + r.addr}, Node: node, Budget: &r.budget, Log: slog.New(slog.DiscardHandler),
			TLS: func() *tls.Config {
				return &tls.Config{RootCAs: r.pool, MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{cert}}
			},
		})
		if err != nil {
			t.Fatal(err)
		}
		agent := testkit.Run(t, a.Run)
		if good {
			testkit.Eventually(t, "the agent joins", func() bool { return r.dir.Holds(node) })
		} else {
			testkit.Eventually(t, "the agent is refused", func() bool { return r.cfg.Counters.JoinsRefused.Load() > 0 })
		}
		if r.dir.Holds(node) != good {
			t.Errorf("node %s is there: %v", node, !good)
		}
		agent.Stop()
	}
}

// A connection allows one attempt to join, whatever the first call was.
func TestAgentRefusedConnection(t *testing.T) {
	r := newAgentsRig(t, nil)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	join := func(cc *grpc.ClientConn, token string) error {
		ctx := metadata.NewOutgoingContext(ctx, metadata.Pairs("agentid", "n1", "authorization", "Bearer "+token))
		s, err := cc.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, "/AgentService/Connect")
		if err != nil {
			return err
		}
		return s.RecvMsg(new(Packet))
	}
	for name, tc := range map[string]struct {
		first func(cc *grpc.ClientConn) error
		want  codes.Code
	}{
		"a wrong token": {func(cc *grpc.ClientConn) error { return join(cc, "wrong") }, codes.Unauthenticated},
		"something else": {func(cc *grpc.ClientConn) error {
			return cc.Invoke(ctx, "/no.such/Method", new(Packet), new(Packet))
		}, codes.Unimplemented},
	} {
		raw, err := net.Dial("tcp", r.addr)
		if err != nil {
			t.Fatal(err)
		}
		var once sync.Once
		cc, err := grpc.NewClient("passthrough:///"+r.addr,
			grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{RootCAs: r.pool, MinVersion: tls.VersionTLS12,
				ServerName: "127.0.0.1"})),
			grpc.WithDefaultCallOptions(grpc.ForceCodecV2(NewCodec())),
			grpc.WithContextDialer(func(context.Context, string) (conn net.Conn, err error) {
				err = errors.New("connected once")
				once.Do(func() { conn, err = raw, nil })
				return conn, err
			}))
		if err != nil {
			t.Fatal(err)
		}
		defer cc.Close()
		if err := tc.first(cc); status.Code(err) != tc.want {
			t.Errorf("%s: %v", name, err)
		}
		// Unavailable: the server has closed the connection before the second attempt.
		if code := status.Code(join(cc, "token of n1")); code != codes.Unauthenticated && code != codes.Unavailable {
			t.Errorf("behind %s: %v", name, code)
		}
	}
}

// An agent does not replace an edge.
func TestAgentBesideEdge(t *testing.T) {
	r := newAgentsRig(t, nil)
	edge := &tunnel.Session{Node: "n1", Link: &strangerLink{}}
	r.dir.Attach(edge)
	s, _ := r.raw(t, "agentid", "n1", "authorization", "Bearer token of n1")
	if h, err := s.Header(); err != nil || len(h.Get("serverid")) != 0 {
		t.Errorf("a header %v, %v, of who has not joined", h, err)
	}
	if err := s.RecvMsg(new(Packet)); status.Code(err) != codes.AlreadyExists {
		t.Error(err)
	}
	if r.dir.Lookup("n1") != edge {
		t.Error("the edge is gone")
	}
}

// An edge that joins ends all streams of the agent.
func TestAgentBeforeEdge(t *testing.T) {
	r := newAgentsRig(t, nil)
	md := []string{"agentid", "n1", "authorization", "Bearer token of n1"}
	older, _ := r.raw(t, md...)
	testkit.Eventually(t, "the first is there", func() bool { return r.dir.Holds("n1") })
	first := r.dir.Lookup("n1")
	newer, _ := r.raw(t, md...)
	testkit.Eventually(t, "the second takes over", func() bool { return r.dir.Lookup("n1") != first })
	edge := &tunnel.Session{Node: "n1", Link: &strangerLink{}}
	r.dir.Attach(edge).Close(status.Error(codes.Aborted, "replaced")) // as stream.Server does
	if err := newer.RecvMsg(new(Packet)); status.Code(err) != codes.Aborted {
		t.Errorf("the second stream: %v", err)
	}
	if err := older.RecvMsg(new(Packet)); status.Code(err) != codes.AlreadyExists {
		t.Errorf("the first stream: %v", err)
	}
	if r.dir.Lookup("n1") != edge {
		t.Error("the edge is gone")
	}
}

type strangerLink struct{ tunnel.Link }

// The late answer to a dial that was given up gets its conn closed. An id in use ends the stream.
func TestAgentLateAnswer(t *testing.T) {
	r := newAgentsRig(t, nil)
	s, _ := r.raw(t, "agentid", "n1", "authorization", "Bearer token of n1")
	testkit.Eventually(t, "the agent is there", func() bool { return r.dir.Holds("n1") })
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error, 1)
	go func() {
		_, err := r.dir.Dial(ctx, tunnel.Request{Node: "n1", Network: "tcp", Addr: "x:1"})
		failed <- err
	}()
	want := func(typ PacketType) Packet {
		t.Helper()
		var p Packet
		if err := s.RecvMsg(&p); err != nil || p.Type != typ {
			t.Fatalf("%v %v, want %v", p.Type, err, typ)
		}
		return p
	}
	req := want(PacketDialReq)
	cancel()
	if err := <-failed; tunnel.CodeOf(err) != tunnel.Gone {
		t.Error(err)
	}
	want(PacketDialCls)
	s.SendMsg(&Packet{Type: PacketDialRsp, Random: req.Random, ConnID: 5})
	if p := want(PacketCloseReq); p.ConnID != 5 {
		t.Errorf("conn %d is closed", p.ConnID)
	}
	s.SendMsg(&Packet{Type: PacketData, ConnID: 9, Data: []byte("x")})
	if p := want(PacketCloseReq); p.ConnID != 9 {
		t.Errorf("conn %d is closed", p.ConnID)
	}
	s.SendMsg(&Packet{Type: PacketDialRsp, Random: req.Random, ConnID: 5})
	if err := s.RecvMsg(new(Packet)); err == nil {
		t.Error("an id that is taken does not end the stream")
	}
}

// A dial during the drain of an agent is always answered.
func TestAgentDrainAnswers(t *testing.T) {
	for name, hold := range map[string]bool{"until it is quiet": false, "until the grace period is over": true} {
		t.Run(name, func(t *testing.T) {
			r := newAgentsRig(t, nil)
			r.agentGrace = 5 * time.Second // in which a busy machine starts all dials
			if !hold {
				r.agentGrace = time.Minute
			}
			addr := testkit.Serve(t, testkit.Echo)
			a, stop := r.agent(t, "n1", func(ctx context.Context, q tunnel.Request) (net.Conn, error) {
				if q.Addr == "hangs:1" {
					<-ctx.Done()
					return nil, tunnel.Refusef(tunnel.Gone, "cancelled")
				}
				return new(net.Dialer).DialContext(ctx, q.Network, q.Addr)
			})
			l := r.dir.Lookup("n1")
			if hold {
				r.dial(t, "n1", addr)
			}
			a.quiet = 5 * time.Second // this machine may be busy for a while between two dials
			stopped := make(chan struct{})
			go func() {
				defer close(stopped)
				stop()
			}()
			testkit.Eventually(t, "the edge drains", l.Leaving.Load)
			var dials sync.WaitGroup
			var lost, answered atomic.Int32
			dial := func(addr string) {
				dials.Go(func() {
					// A stock server uses a leaving agent as long as there is no other.
					c, err := l.Dialer.Dial(t.Context(), tunnel.Request{Node: "n1", Category: category, Network: "tcp", Addr: addr})
					switch {
					case err == nil:
						answered.Add(1)
						c.Close()
					case strings.Contains(err.Error(), "session of node n1 has ended"):
						lost.Add(1)
					default:
						answered.Add(1)
					}
				})
			}
			for range 20 {
				dial(addr)
				if hold {
					dial("hangs:1")
				}
				time.Sleep(2 * time.Millisecond)
			}
			dials.Wait()
			if n := lost.Load(); n != 0 {
				t.Errorf("%d dials were not answered, %d were", n, answered.Load())
			}
			<-stopped
		})
	}
}

// A stream that is about to end does not get the new conns of its node, if another one stays.
func TestLeavingAgentIsNotAttached(t *testing.T) {
	r := newAgentsRig(t, nil)
	attached := new(attachments)
	r.dir.Watcher = attached
	join := func(streams int) grpc.ClientStream {
		s, _ := r.raw(t, "agentid", "n1", "authorization", "Bearer token of n1")
		if _, err := s.Header(); err != nil {
			t.Fatal(err)
		}
		testkit.Eventually(t, "the agent has joined", func() bool {
			r.Agents.mu.Lock()
			defer r.Agents.mu.Unlock()
			return len(r.Agents.nodes["n1"]) == streams
		})
		return s
	}
	join(1)
	stays := r.dir.Lookup("n1")
	leaves := join(2)
	leaves.SendMsg(&Packet{Type: PacketDrain})
	r.Agents.mu.Lock()
	second := r.Agents.nodes["n1"][1].session
	r.Agents.mu.Unlock()
	testkit.Eventually(t, "the second agent drains", second.Leaving.Load)
	time.Sleep(settleTime + settleTime/2)
	if r.dir.Lookup("n1") != stays {
		t.Error("new conns go to the agent that drains")
	}
	// More drains of it are no news for those who look at the nodes after each change.
	for range 100 {
		leaves.SendMsg(&Packet{Type: PacketDrain})
	}
	leaves.SendMsg(&Packet{Type: PacketData, ConnID: 9, Data: []byte("x")})
	if err := leaves.RecvMsg(new(Packet)); err != nil { // the answer to the data, so the drains have been handled
		t.Fatal(err)
	}
	if n := attached.n.Load(); n != 1 {
		t.Errorf("%d sessions were attached, want the one that stays", n)
	}
}

// Who begins streams that gRPC refuses itself is hung up on: gRPC keeps an answer for each.
func TestStreamsThatGRPCAnswers(t *testing.T) {
	for name, joins := range map[string]bool{"a stranger": false, "an agent": true} {
		t.Run(name, func(t *testing.T) {
			r := newAgentsRig(t, nil)
			c, err := tls.Dial("tcp", r.addr, &tls.Config{RootCAs: r.pool, NextProtos: []string{"h2"}})
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			c.SetDeadline(time.Now().Add(time.Minute))
			io.WriteString(c, http2.ClientPreface)
			f, next := http2.NewFramer(c, c), uint32(1)
			f.WriteSettings()
			var header bytes.Buffer
			enc := hpack.NewEncoder(&header)
			begin := func(fields ...string) error {
				header.Reset()
				for i := 0; i < len(fields); i += 2 {
					enc.WriteField(hpack.HeaderField{Name: fields[i], Value: fields[i+1]})
				}
				frame := http2.HeadersFrameParam{StreamID: next, BlockFragment: header.Bytes(), EndHeaders: true}
				next += 2
				return f.WriteHeaders(frame)
			}
			left := ownStreams
			if joins {
				if err := begin(":method", "POST", ":scheme", "https", ":path", "/AgentService/Connect", ":authority", "cloud",
					"content-type", "application/grpc", "te", "trailers", "agentid", "n1",
					"authorization", "Bearer token of n1"); err != nil {
					t.Fatal(err)
				}
				testkit.Eventually(t, "the agent has joined", func() bool { return r.dir.Lookup("n1") != nil })
				left--
			}
			for range left + 1 {
				if begin("content-type", "none") != nil {
					break
				}
			}
			if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
				t.Error("the connection goes on")
			}
			if n := r.cfg.Counters.LimitedBy(tunnel.LimitStreams); n != 1 {
				t.Errorf("the limit is counted %d times", n)
			}
		})
	}
}
