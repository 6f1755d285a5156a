package peers

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/stream"
	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// A replica that is found under two addresses, as behind a Service of two address
// families, is joined once: its session is not replaced again and again.
func TestReplicaWithTwoAddresses(t *testing.T) {
	p := newPlaces(t, 2)
	const alias = "localhost:9000"
	p.alias = map[string]string{alias: p.names[0]}
	all := p.fleet(t, append(slices.Clone(p.names), alias))
	all[1].join("edge1", direct)
	all[0].front = all[0].peers
	all[0].eventually("edge1 is known", func() bool { return all[0].peers.Holds("edge1") })
	lines := func(a *replicaRig, what string) int { return len(a.text.Lines(what)) }
	const refused, joined = "has a session of this process already", "another replica has joined"
	within(t, 3*patience, "the second address is refused", func() bool { return lines(all[0], refused) > 0 })
	c, far := all[0].pair("edge1")
	was, before := lines(all[0], joined), lines(all[0], refused)
	within(t, 3*patience, "it is refused again", func() bool { return lines(all[0], refused) > before })
	if n := lines(all[0], joined) - was; n != 0 {
		t.Errorf("it has joined %d times more", n)
	}
	go func() {
		io.WriteString(far, "late")
		far.Close()
	}()
	if got := testkit.ReadAll(t, c); string(got) != "late" {
		t.Errorf("got %q", got)
	}
}

// What a replica that stops relays from others ends in peace, though it holds no node
// itself.
func TestStopLetsWhatItRelaysEnd(t *testing.T) {
	all := newFleet(t, 2)
	all[1].join("edge1", direct)
	r := all[0]
	r.front = r.peers
	r.eventually("edge1 is known", func() bool { return r.peers.Holds("edge1") })
	c, far := r.pair("edge1")
	r.meeting.Stop() // the module with nothing to wait for is the first to end
	r.running.Cancel()
	select {
	case <-r.running.Done():
		t.Fatal("it has stopped with a conn open")
	case <-time.After(2 * time.Second): // longer than a server that has nothing to wait for
	}
	go func() {
		io.WriteString(far, "late")
		far.Close()
	}()
	if got := testkit.ReadAll(t, c); string(got) != "late" {
		t.Errorf("got %q", got)
	}
	c.Close()
	r.running.Stop()
}

// Whoever asks while edges turn from a replica that stops to another one reaches them.
func TestHandOverHasNoGap(t *testing.T) {
	all := newFleet(t, 3)
	var nodes []tunnel.NodeName
	for _, n := range []string{"edge1", "edge2", "edge3", "edge4", "edge5", "edge6"} {
		cfg := all[0].clientConfig(n)
		cfg.Dial = all.balanced()
		all[0].start(cfg, direct)
		nodes = append(nodes, tunnel.NodeName(n))
	}
	for _, n := range nodes {
		for _, a := range all {
			a.front = a.peers
			a.eventually("it is known everywhere", func() bool { return all[0].dir.Holds(n) && a.peers.Holds(n) })
		}
	}
	target := testkit.Serve(t, func(*net.TCPConn) {}) // which closes each connection
	done := make(chan struct{})
	go func() {
		defer close(done)
		all[0].server.Leave(t.Context())
	}()
	for asked := 0; all[0].dir.Len() > 0 || asked < 100; asked++ {
		for _, n := range nodes {
			for i, a := range all {
				c, err := a.dial(string(n), target)
				if err != nil {
					t.Fatalf("request %d of replica %d for %s: %v", asked, i, n, err)
				}
				c.Close()
			}
		}
	}
	<-done
}

// A balancer that is late leads an edge to the replica that stops, for some seconds more. The replica serves the
// node until the edge has reached another one that stays, and callers notice nothing. A replica that stopped before
// and still has a session of the edge, because of a conn, does not count.
func TestLeaveWaitsForItsNodes(t *testing.T) {
	all := newFleet(t, 3, func(c *stream.ServerConfig) { c.Grace = tunnel.GracePeriod })
	var leads atomic.Int32 // the replica that the balancer leads to
	cfg := all[0].clientConfig("edge1")
	cfg.Dial = func(ctx context.Context, network, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, network, all[leads.Load()].port)
	}
	all[0].start(cfg, direct)
	for _, a := range all {
		a.front = a.peers
		a.eventually("the node is known", func() bool { return all[0].dir.Holds("edge1") && a.peers.Holds("edge1") })
	}
	c, _ := all[1].pair("edge1")
	target := testkit.Serve(t, func(*net.TCPConn) {}) // which closes each connection
	stop := func(i int) (stopped chan struct{}) {
		stopped = make(chan struct{})
		go func() {
			defer close(stopped)
			all[i].stopOne()
		}()
		return stopped
	}
	asks := func(from, until *replicaRig) {
		t.Helper()
		for asked := 0; !until.dir.Holds("edge1"); asked++ {
			c, err := from.dial("edge1", target)
			if err != nil {
				t.Fatalf("request %d: %v", asked, err)
			}
			c.Close()
		}
	}
	leads.Store(1)
	first := stop(0)
	asks(all[2], all[1])
	time.AfterFunc(5*time.Second, func() { leads.Store(2) })
	second := stop(1)
	asks(all[2], all[2])
	if leads.Load() != 2 || tunnel.IsClosed(first) {
		t.Fatal("the edge has moved too early, or the first replica has ended; this test shows nothing")
	}
	c.Close()
	<-first
	<-second
}

