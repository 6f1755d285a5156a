package peers

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/internal/testkit/testca"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/stream"
	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

func TestPeersKnowTheNodes(t *testing.T) {
	all := newFleet(t, 3)
	e1 := all[0].join("edge1", direct)
	all[1].join("edge2", direct)
	want := []tunnel.NodeName{"edge1", "edge2"}
	for i, a := range all {
		a.eventually("it knows both nodes", func() bool { return slices.Equal(a.peers.Connected(), want) })
		if got := a.peers.Addrs("edge2"); !slices.Equal(got, []netip.Addr{all[1].addr}) {
			t.Errorf("replica %d says that %v leads to edge2", i, got)
		}
		for _, b := range all {
			a.eventually("it hears each replica", func() bool { return a.peers.Hears(b.addr) })
		}
	}
	changed := all[2].peers.Changed()
	e1.Stop()
	for _, a := range all {
		a.eventually("it knows that edge1 has gone", func() bool { return !a.peers.Holds("edge1") && a.peers.Holds("edge2") })
	}
	select {
	case <-changed:
	case <-time.After(patience):
		t.Error("nobody was told")
	}
}

// More nodes than fit into one message.
func TestPeersTellMany(t *testing.T) {
	all := newFleet(t, 2)
	var sessions []*tunnel.Session
	for i := range 3*tellBatch + 7 {
		node := tunnel.NodeName(fmt.Sprint(strings.Repeat("long", 40), i))
		s := &tunnel.Session{Node: node, Since: time.Now(), Link: mute{}}
		sessions = append(sessions, s)
		all[0].dir.Attach(s)
	}
	all[1].eventually("all are known", func() bool { return len(all[1].peers.Connected()) == len(sessions) })
	for _, s := range sessions {
		all[0].dir.Detach(s)
	}
	all[1].eventually("none is known", func() bool { return len(all[1].peers.Connected()) == 0 })
}

func TestRelayRefuses(t *testing.T) {
	all := newFleet(t, 2)
	all[0].join("edge1", func(_ context.Context, r tunnel.Request) (net.Conn, error) {
		if !r.Relayed || r.Caller != "test" || r.Category != "tcp" {
			t.Errorf("the edge is asked for %+v", r)
		}
		return nil, tunnel.Refusef(tunnel.Denied, "not here")
	})
	r := all[1]
	r.front = r.peers
	r.eventually("edge1 is known", func() bool { return r.peers.Holds("edge1") })
	_, err := r.dial("edge1", "10.0.0.1:22")
	if tunnel.CodeOf(err) != tunnel.Denied || !strings.Contains(err.Error(), "not here") {
		t.Errorf("got %v, want the edge's own refusal", err)
	}
	if _, err := r.dial("edge9", "10.0.0.1:22"); tunnel.CodeOf(err) != tunnel.NoSuchNode {
		t.Errorf("got %v, want %v", err, tunnel.NoSuchNode)
	}
	relayed := all[0].relays.Refusals(tunnel.Denied) + r.relays.Refusals(tunnel.Denied)
	if relayed == 0 || r.counters.Refusals(tunnel.Denied) != 0 {
		t.Error("a relayed refusal is not counted as one")
	}
}

// limited is a session's Dialer that has reached a limit: an open waits, or is refused if it must not wait.
type limited struct{ asked atomic.Int64 }

func (l *limited) Dial(_ context.Context, r tunnel.Request) (net.Conn, error) {
	l.asked.Add(1)
	if r.NoWait {
		return nil, tunnel.Refusef(tunnel.Overloaded, "limit dials: full")
	}
	return nil, tunnel.Refusef(tunnel.Refused, "it has waited for its turn")
}

