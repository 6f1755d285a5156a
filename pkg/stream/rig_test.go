package stream

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/oauth2"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/internal/testkit/leaks"
	"tunnel.example/tunnel/internal/testkit/testca"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/tunnel"
)

func TestMain(m *testing.M) { leaks.Main(m) }

// patience is how long a test waits for what must happen.
const patience = 10 * time.Second

// rig is a cloud and edges in one process, over TLS on loopback.
type rig struct {
	t        *testing.T
	net      *memNet // nil: loopback
	dir      *tunnel.Directory
	server   *Server
	auth     *fakeAuth
	counters *tunnel.Counters // of the server
	edges    *tunnel.Counters // of all edges
	panics   uint64           // that the test wants
	log      *journal
	ca       testca.CA
	running  *testkit.Running   // the server
	front    *front             // another replica, by which conns are dialled; nil: directly
	farTrip  time.Duration      // of the server, and of edges; 0: the default
	spares   int                // data connections of each edge; conns go by them. 0: conns go by the session's own
	reaches  bool               // edges ask for the conns; else the cloud dials them
	clients  map[string]*Client // the last one of each node
}

// fakeAuth accepts the tokens "token-NODE" and "next-NODE" of every node.
type fakeAuth struct {
	asked   atomic.Int64
	live    atomic.Int64 // grants that have not been forgotten
	panics  atomic.Bool
	broken  atomic.Bool // it cannot check anybody now
	mu      sync.Mutex
	revoked map[auth.Secret]chan struct{} // by token
}