// An address that has led to this replica itself may lead to another one later: DNS is
// late, or an address was given away.
func TestAddressThatWasOurs(t *testing.T) {
	all := newFleet(t, 2)
	a := all[0]
	found := make(chan struct{})
	c, err := stream.NewClient(stream.ClientConfig{
		Address: "the same", TLS: a.peers.cfg.TLS, Log: a.log, Grace: patience, Dial: all.balanced(),
		Replica: &stream.ReplicaConfig{
			ID: a.peers.id, Hint: hint, Have: func() []string { return nil },
			Started: func(s *tunnel.Session) (func(), error) {
				close(found)
				return func() { <-s.Done() }, nil
			},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	replica := testkit.Run(t, c.Run)
	select {
	case <-found:
	case <-time.After(12 * patience): // it pauses for 5 to 10 s, then twice as long after each failure
		t.Error("it is not tried again")
	}
	replica.Stop()
	if n := a.counters.JoinsRefused.Load(); n != 0 || len(a.text.Lines("level=WARN", "join refused")) != 0 {
		t.Errorf("meeting itself counts as %d refusals", n)
	}
}

// gate is an authenticator that lets nobody pass before it is opened.
type gate struct {
	auth.Authenticator
	once          sync.Once // of all replicas' servers, only the first asks at a closed gate
	entered, open chan struct{}
}

func (g *gate) Authenticate(ctx context.Context, c auth.Credential) (auth.Grant, error) {
	g.once.Do(func() {
		close(g.entered)
		<-g.open
	})
	return g.Authenticator.Authenticate(ctx, c)
}

// An edge that was joining when a replica began to leave is asked to move, too.
func TestLeaveTellsWhoWasJoining(t *testing.T) {
	g := &gate{Authenticator: tokens{}, entered: make(chan struct{}), open: make(chan struct{})}
	all := newFleet(t, 2, func(c *stream.ServerConfig) { c.Auth = g })
	cfg := all[0].clientConfig("edge1")
	cfg.Dial = all.balanced()
	all[0].start(cfg, direct)
	<-g.entered
	left := make(chan struct{})
	go func() {
		defer close(left)
		all[0].server.Leave(t.Context())
	}()
	all[0].eventually("it leaves", func() bool { return len(all[0].text.Lines("the other replicas take over")) > 0 })
	close(g.open)
	all[1].eventually("the edge turns to the other one", func() bool { return all[1].dir.Holds("edge1") })
	<-left
}

// A konnectivity agent that has joined at another replica as a node whose edge is here ends
// nothing, and takes no dial from it, however much later it has come. Another edge does.
func TestAgentElsewhere(t *testing.T) {
	all := newFleet(t, 1)
	all[0].join("edge1", direct)
	p, s := all[0].peers, all[0].dir.Lookup("edge1")
	late := time.Now().Add(time.Hour)
	agent, edge := held{since: late}, held{since: late.Add(-time.Minute), instance: uuid.NewString()}
	claim := func(h held) *tunnel.Session {
		r := &replica{id: uuid.NewString(), link: new(tunnel.Session), nodes: map[tunnel.NodeName]held{"edge1": h}}
		p.mu.Lock()
		defer p.mu.Unlock()
		p.replicas[r.id] = r
		return r.link
	}
	t.Cleanup(func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		clear(p.replicas) // they have no streams
	})
	agents := claim(agent)
	p.yield("edge1", agent)
	if tunnel.IsClosed(s.Done()) {
		t.Fatal("the agent has ended the edge's session")
	}
	if p.hasLeft(s) {
		t.Error("the agent takes the edge's dials")
	}
	edges := claim(edge)
	if got := p.holders("edge1"); !slices.Equal(got, []*tunnel.Session{edges, agents}) {
		t.Error("of two other replicas the one that holds the edge is not asked first")
	}
	if !p.hasLeft(s) {
		t.Error("another edge does not take the dials")
	}
	if !p.hasLeft(&tunnel.Session{Node: "edge1", Since: late, Agent: true}) {
		t.Error("an edge elsewhere does not take the dials of an agent here")
	}
	p.yield("edge1", edge)
	if !tunnel.IsClosed(s.Done()) {
		t.Error("another edge does not end the session")
	}
}

// A name leads to a connected replica rather than to a lost replica. Otherwise the later session decides. A name leads
// to a replica that is about to stop only if no replica stays.
func TestWhereNamesLead(t *testing.T) {
	addr := func(i int) []netip.Addr { return []netip.Addr{clientAddr(i)} }
	const self, early, late = 0, 1, 2 // of the two other replicas, the second has the later session
	type state struct{ lost, stops, noAddrs bool }
	for _, test := range []struct {
		what          string
		stops         bool // this replica is about to stop
		first, second state
		want          int
	}{
		{what: "both are connected", want: late},
		{what: "the one with the later session is lost", second: state{lost: true}, want: early},
		{what: "the one with the earlier session is lost", first: state{lost: true}, want: late},
		{what: "both are lost", first: state{lost: true}, second: state{lost: true}, want: late},
		{what: "the holder stops", second: state{stops: true}, want: self},
		{what: "the holder stops, and so does this replica", stops: true, second: state{stops: true}, want: early},
		{what: "the holder has no addresses", second: state{noAddrs: true}, want: self},
		{what: "it has none, and this replica stops", stops: true, second: state{noAddrs: true}, want: early},
		{what: "all stop", stops: true, first: state{stops: true}, second: state{stops: true}, want: self},
		{
			what: "the one that is connected has no addresses", first: state{noAddrs: true}, second: state{lost: true},
			want: self,
		},
	} {
		p := &Peers{
			cfg: Config{Addrs: addr(self)}, dir: new(tunnel.Directory), left: make(chan struct{}),
			replicas: make(map[string]*replica),
		}
		if test.stops {
			close(p.left)
		}
		for i, s := range map[int]state{early: test.first, late: test.second} {
			h := held{since: time.Now().Add(time.Duration(i) * time.Minute), instance: uuid.NewString()}
			r := &replica{id: uuid.NewString(), leaves: s.stops, nodes: map[tunnel.NodeName]held{"edge1": h}}
			if !s.lost {
				r.link = new(tunnel.Session)
			}
			if !s.noAddrs {
				r.addrs = addr(i)
			}
			p.replicas[r.id] = r
		}
		for range 20 { // the order of a map is random
			if got := p.Addrs("edge1"); !slices.Equal(got, addr(test.want)) {
				t.Fatalf("%s: the name leads to %v, want %v", test.what, got, addr(test.want))
			}
			if got := p.All()["edge1"]; !slices.Equal(got, addr(test.want)) {
				t.Fatalf("%s: among all names, the name leads to %v, want %v", test.what, got, addr(test.want))
			}
		}
		if got := p.Addrs("edge2"); got != nil {
			t.Errorf("%s: a name that no replica holds leads to %v", test.what, got)
		}
	}
}

// What a replica says of changes before it has said all ends its session, without a panic.
func TestChangeBeforeTheWhole(t *testing.T) {
	p, from := newFleet(t, 1)[0].peers, new(tunnel.Session)
	p.Attach(uuid.NewString(), nil, from)
	t.Cleanup(func() { p.Detach(from) })
	if _, err := p.Learn(from, &pb.Nodes{Held: []*pb.Held{{Node: "edge1"}}}); err == nil {
		t.Error("a change of nothing is taken")
	}
}

// A replica that cannot join another one because of a date says whose certificate it is, and what to replace.
func TestHintOfDates(t *testing.T) {
	now := time.Now()
	leaf := &x509.Certificate{NotBefore: now.Add(-2 * time.Hour), NotAfter: now.Add(-time.Hour)}
	ca := &x509.Certificate{NotBefore: now.Add(time.Hour), NotAfter: now.Add(2 * time.Hour), IsCA: true}
	for cert, want := range map[*x509.Certificate]string{
		leaf: "the other replica's certificate expired on " + leaf.NotAfter.UTC().Format(time.RFC3339) +
			": replace cert and key in [mode.cloud.stream.server] there",
		ca: "the certificate of the replicas' CA is not valid before " + ca.NotBefore.UTC().Format(time.RFC3339) +
			": replace ca in [mode.cloud.stream.peers]",
	} {
		err := fmt.Errorf("joining: %w", x509.CertificateInvalidError{Cert: cert, Reason: x509.Expired})
		if got := hint(err); !errors.Is(got, err) || !strings.Contains(got.Error(), want) {
			t.Errorf("%v\nlacks %q", got, want)
		}
	}
	other := x509.CertificateInvalidError{Cert: leaf, Reason: x509.IncompatibleUsage}
	if got := hint(other).Error(); strings.Contains(got, "expired") {
		t.Errorf("an error that is not about dates: %s", got)
	}
}