// An open of a node that both replicas hold waits for the limit at its own replica. Relayed, its conn would
// end with the other replica.
func TestOpenWaitsAtItsOwnReplica(t *testing.T) {
	p, link := benchPeers()
	own, other := new(limited), new(limited)
	link.Dialer = other
	if _, err := p.Learn(link, &pb.Nodes{Held: []*pb.Held{heldBy(0)}, Full: true}); err != nil {
		t.Fatal(err)
	}
	node := tunnel.NodeName(heldBy(0).GetNode())
	p.dir.Attach(&tunnel.Session{Node: node, All: true, Dialer: own})
	_, err := p.Dial(t.Context(), tunnel.Request{Node: node, Category: "tcp", Network: "tcp", Addr: "target:1"})
	if tunnel.CodeOf(err) != tunnel.Refused || own.asked.Load() != 1 || other.asked.Load() != 0 {
		t.Errorf("got %v after %d opens here and %d at the other replica, want one that waits here",
			err, own.asked.Load(), other.asked.Load())
	}
}

// An edge that moves to another replica while this one restarts is not expected here. A caller that names no node does
// not wait for an edge that has gone, while any replica has another one.
func TestExpectedElsewhere(t *testing.T) {
	p, link := benchPeers()
	moved := tunnel.NodeName(heldBy(0).GetNode())
	p.dir.Expect([]tunnel.NodeName{moved, "gone"}, time.Now().Add(time.Hour))
	if _, err := p.Learn(link, &pb.Nodes{Held: []*pb.Held{heldBy(0)}, Full: true}); err != nil {
		t.Fatal(err)
	}
	if p.dir.Missing() != 1 || p.dir.Holds(moved) {
		t.Error("a node that is at another replica is expected")
	}
	there := new(limited)
	link.Dialer = there
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	_, err := p.Dial(ctx, tunnel.Request{Category: "tcp", Network: "tcp", Addr: "target:1"})
	if tunnel.CodeOf(err) != tunnel.Refused || there.asked.Load() != 2 {
		t.Errorf("got %v after %d opens at the other replica, want one that waits there for the limit",
			err, there.asked.Load())
	}
	_, err = p.Dial(ctx, tunnel.Request{Category: "tcp", Network: "tcp", Addr: "target:1", NoWait: true})
	if tunnel.CodeOf(err) != tunnel.Overloaded {
		t.Errorf("got %v of an open that does not wait, want %v", err, tunnel.Overloaded)
	}
}

// A node's quota is the same by way of another replica: opens count, and wait, where the
// node is held; the refusal of one that does not wait arrives as it is.
func TestRelayedOpensCountAtTheHolder(t *testing.T) {
	all := newFleet(t, 2, func(c *stream.ServerConfig) { c.Limits.Opens = 1 })
	holder, other := all[0], all[1]
	holder.join("edge1", func(context.Context, tunnel.Request) (net.Conn, error) {
		return nil, tunnel.Refusef(tunnel.Refused, "nothing listens")
	})
	other.eventually("the other replica hears of the node", func() bool { return other.peers.Holds("edge1") })
	dial := func(noWait bool) error {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		_, err := other.peers.Dial(ctx, tunnel.Request{
			Node: "edge1", Category: "tcp", Network: "tcp", Addr: "target:1", NoWait: noWait,
		})
		return err
	}
	for opened := 0; ; opened++ {
		err := dial(true)
		if tunnel.CodeOf(err) == tunnel.Refused { // by the edge
			continue
		}
		limit := "limit " + tunnel.LimitOpens.String() + ": "
		says := func(what string) bool { return err != nil && strings.Contains(err.Error(), what) }
		if tunnel.CodeOf(err) != tunnel.Overloaded || !says(limit) || !says("edge1") {
			t.Errorf("got %v, want overloaded by limit %s for edge1", err, tunnel.LimitOpens)
		}
		if opened < 2 {
			t.Errorf("only %d opens were let through, want 2 at least", opened)
		}
		break
	}
	start := time.Now()
	if err := dial(false); tunnel.CodeOf(err) != tunnel.Refused {
		t.Errorf("an open that waits at the holder: %v after %s", err, time.Since(start))
	}
	for _, a := range all {
		if n := a.counters.LimitedBy(tunnel.LimitOpens); n != 0 {
			t.Errorf("limit %s was counted %d times, want 0", tunnel.LimitOpens, n)
		}
	}
}

