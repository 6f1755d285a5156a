package peers

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/internal/testkit/leaks"
	"tunnel.example/tunnel/internal/testkit/testca"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/stream"
	"tunnel.example/tunnel/pkg/tunnel"
)

func TestMain(m *testing.M) { leaks.Main(m) }

// patience is how long a test waits for what must happen.
const patience = 10 * time.Second

// replicaRig is one replica of a fleet, over TLS on loopback, with edges.
type replicaRig struct {
	t        *testing.T
	peers    *Peers
	server   *stream.Server
	dir      *tunnel.Directory
	ca       testca.CA
	addr     netip.Addr // at which clients would reach it
	port     string     // of its server
	relays   *tunnel.Counters
	counters *tunnel.Counters // of the server
	edges    *tunnel.Counters // of all edges
	text     *testkit.Log
	log      *slog.Logger
	tls      atomic.Pointer[tls.Config] // by which it knows the others
	running  *testkit.Running           // the server
	meeting  *testkit.Running           // its Peers
	front    *Peers                     // by which conns are dialled; nil: directly
}

// fleet are replicas that know each other's addresses, their own among them.
type fleet []*replicaRig

func newFleet(t *testing.T, n int, change ...func(*stream.ServerConfig)) fleet {
	t.Helper()
	p := newPlaces(t, n)
	return p.fleet(t, p.names, change...)
}

// places is what replicas need before they start: who signs for them, and the addresses by which
// they know each other.
type places struct {
	ca    testca.CA
	names []string
	alias map[string]string // another name of one of names; set before fleet
	// api is Config.API of every replica; set before fleet.
	api func(ctx context.Context) (net.Conn, error)

	mu    sync.Mutex        // guards ports
	ports map[string]string // where a name leads, 127.0.0.1:port
}

func newPlaces(t *testing.T, n int) *places {
	t.Helper()
	p := &places{ca: testca.New(t, "replicas"), ports: make(map[string]string)}
	for i := range n {
		p.names = append(p.names, netip.AddrPortFrom(clientAddr(i), 9000).String())
	}
	return p
}

// clientAddr is the address at which clients would reach the replica of this index.
func clientAddr(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 0, 0, byte(i + 1)}) }

// leads has a name lead to a port.
func (p *places) leads(name, port string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ports[name] = port
}

func (p *places) dial(ctx context.Context, network, name string) (net.Conn, error) {
	p.mu.Lock()
	port := p.ports[name]
	p.mu.Unlock()
	if port == "" {
		return nil, &net.OpError{Op: "dial", Net: network, Err: syscall.ECONNREFUSED}
	}
	return (&net.Dialer{}).DialContext(ctx, network, port)
}

// fleet starts a replica at each place. Each knows the others by these addresses.
func (p *places) fleet(t *testing.T, addresses []string, change ...func(*stream.ServerConfig)) fleet {
	t.Helper()
	var all fleet
	for i, name := range p.names {
		a := p.newReplica(t, i, addresses, change...)
		p.leads(name, a.port)
		for other, of := range p.alias {
			if of == name {
				p.leads(other, a.port)
			}
		}
		all = append(all, a)
	}
	for _, a := range all {
		a.meet()
	}
	for _, a := range all {
		a.eventually("the replicas have joined each other", func() bool { return len(a.peers.sessions()) == len(all)-1 })
	}
	return all
}

// newReplica starts the server of a replica. meet starts its Peers.
func (p *places) newReplica(t *testing.T, i int, addresses []string, change ...func(*stream.ServerConfig)) *replicaRig {
	t.Helper()
	names := []string{"cloud", "replicas"}
	own := p.ca.Pair(t, auth.Leaf{CommonName: "replica", DNSNames: names, Server: true, Client: true})
	conf := &tls.Config{Certificates: []tls.Certificate{own}, RootCAs: p.ca.Pool(), ServerName: "replicas"}
	log, text := testkit.NewLog()
	a := &replicaRig{
		t: t, dir: &tunnel.Directory{}, ca: p.ca, addr: clientAddr(i),
		relays: new(tunnel.Counters), counters: new(tunnel.Counters), edges: new(tunnel.Counters), text: text, log: log,
	}
	a.tls.Store(conf)
	var err error
	a.peers, err = New(Config{
		Addresses: addresses, Addrs: []netip.Addr{a.addr}, TLS: a.tls.Load, Server: conf, Counters: a.relays,
		Log: log, Software: "test", Grace: patience, dial: p.dial, API: p.api,
	}, a.dir)
	if err != nil {
		t.Fatal(err)
	}
	cfg := stream.ServerConfig{
		Listen: "127.0.0.1:0", TLS: conf, Auth: tokens{}, Counters: a.counters,
		Log: log, Grace: patience, Software: "test", Replicas: a.peers,
	}
	for _, f := range change {
		f(&cfg)
	}
	if a.server, err = stream.NewServer(cfg, a.dir); err != nil {
		t.Fatal(err)
	}
	a.up()
	return a
}