func (a *fakeAuth) Authenticate(ctx context.Context, c auth.Credential) (auth.Grant, error) {
	a.asked.Add(1)
	node, err := tunnel.ParseNodeName(c.Node)
	if err != nil || c.Token.Reveal() != "token-"+c.Node && c.Token.Reveal() != "next-"+c.Node {
		return auth.Grant{}, fakeRefusal("the token is wrong")
	}
	if a.panics.Load() {
		panic("boom")
	}
	if a.broken.Load() {
		return auth.Grant{}, errors.New("no answer from the API server")
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.revoked == nil {
		a.revoked = make(map[auth.Secret]chan struct{})
	}
	if a.revoked[c.Token] == nil {
		a.revoked[c.Token] = make(chan struct{})
	}
	a.live.Add(1)
	context.AfterFunc(ctx, func() { a.live.Add(-1) })
	return auth.Grant{Node: node, By: "token", Revoked: a.revoked[c.Token]}, nil
}

// fakeRefusal is auth.ErrUnauthenticated with a reason, as Tokens gives it.
type fakeRefusal string

func (r fakeRefusal) Error() string { return string(r) }
func (fakeRefusal) Unwrap() error   { return auth.ErrUnauthenticated }

func (a *fakeAuth) revoke(n tunnel.NodeName) {
	a.mu.Lock()
	defer a.mu.Unlock()
	token := auth.Secret("token-" + n)
	close(a.revoked[token])
	delete(a.revoked, token)
}

// journal is the log of a rig, for a test to read; TUNNEL_TEST_LOG=1 shows it.
type journal struct {
	testkit.Log

	name string
}

func (j *journal) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(j, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

func (j *journal) Write(p []byte) (int, error) {
	if os.Getenv("TUNNEL_TEST_LOG") != "" {
		fmt.Fprintf(os.Stderr, "%s: %s", j.name, p)
	}
	return j.Log.Write(p)
}

// lines is Lines.
func (j *journal) lines(words ...string) []string { return j.Lines(words...) }

func newRig(t *testing.T, change ...func(*ServerConfig)) *rig {
	t.Helper()
	return newRigOn(t, nil, change...)
}

// newRigOn makes a rig on a network in memory, for tests that run on a fake clock.
func newRigOn(t *testing.T, network *memNet, change ...func(*ServerConfig)) *rig {
	t.Helper()
	ca := testca.New(t, "test")
	pair := ca.Pair(t, auth.Leaf{CommonName: "cloud", DNSNames: []string{"cloud"}, Server: true, TTL: 24 * time.Hour})
	r := &rig{
		t: t, net: network, dir: &tunnel.Directory{}, auth: &fakeAuth{}, ca: ca,
		counters: &tunnel.Counters{}, edges: &tunnel.Counters{}, log: &journal{name: t.Name()},
		clients: make(map[string]*Client),
	}
	cfg := ServerConfig{
		Listen: "127.0.0.1:0", TLS: &tls.Config{Certificates: []tls.Certificate{pair}},
		Auth: r.auth, Counters: r.counters, Log: r.log.logger().With("end", "cloud"), Grace: patience, Software: "test",
		handOverTime: patience,
	}
	for _, f := range change {
		f(&cfg)
	}
	r.farTrip = cfg.farTrip
	var err error
	if r.server, err = NewServer(cfg, r.dir); err != nil {
		t.Fatal(err)
	}
	if network != nil {
		r.server.listen = network.listen
	}
	r.up()
	return r
}

// up runs the server until the test ends, and then looks for panics.
func (r *rig) up() {
	t := r.t
	t.Helper()
	t.Cleanup(func() {
		if n := r.counters.Panics.Load() + r.edges.Panics.Load(); n != r.panics {
			t.Errorf("%d panics, want %d", n, r.panics)
		}
	})
	r.serve()
}

// serve runs the server until the test ends, or stops it. After that serve may be called again.
func (r *rig) serve() {
	r.t.Helper()
	r.server.stopping.Store(false)
	r.server.draining.Store(false)
	r.running = testkit.Run(r.t, r.server.Run)
	r.eventually("the server listens", func() bool { return r.server.Addr() != nil })
}

// eventually is testkit.Eventually for the rig's test.
func (r *rig) eventually(what string, ok func() bool) {
	r.t.Helper()
	testkit.Eventually(r.t, what, ok)
}

// within waits up to d until ok returns true, on the real clock or on a fake one.
func within(t *testing.T, d time.Duration, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(d); !ok(); {
		if time.Now().After(end) {
			t.Fatalf("not within %s: %s", d, what)
		}
		time.Sleep(max(time.Millisecond, d/10000)) // hours of a fake clock pass in fewer steps
	}
}

// edgeModule is an edge's module that dials what the test says.
type edgeModule struct {
	name string
	dial tunnel.DialFunc
}

func (e *edgeModule) Name() string { return e.name }
func (e *edgeModule) Routes() map[string]tunnel.Handler {
	return map[string]tunnel.Handler{
		tunnel.TypeOpen: func(_ context.Context, in *tunnel.Incoming) error { return in.Serve(e.dial) },
	}
}
func (e *edgeModule) Run(ctx context.Context) error { <-ctx.Done(); return nil }

// direct dials as the operating system does.
func direct(ctx context.Context, r tunnel.Request) (net.Conn, error) {
	c, err := (&net.Dialer{}).DialContext(ctx, "tcp", r.Addr)
	if err != nil {
		return nil, tunnel.Refusef(tunnel.Refused, "%v", err)
	}
	return c, nil
}

// edge is one client of a rig.
type edge struct {
	*testkit.Running

	client *Client
}

// fixed is a configuration that does not change.
func fixed(conf *tls.Config) func() *tls.Config { return func() *tls.Config { return conf } }

// tokenFunc is a source of tokens that change.
type tokenFunc func() (auth.Secret, error)

// Token implements oauth2.TokenSource.
func (f tokenFunc) Token() (*oauth2.Token, error) {
	token, err := f()
	return &oauth2.Token{AccessToken: token.Reveal()}, err
}

func (r *rig) clientConfig(node string) ClientConfig {
	cfg := ClientConfig{
		Address: r.server.Addr().String(), TLS: fixed(&tls.Config{RootCAs: r.ca.Pool(), ServerName: "cloud"}),
		Node:     tunnel.NodeName(node),
		Token:    auth.StaticToken(auth.Secret("token-" + node)),
		Counters: r.edges, Log: r.log.logger().With("end", "edge"), Grace: patience, Software: "test",
		farTrip: r.farTrip, Connections: r.spares,
	}
	if r.net != nil {
		cfg.Dial = r.net.dial
	}
	return cfg
}

// start runs a client until the test ends.
func (r *rig) start(cfg ClientConfig, dial tunnel.DialFunc) *edge {
	r.t.Helper()
	c, err := NewClient(cfg, &edgeModule{"tcp", dial})
	if err != nil {
		r.t.Fatal(err)
	}
	r.clients[string(cfg.Node)] = c
	return &edge{testkit.Run(r.t, c.Run), c}
}

// join starts an edge and waits until both sides see its session.
func (r *rig) join(node string, dial tunnel.DialFunc) *edge {
	r.t.Helper()
	e := r.start(r.clientConfig(node), dial)
	r.eventually("node joins", func() bool {
		n := tunnel.NodeName(node)
		return e.client.Ready() == nil && r.dir.Holds(n)
	})
	return e
}

func (r *rig) dial(node, addr string) (net.Conn, error) {
	if r.spares > 0 {
		r.haveSpare(tunnel.NodeName(node))
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience) // of the dial alone
	defer cancel()
	if r.reaches {
		return r.clients[node].Reach(ctx, addr)
	}
	var dialer tunnel.Dialer = r.dir
	if r.front != nil {
		dialer = r.front
	}
	return dialer.Dial(ctx, tunnel.Request{Node: tunnel.NodeName(node), Category: "tcp", Network: "tcp", Addr: addr, Caller: "test"})
}

// haveSpare waits until a data connection waits for the next conn.
func (r *rig) haveSpare(node tunnel.NodeName) {
	s := r.dir.Lookup(node)
	if s == nil {
		return
	}
	cs := s.Link.(*cloudSession)
	r.eventually("there is a spare data connection", func() bool {
		cs.mu.Lock()
		n := len(cs.spares)
		lasting := slices.ContainsFunc(cs.spares, func(d *dataConn) bool { return !d.OwesEnd() })
		cs.mu.Unlock()
		if n == 0 {
			cs.requestMore()
		}
		return lasting // one that owes an end is away for a moment while sayEnd writes
	})
}

// withSpares calls f as soon as a node has an idle data connection and none is on its way. While f runs, nothing
// changes that, since the session is locked.
func (r *rig) withSpares(node tunnel.NodeName, f func(*cloudSession)) *cloudSession {
	r.haveSpare(node)
	cs := r.cloudEnd(node)
	r.eventually("the edge has opened what it was asked for", func() bool {
		cs.mu.Lock()
		defer cs.mu.Unlock()
		settled := cs.requested == 0 && len(cs.spares) > 0
		if settled {
			f(cs)
		}
		return settled
	})
	return cs
}

func (r *rig) mustDial(node, addr string) net.Conn {
	r.t.Helper()
	c, err := r.dial(node, addr)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { c.Close() })
	if r.front == nil {
		end := &r.cloudEnd(tunnel.NodeName(node)).session
		if r.reaches {
			client := r.clients[node]
			client.mu.Lock()
			end = &client.links[len(client.links)-1].session
			client.mu.Unlock()
		}
		if ok := end.byData(c); ok != (r.spares > 0) && !(r.reaches && r.podsHaveHalf(tunnel.NodeName(node))) {
			r.t.Errorf("that it goes by a data connection is %v", ok)
		}
	}
	return c
}

// podsHaveHalf reports whether conns that pods ask for have all data connections that they may have: half of them.
func (r *rig) podsHaveHalf(node tunnel.NodeName) bool {
	cs := r.cloudEnd(node)
	cs.mu.Lock()
	defer cs.mu.Unlock()
	return cs.byPodsLocked() >= (cs.maxDataLocked()+1)/2
}

// pair is a conn on the cloud and the target's end of it.
func (r *rig) pair(node string) (net.Conn, *net.TCPConn) {
	r.t.Helper()
	l := testkit.NewTarget(r.t)
	c := r.mustDial(node, l.Address())
	return c, l.Next(r.t)
}

// wantErr checks that err is what a user of TCP would expect.
func wantErr(t *testing.T, what string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s: got error %v, want %v", what, err, want)
	}
}

// idle waits until nothing is left of any conn.
func (r *rig) idle(edges ...*edge) {
	r.t.Helper()
	r.eventually("no conn is left", func() bool {
		for _, s := range r.dir.Sessions() {
			if s.Conns.Load() != 0 {
				return false
			}
		}
		for _, e := range edges {
			if s := e.client.Session(); s != nil && s.Conns.Load() != 0 {
				return false
			}
		}
		if r.front != nil && r.front.link().Conns.Load() != 0 {
			return false
		}
		return true
	})
}