// A node that has gone to another replica is served there at once, though its old
// session has not been noticed to be dead.
func TestNewerSessionWins(t *testing.T) {
	all := newFleet(t, 2)
	old := all[0].join("edge1", direct)
	was := old.client.Session()
	since := all[0].dir.Lookup("edge1").Since
	testkit.Eventually(t, "it is clearly older", func() bool { return time.Since(since) > sameTime })
	all[1].join("edge1", direct)
	select {
	case <-was.Done():
	case <-time.After(patience):
		t.Fatal("the older session lives on")
	}
	if lines := all[0].text.Lines("another process has joined as this node"); len(lines) == 0 {
		t.Error("two edges of one name, and nobody is told")
	}
}

// A replica that is lost is not asked any more; what it held is forgotten later.
func TestPeerLost(t *testing.T) {
	all := newFleet(t, 2)
	e := all[0].join("edge1", direct)
	r := all[1]
	r.eventually("edge1 is known", func() bool { return r.peers.Holds("edge1") })
	e.Stop()
	all[0].meeting.Stop() // what a replica does that ends
	r.eventually("the replica is lost", func() bool { return len(r.peers.sessions()) == 0 })
	r.front = r.peers
	if _, err := r.dial("edge1", "10.0.0.1:22"); tunnel.CodeOf(err) != tunnel.NoSuchNode {
		t.Errorf("got %v, want %v", err, tunnel.NoSuchNode)
	}
	if !r.peers.Hears(all[0].addr) {
		t.Error("what a replica held is to be remembered for a while")
	}
	r.peers.mu.Lock()
	lost := r.peers.replicas[all[0].peers.id]
	r.peers.mu.Unlock()
	r.peers.forget(lost)
	if r.peers.Hears(all[0].addr) {
		t.Error("the replica is not forgotten")
	}
}

// Who is not a replica is not let in as one.
func TestReplicaImpostors(t *testing.T) {
	all := newFleet(t, 2)
	a := all[0]
	otherCA := testca.New(t, "replicas")
	name := []string{"replicas"}
	for what, certificates := range map[string][]tls.Certificate{
		"no certificate": nil,
		"an edge's, of the same CA": {
			a.ca.Pair(t, auth.Leaf{CommonName: "replica", DNSNames: []string{"edge1"}, Client: true}),
		},
		"a server's, not for clients": {a.ca.Pair(t, auth.Leaf{CommonName: "replica", DNSNames: name, Server: true})},
		"the right name, from another CA": {
			otherCA.Pair(t, auth.Leaf{CommonName: "replica", DNSNames: name, Server: true, Client: true}),
		},
	} {
		t.Run(what, func(t *testing.T) {
			err := joinAsReplica(t, a, &tls.Config{Certificates: certificates})
			if status.Code(err) != codes.Unauthenticated {
				t.Errorf("got %v, want %v", err, codes.Unauthenticated)
			}
			if len(a.peers.sessions()) != 1 {
				t.Error("it is among the replicas")
			}
		})
	}
	t.Run("where there are no replicas", func(t *testing.T) {
		alone := newFleet(t, 1, func(c *stream.ServerConfig) { c.Replicas = nil })[0]
		err := joinAsReplica(t, alone, new(tls.Config))
		if status.Code(err) != codes.Unauthenticated {
			t.Errorf("got %v, want %v", err, codes.Unauthenticated)
		}
	})
}

var errLetIn = errors.New("let in")

// Edges and replicas are told the id of a replica as it is, so there is one way to write it.
func TestReplicaIDs(t *testing.T) {
	a := newFleet(t, 1)[0]
	conf := func() *tls.Config {
		own := a.ca.Pair(t, auth.Leaf{CommonName: "replica", DNSNames: []string{"replicas"}, Server: true, Client: true})
		return &tls.Config{Certificates: []tls.Certificate{own}}
	}
	id := uuid.NewString()
	others := []string{
		"{" + id + "}", "x" + id + "y", "urn:uuid:" + id, strings.ReplaceAll(id, "-", ""), strings.ToUpper(id), "me",
	}
	for _, other := range others {
		if err := joinAs(t, a, other, conf()); status.Code(err) != codes.InvalidArgument {
			t.Errorf("%s: %v, want %v", other, err, codes.InvalidArgument)
		}
	}
	if err := joinAs(t, a, id, conf()); !errors.Is(err, errLetIn) {
		t.Errorf("%s: %v", id, err)
	}
}