// up runs the server until the test ends, and then looks for panics.
func (a *replicaRig) up() {
	a.t.Cleanup(func() {
		if n := a.counters.Panics.Load() + a.relays.Panics.Load() + a.edges.Panics.Load(); n != 0 {
			a.t.Errorf("%d panics", n)
		}
	})
	a.running = testkit.Run(a.t, a.server.Run)
	a.eventually("the server listens", func() bool { return a.server.Addr() != nil })
	a.port = a.server.Addr().String()
}

// meet runs the Peers of the replica until the test ends.
func (a *replicaRig) meet() { a.meeting = testkit.Run(a.t, a.peers.Run) }

// eventually is testkit.Eventually for the rig's test.
func (a *replicaRig) eventually(what string, ok func() bool) {
	a.t.Helper()
	testkit.Eventually(a.t, what, ok)
}

var errNotYet = errors.New("not yet")

// within waits up to d until ok returns true.
func within(t *testing.T, d time.Duration, what string, ok func() bool) {
	t.Helper()
	testkit.Within(t, d, what, func() error {
		if ok() {
			return nil
		}
		return errNotYet
	})
}

// tokens accepts the token "token-NODE" of every node.
type tokens struct{}

func (tokens) Authenticate(_ context.Context, c auth.Credential) (auth.Grant, error) {
	node, err := tunnel.ParseNodeName(c.Node)
	if err != nil || c.Token.Reveal() != "token-"+c.Node {
		return auth.Grant{}, auth.ErrUnauthenticated
	}
	return auth.Grant{Node: node, By: "token"}, nil
}

// fixed is a configuration that does not change.
func fixed(conf *tls.Config) func() *tls.Config { return func() *tls.Config { return conf } }

// edgeModule is an edge's module that dials what the test says.
type edgeModule struct{ dial tunnel.DialFunc }

func (*edgeModule) Name() string { return "tcp" }
func (e *edgeModule) Routes() map[string]tunnel.Handler {
	return map[string]tunnel.Handler{
		tunnel.TypeOpen: func(_ context.Context, in *tunnel.Incoming) error { return in.Serve(e.dial) },
	}
}
func (*edgeModule) Run(ctx context.Context) error { <-ctx.Done(); return nil }

// direct dials as the operating system does.
func direct(ctx context.Context, r tunnel.Request) (net.Conn, error) {
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", r.Addr)
	if err != nil {
		return nil, tunnel.Refusef(tunnel.Refused, "%v", err)
	}
	return c, nil
}

// edge is one client of a replica.
type edge struct {
	*testkit.Running

	client *stream.Client
}

func (a *replicaRig) clientConfig(node string) stream.ClientConfig {
	return stream.ClientConfig{
		Address: a.port, TLS: fixed(&tls.Config{RootCAs: a.ca.Pool(), ServerName: "cloud"}),
		Node:     tunnel.NodeName(node),
		Token:    auth.StaticToken(auth.Secret("token-" + node)),
		Counters: a.edges, Log: a.log.With("end", "edge"), Grace: patience, Software: "test",
	}
}

// start runs a client until the test ends.
func (a *replicaRig) start(cfg stream.ClientConfig, dial tunnel.DialFunc) *edge {
	a.t.Helper()
	c, err := stream.NewClient(cfg, &edgeModule{dial})
	if err != nil {
		a.t.Fatal(err)
	}
	return &edge{testkit.Run(a.t, c.Run), c}
}

// join starts an edge and waits until both sides see its session.
func (a *replicaRig) join(node string, dial tunnel.DialFunc) *edge {
	a.t.Helper()
	e := a.start(a.clientConfig(node), dial)
	a.eventually("node joins", func() bool {
		n := tunnel.NodeName(node)
		return e.client.Ready() == nil && a.dir.Holds(n) && (a.front == nil || a.front.Holds(n))
	})
	return e
}

func (a *replicaRig) dial(node, addr string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var dialer tunnel.Dialer = a.dir
	if a.front != nil {
		dialer = a.front
	}
	return dialer.Dial(ctx, tunnel.Request{
		Node: tunnel.NodeName(node), Category: "tcp", Network: "tcp", Addr: addr, Caller: "test",
	})
}

// pair is a conn on the cloud and the target's end of it.
func (a *replicaRig) pair(node string) (net.Conn, *net.TCPConn) {
	t := a.t
	t.Helper()
	l := testkit.NewTarget(t)
	c, err := a.dial(node, l.Address())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c, l.Next(t)
}

// idle waits until nothing is left of any conn.
func (a *replicaRig) idle(edges ...*edge) {
	a.t.Helper()
	a.eventually("no conn is left", func() bool {
		all := a.dir.Sessions()
		for _, e := range edges {
			if s := e.client.Session(); s != nil {
				all = append(all, s)
			}
		}
		if a.front != nil {
			all = append(all, a.front.sessions()...)
		}
		for _, s := range all {
			if s.Conns.Load() != 0 {
				return false
			}
		}
		return true
	})
}