// An authority leaves the CA of the peers: who has joined by it cannot join again, by a
// TLS session of before either, which proves a certificate that was looked at then.
func TestReplicaOfAnAuthorityThatHasLeft(t *testing.T) {
	a := newFleet(t, 1)[0]
	name := []string{"replicas"}
	resumed := false
	conf := &tls.Config{
		Certificates: []tls.Certificate{
			a.ca.Pair(t, auth.Leaf{CommonName: "replica", DNSNames: name, Server: true, Client: true}),
		},
		ClientSessionCache: tls.NewLRUClientSessionCache(10),
		VerifyConnection: func(s tls.ConnectionState) error {
			resumed = s.DidResume
			return nil
		},
	}
	for _, again := range []bool{false, true} {
		if err := joinAsReplica(t, a, conf); !errors.Is(err, errLetIn) || resumed != again {
			t.Fatalf("%v, resumed %v, want %v", err, resumed, again)
		}
	}
	next := testca.New(t, "replicas")
	a.tls.Store(&tls.Config{
		Certificates: []tls.Certificate{
			next.Pair(t, auth.Leaf{CommonName: "replica", DNSNames: name, Server: true, Client: true}),
		},
		RootCAs: next.Pool(), ServerName: "replicas",
	})
	if err := joinAsReplica(t, a, conf); status.Code(err) != codes.Unauthenticated || !resumed {
		t.Errorf("%v, resumed %v", err, resumed)
	}
	fresh := &tls.Config{Certificates: a.tls.Load().Certificates}
	if err := joinAsReplica(t, a, fresh); !errors.Is(err, errLetIn) {
		t.Errorf("one of the new authority: %v", err)
	}
}

// joinAsReplica says to be a replica.
func joinAsReplica(t *testing.T, a *replicaRig, conf *tls.Config) error {
	t.Helper()
	return joinAs(t, a, uuid.NewString(), conf)
}

func joinAs(t *testing.T, a *replicaRig, id string, conf *tls.Config) error {
	t.Helper()
	conf.RootCAs, conf.ServerName = a.ca.Pool(), "cloud"
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	told := make(chan error, 1)
	c, err := stream.NewClient(stream.ClientConfig{
		Address: a.port, TLS: fixed(conf), Log: a.log, Grace: patience,
		Replica: &stream.ReplicaConfig{
			ID: id, Have: func() []string { return nil },
			Started: func(*tunnel.Session) (func(), error) { return nil, errLetIn },
			Hint: func(err error) error {
				told <- err
				<-ctx.Done() // it does not try again
				return err
			},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	stopped := make(chan error, 1)
	go func() { stopped <- c.Run(ctx) }()
	select {
	case err = <-told:
	case <-ctx.Done():
		err = ctx.Err()
	}
	cancel()
	<-stopped
	return err
}

// A replica that stops serves the other replicas' callers until its nodes have moved, and lets relayed conns end.
func TestRelayDrains(t *testing.T) {
	all := newFleet(t, 2)
	r := all[0]
	r.front = all[1].peers
	r.join("edge1", direct)
	before, farBefore := r.pair("edge1")
	r.meeting.Cancel()
	after, farAfter := r.pair("edge1")
	for c, far := range map[net.Conn]*net.TCPConn{before: farBefore, after: farAfter} {
		if _, err := io.WriteString(c, "late"); err != nil {
			t.Fatal(err)
		}
		c.Close()
		if got := testkit.ReadAll(t, far); string(got) != "late" {
			t.Errorf("got %q", got)
		}
		far.Close()
	}
	select {
	case <-r.meeting.Done():
		t.Fatal("it has ended, and its node has not moved")
	default:
	}
	select {
	case <-r.meeting.Done():
	case <-time.After(2 * patience):
		t.Error("it does not leave")
	}
}

// balanced dials the replicas in turn, beginning with the first, as a balancer would.
func (all fleet) balanced() func(ctx context.Context, network, addr string) (net.Conn, error) {
	var turn atomic.Int64
	return func(ctx context.Context, network, _ string) (net.Conn, error) {
		a := all[int(turn.Add(1)-1)%len(all)]
		return (&net.Dialer{}).DialContext(ctx, network, a.port)
	}
}

// stopOne stops a replica as its process would be: others first, then everything.
func (a *replicaRig) stopOne() {
	a.server.Leave(context.Background())
	a.running.Cancel()
	a.meeting.Stop()
}

// A replica that stops loses nothing: its edge is with another one before it ends, and a
// conn that was open ends in peace.
func TestLeaveLosesNothing(t *testing.T) {
	all := newFleet(t, 2, func(c *stream.ServerConfig) { c.Grace = tunnel.GracePeriod })
	cfg := all[0].clientConfig("edge1")
	cfg.Dial = all.balanced()
	e := all[0].start(cfg, direct)
	r := all[1]
	r.front = r.peers
	r.eventually("edge1 is at the first replica, and the second knows it", func() bool {
		return all[0].dir.Holds("edge1") && r.peers.Holds("edge1") && !r.dir.Holds("edge1")
	})
	if n := all[0].server.Unmoved(); n != 1 {
		t.Errorf("%d nodes have the first replica alone, want 1", n)
	}
	c, far := r.pair("edge1")
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		all[0].stopOne()
	}()
	for _, a := range all {
		a.eventually("the name leads to the replica that stays", func() bool {
			want := []netip.Addr{r.addr}
			return slices.Equal(a.peers.Addrs("edge1"), want) && slices.Equal(a.peers.All()["edge1"], want)
		})
	}
	r.eventually("nobody can join where it ends", func() bool {
		c, err := net.Dial("tcp", all[0].port)
		if err == nil {
			c.Close()
		}
		return err != nil
	})
	target := testkit.Serve(t, func(c *net.TCPConn) { io.WriteString(c, "hello") })
	asked := 0
	for moved := false; !moved || asked < 20; asked++ {
		moved = r.dir.Holds("edge1") && all[0].server.Unmoved() == 0
		c, err := r.dial("edge1", target)
		if err != nil {
			t.Fatalf("request %d: %v", asked, err)
		}
		if got := testkit.ReadAll(t, c); string(got) != "hello" {
			t.Fatalf("request %d: got %q", asked, got)
		}
		c.Close()
	}
	select {
	case <-stopped:
		t.Fatal("it has stopped with a conn open")
	default:
	}
	go func() {
		io.WriteString(far, "late")
		far.Close()
	}()
	if got := testkit.ReadAll(t, c); string(got) != "late" {
		t.Errorf("got %q", got)
	}
	c.Close()
	select {
	case <-stopped:
	case <-time.After(2 * patience):
		t.Fatal("it does not stop")
	}
	if e.client.Ready() != nil {
		t.Errorf("the edge: %v", e.client.Ready())
	}
	r.front = nil
	r.idle(e)
}

// An edge that keeps a session with every replica finds them all behind one address,
// and opens no second one with any.
func TestSessionWithEveryReplica(t *testing.T) {
	all := newFleet(t, 3)
	cfg := all[0].clientConfig("edge1")
	cfg.Dial, cfg.All = all.balanced(), true
	e := all[0].start(cfg, direct)
	for _, a := range all {
		within(t, 3*patience, "each replica holds edge1", func() bool { return a.dir.Holds("edge1") })
	}
	for i, a := range all {
		if n := a.counters.Sessions.Load(); n != 1 {
			t.Errorf("replica %d has had %d sessions, want 1", i, n)
		}
		a.front = a.peers
		c, far := a.pair("edge1")
		c.Close()
		far.Close()
		if a.relays.ConnsOpened.Load() != 0 {
			t.Errorf("replica %d relays to others what it holds itself", i)
		}
		a.front = nil
	}
	all[0].stopOne()
	all[0].eventually("the session has ended", func() bool { return !all[0].dir.Holds("edge1") })
	if !all[1].dir.Holds("edge1") || !all[2].dir.Holds("edge1") {
		t.Error("the sessions with the other replicas must go on")
	}
	all[1].idle(e)
}

// A replica that has just started is not ready before the others have told it what they
// hold, and they, who have not got through to it for a while, do not wait to be asked.
func TestStartedReplicaKnowsTheNodes(t *testing.T) {
	p := newPlaces(t, 2)
	ln := testkit.NewTarget(t)
	hungUp := make(chan struct{})
	go func() { // nobody is there yet
		defer close(hungUp)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			c.Close()
		}
	}()
	p.leads(p.names[1], ln.Address())
	first := p.newReplica(t, 0, p.names)
	p.leads(p.names[0], first.port)
	first.meet()
	first.join("edge1", direct)
	first.eventually("the first is ready: the other one cannot be joined",
		func() bool { return first.peers.Ready() == nil })
	link := func() *stream.Client {
		first.peers.mu.Lock()
		defer first.peers.mu.Unlock()
		return first.peers.links[p.names[1]]
	}
	first.eventually("it has given up for a while", func() bool {
		return len(first.text.Lines("no session; trying again", p.names[1])) >= 6 && link().Ready() != nil
	})

	ln.Close()
	<-hungUp
	second := p.newReplica(t, 1, p.names)
	p.leads(p.names[1], second.port)
	second.meet()
	if second.peers.Ready() == nil && !second.peers.Holds("edge1") {
		t.Error("ready before it knows anything")
	}
	second.eventually("the second is ready", func() bool { return second.peers.Ready() == nil })
	if !second.peers.Holds("edge1") {
		t.Error("ready without knowing what the first one holds")
	}
}

// A replica that is about to stop takes no new replica, but joins it. Until then only that replica knows its nodes, so
// a replica that starts waits for it.
func TestStartedReplicaWaitsForOneThatStops(t *testing.T) {
	p := newPlaces(t, 2)
	stops := p.newReplica(t, 0, p.names[1:])
	stops.join("edge1", direct)
	const refuses = "127.0.0.1:9000" // the host is that of all replicas here
	starts := p.newReplica(t, 1, []string{refuses})
	p.leads(p.names[1], starts.port)
	starts.meet()
	starts.eventually("the address has refused", func() bool {
		starts.peers.mu.Lock()
		defer starts.peers.mu.Unlock()
		starts.peers.began = time.Now().Add(time.Hour) // so that it waits for as long as a busy machine needs
		link := starts.peers.links[refuses]
		return link != nil && errors.Is(link.Ready(), syscall.ECONNREFUSED)
	})
	if starts.peers.Ready() == nil {
		t.Error("it is ready before it knows any node")
	}
	stops.meet()
	starts.eventually("it is ready", func() bool { return starts.peers.Ready() == nil })
	if !starts.peers.Holds("edge1") {
		t.Error("it is ready without the node of the replica that stops")
	}
}

func TestHasTold(t *testing.T) {
	told := &replica{
		link: &tunnel.Session{Remote: "[::ffff:10.0.0.2]:40000"}, nodes: map[tunnel.NodeName]held{},
		addrs: []netip.Addr{netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("fd00::2")},
	}
	silent := &replica{link: &tunnel.Session{Remote: "10.0.0.3:40000"}}
	lost := &replica{nodes: map[tunnel.NodeName]held{}, addrs: []netip.Addr{netip.MustParseAddr("10.0.0.4")}}
	shared := &replica{link: &tunnel.Session{Remote: "10.0.0.5:40000"}, nodes: map[tunnel.NodeName]held{}}
	links := make(map[string]*stream.Client)
	for _, address := range []string{"10.0.0.2:9000", "10.0.0.5:9001", "[::ffff:10.0.0.5]:9002"} {
		c, err := stream.NewClient(stream.ClientConfig{Log: slog.New(slog.DiscardHandler), Replica: &stream.ReplicaConfig{}})
		if err != nil {
			t.Fatal(err)
		}
		links[address] = c
	}
	p := &Peers{
		replicas: map[string]*replica{"told": told, "silent": silent, "lost": lost, "shared": shared}, links: links,
	}
	for address, want := range map[string]bool{
		"10.0.0.2:9000": true, "[fd00::2]:9000": true, "[::ffff:10.0.0.2]:9000": true,
		"10.0.0.3:9000": false, "10.0.0.4:9000": false, "cloud-2:9000": false,
		"10.0.0.5:9001": false, "10.0.0.5:9002": false, // one of them has told
	} {
		if got := p.hasToldLocked(address); got != want {
			t.Errorf("%s: %t, want %t", address, got, want)
		}
	}
}
