package stream

import (
	"context"
	"crypto/tls"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/internal/testkit/testca"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/listen"
	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// others is as much of pkg/peers as these tests need: it lets every replica in, and keeps their
// sessions.
type others struct {
	id      string
	count   tunnel.Counters
	learn   func(*pb.Nodes) // nil: it does not matter
	changed bool            // what Learn reports

	mu       sync.Mutex                 // guards the following
	sessions map[string]*tunnel.Session // by the id of the replica
}

func (o *others) ID() string                             { return o.id }
func (o *others) Authenticate(tls.ConnectionState) error { return nil }
func (o *others) Counters() *tunnel.Counters             { return &o.count }
func (o *others) Leave()                                 {}
func (o *others) NodesMoved(context.Context) int         { return 0 }

func (o *others) Attach(id string, _ []string, s *tunnel.Session) (replaced *tunnel.Session) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.sessions == nil {
		o.sessions = make(map[string]*tunnel.Session)
	}
	replaced, o.sessions[id] = o.sessions[id], s
	return replaced
}

func (o *others) Detach(s *tunnel.Session) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	for id, other := range o.sessions {
		if other == s {
			delete(o.sessions, id)
			return true
		}
	}
	return false
}

func (o *others) Joined() (ids []string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for id := range o.sessions {
		ids = append(ids, id)
	}
	return ids
}

func (o *others) Staying() []string { return o.Joined() }

func (o *others) Learn(_ *tunnel.Session, news *pb.Nodes) (changed bool, err error) {
	if o.learn != nil {
		o.learn(news)
	}
	return o.changed, nil
}

// replicaRig is a rig whose cloud is one replica of several.
type replicaRig struct {
	*rig
	others *others
	links  []*Client // its sessions with the others
}

// fleet are replicas each of which has joined each other.
type fleet []*replicaRig

func newFleet(t *testing.T, n int, change ...func(*ServerConfig)) fleet {
	t.Helper()
	ca := testca.New(t, "replicas")
	return newFleetOf(t, ca, n, change...)
}

// newFleetOf makes a fleet whose certificates ca signs.
func newFleetOf(t *testing.T, ca testca.CA, n int, change ...func(*ServerConfig)) fleet {
	t.Helper()
	own := ca.Pair(t, auth.Leaf{CommonName: "replica", DNSNames: []string{"cloud"}, Server: true, Client: true})
	var all fleet
	for range n {
		o := &others{id: uuid.NewString()}
		r := newRig(t, append(change, func(c *ServerConfig) {
			c.TLS, c.Replicas = &tls.Config{Certificates: []tls.Certificate{own}}, o
		})...)
		r.ca = ca
		all = append(all, &replicaRig{rig: r, others: o})
	}
	conf := &tls.Config{RootCAs: ca.Pool(), ServerName: "cloud", Certificates: []tls.Certificate{own}}
	for _, a := range all {
		for _, b := range all {
			if a != b {
				a.joinReplica(b, conf)
			}
		}
	}
	for _, a := range all {
		a.eventually("the replicas have joined each other", func() bool {
			return len(a.others.Joined()) == n-1 &&
				!slices.ContainsFunc(a.links, func(c *Client) bool { return c.Session() == nil }) // which comes later
		})
	}
	return all
}

// joinReplica has a join b until the test ends.
func (a *replicaRig) joinReplica(b *replicaRig, conf *tls.Config) {
	t := a.t
	t.Helper()
	c, err := NewClient(ClientConfig{
		Address: b.server.Addr().String(), TLS: fixed(conf), Counters: &a.others.count, Log: a.log.logger(), Grace: patience,
		Connections: MaxConnections,
		Replica: &ReplicaConfig{
			ID: a.others.id, Have: func() []string { return nil }, Serve: a.dir.Dial,
			Started: func(s *tunnel.Session) (func(), error) { return func() { <-s.Done() }, nil },
			Hint:    func(err error) error { return err },
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	a.links = append(a.links, c)
	testkit.Run(t, c.Run)
}

// front dials through another replica.
type front struct {
	by     *replicaRig
	holder *replicaRig // of every node
}

func (f *front) link() *tunnel.Session {
	f.by.others.mu.Lock()
	defer f.by.others.mu.Unlock()
	return f.by.others.sessions[f.holder.others.id]
}

func (f *front) Dial(ctx context.Context, r tunnel.Request) (net.Conn, error) {
	return f.link().Dialer.Dial(ctx, r)
}

// newRelayedRig is a rig whose conns are dialled at another replica.
func newRelayedRig(t *testing.T) *rig {
	t.Helper()
	all := newFleet(t, 2)
	r := all[0].rig
	r.front = &front{by: all[1], holder: all[0]}
	return r
}

// balanced dials the replicas in turn, beginning with the first, as a balancer would.
func (all fleet) balanced() func(ctx context.Context, network, addr string) (net.Conn, error) {
	var turn atomic.Int64
	return func(ctx context.Context, network, _ string) (net.Conn, error) {
		a := all[int(turn.Add(1)-1)%len(all)]
		return (&net.Dialer{}).DialContext(ctx, network, a.server.Addr().String())
	}
}

// A node that has joined at another replica, and later, has no session here any more. Both the
// log and a metric say so.
func TestNodeHasJoinedElsewhere(t *testing.T) {
	all := newFleet(t, 2)
	here := all[0]
	here.join("edge1", direct)
	stays := here.join("edge2", direct)
	was := here.dir.Lookup("edge1")
	here.others.learn = func(news *pb.Nodes) {
		for _, h := range news.GetHeld() {
			here.dir.Lookup(tunnel.NodeName(h.GetNode())).Close(ErrJoinedElsewhere)
		}
	}
	all[1].links[0].Session().Send(NodesMessage(&pb.Nodes{Full: true, Held: []*pb.Held{{Node: "edge1"}}}))
	here.eventually("the session ends", func() bool { return tunnel.IsClosed(was.Done()) && here.dir.Lookup("edge1") != was })
	if err := was.Link.(*cloudSession).reason(); status.Code(err) != codes.Aborted {
		t.Errorf("it ends with %v, want %v", err, codes.Aborted)
	}
	if n := here.counters.Replaced.Load(); n != 1 {
		t.Errorf("%d replaced sessions are counted, want 1", n)
	}
	why := here.log.lines("end=cloud", "level=WARN", "module=stream", "node=edge1",
		"another process has joined as this node at another replica")
	if len(why) != 1 {
		t.Error("the log does not say why")
	}
	if stays.client.Ready() != nil {
		t.Error("another session has ended, too")
	}
}

// told is the link of an edge that remembers what it was told last, slowly at first.
type told struct {
	tunnel.Link
	n    atomic.Int32
	last atomic.Pointer[tunnel.Message]
}

func (l *told) Send(m *tunnel.Message) error {
	if l.n.Add(1) == 1 {
		time.Sleep(50 * time.Millisecond) // not waited for: it lets the others overtake, if they can
	}
	l.last.Store(m)
	return nil
}

// When replicas come at the same time, the last that an edge hears is the newest.
func TestEdgesHearTheNewest(t *testing.T) {
	a := newFleet(t, 1)[0]
	edge := &told{}
	a.dir.Attach(&tunnel.Session{Node: "edge1", Since: time.Now(), Link: edge})
	comes := func() {
		cs := &cloudSession{}
		cs.pub, cs.log = new(tunnel.Session), a.log.logger()
		asReplica{a.server, uuid.NewString()}.attach(cs, new(pb.Hello))
	}
	var wg sync.WaitGroup
	wg.Go(comes)
	testkit.Eventually(t, "the first is being told", func() bool { return edge.n.Load() > 0 })
	wg.Go(comes)
	wg.Wait()
	var r pb.Replicas
	if err := proto.Unmarshal(edge.last.Load().Data, &r); err != nil || len(r.GetInstances()) != 3 {
		t.Errorf("the edge knows of %d replicas, want 3 (%v)", len(r.GetInstances()), err)
	}
}

// A replica that leaves tells its edges so before it asks them to move: they must not look for it.
func TestLeavingReplicaIsNotInTheList(t *testing.T) {
	bubble(t, func(t *testing.T) {
		o := &others{id: uuid.NewString()}
		other := uuid.NewString()
		o.Attach(other, nil, new(tunnel.Session))
		r := newRigOn(t, newMemNet(), func(c *ServerConfig) { c.Replicas = o })
		edge := &told{}
		r.dir.Attach(&tunnel.Session{Node: "edge1", Since: time.Now(), Link: edge})
		r.server.Leave(t.Context())
		for what, m := range map[string]*tunnel.Message{
			"an edge that has a session": edge.last.Load(), "an edge that was joining": r.server.replicas(),
		} {
			var list pb.Replicas
			if m == nil || proto.Unmarshal(m.Data, &list) != nil || !slices.Equal(list.GetInstances(), []string{other}) {
				t.Errorf("%s is told of %v, want the other replica alone", what, &list)
			}
		}
	})
}

// A replica that says that it is about to stop is at once out of the list that edges get.
func TestEdgesHearOfALeavingReplica(t *testing.T) {
	for _, changed := range []bool{true, false} {
		r := newFleet(t, 1)[0]
		r.others.changed = changed
		edge := &told{}
		r.dir.Attach(&tunnel.Session{Node: "edge1", Since: time.Now(), Link: edge})
		cs := &cloudSession{}
		cs.pub = new(tunnel.Session)
		if err := r.server.learn(cs, NodesMessage(&pb.Nodes{Leaving: true})); err != nil {
			t.Fatal(err)
		}
		if heard := edge.n.Load() == 1; heard != changed {
			t.Errorf("the message changes the list: %t; the edge gets a list: %t", changed, heard)
		}
	}
}

// What edges claim is passed on to other replicas, so its length is bounded.
func TestOddClaims(t *testing.T) {
	all := newFleet(t, 1)
	for what, hello := range map[string]*pb.Hello{
		"a long instance":         {Version: Version, Instance: strings.Repeat("x", maxInstance+1)},
		"a list that is too long": {Version: Version, Reach: strings.Repeat("x", MaxReach+1)},
	} {
		c := all[0].stranger().control(bearerOf("edge1"))
		c.say(typeHello, "", hello)
		if err := c.end(); status.Code(err) != codes.InvalidArgument {
			t.Errorf("%s: %v, want %v", what, err, codes.InvalidArgument)
		}
	}
}

// What a replica does before it stops does not make stopping longer.
func TestLeaveIsPartOfTheGracePeriod(t *testing.T) {
	if Overlap >= leaveFirst {
		t.Errorf("idle edges stay for %s; the replica expects that they have gone after %s", Overlap, leaveFirst)
	}
	all := newFleet(t, 2)
	if got := all[0].server.grace(); got != patience {
		t.Errorf("the grace period is %s, want %s", got, patience)
	}
	all[0].server.Leave(t.Context())
	if got := all[0].server.grace(); got > patience-leaveFirst {
		t.Errorf("after Leave the grace period is %s, want at most %s", got, patience-leaveFirst)
	}
}

// A stop during a drain waits for the drain, and then has the rest of its own grace period. A later stop has all of it.
// The server waits although the other replica leaves, too: a replica may start meanwhile.
func TestLeaveTwice(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := newRigOn(t, newMemNet(), func(c *ServerConfig) {
			c.Replicas = leavingOthers{&others{id: uuid.NewString()}, func() {}}
		})
		start := time.Now()
		var calls sync.WaitGroup
		for range 3 {
			calls.Go(func() { r.server.Leave(t.Context()) })
		}
		time.Sleep(time.Second)
		r.server.Leave(t.Context())
		if took := time.Since(start); took != leaveFirst {
			t.Errorf("the second call has returned after %s, want %s", took, leaveFirst)
		}
		if got, want := r.server.grace(), patience-leaveFirst+time.Second; got != want {
			t.Errorf("the stop has a grace period of %s, want %s", got, want)
		}
		calls.Wait()
		time.Sleep(time.Hour)
		r.server.Leave(t.Context())
		if got := r.server.grace(); got != patience {
			t.Errorf("a later stop has a grace period of %s, want %s", got, patience)
		}
	})
}

// A replica that stops goes on for as long as a balancer leads callers to it, but not for ever.
func TestLeaveWaitsForCallers(t *testing.T) {
	for last, want := range map[time.Duration]time.Duration{ // when the last caller comes, and when Leave returns
		-time.Second:    leaveFirst,
		time.Second:     leaveFirst,
		4 * time.Second: 4*time.Second + leaveQuiet,
		time.Hour:       leaveLast,
	} {
		bubble(t, func(t *testing.T) {
			sockets, callers := listen.NewSockets(), newMemNet()
			r := newRigOn(t, newMemNet(), func(c *ServerConfig) {
				c.Replicas, c.Sockets = leavingOthers{&others{id: uuid.NewString()}, func() {}}, sockets
			})
			ln, err := sockets.Open(listen.Callers, listen.Name{}, func() (net.Listener, error) { return callers.listen("", "") })
			if err != nil {
				t.Fatal(err)
			}
			var both sync.WaitGroup
			both.Go(func() {
				for c, err := ln.Accept(); err == nil; c, err = ln.Accept() {
					c.Close()
				}
			})
			start := time.Now()
			ctx, cancel := context.WithCancel(t.Context())
			both.Go(func() {
				for ; time.Since(start) <= last && ctx.Err() == nil; time.Sleep(time.Second) {
					if c, err := callers.dial(ctx, "", ""); err == nil {
						c.Close()
					}
				}
			})
			r.server.Leave(t.Context())
			if took := time.Since(start); took != want {
				t.Errorf("with callers for %s, Leave has returned after %s, want %s", last, took, want)
			}
			cancel()
			ln.Close()
			both.Wait()
		})
	}
}

// A client that waits to find one more replica does not go on waiting when it has lost
// the one that it had.
func TestPauseEndsWithTheLastSession(t *testing.T) {
	c, err := NewClient(newRig(t).clientConfig("edge1"))
	if err != nil {
		t.Fatal(err)
	}
	paused := make(chan struct{})
	go func() {
		defer close(paused)
		c.pause(t.Context(), time.Hour)
	}()
	testkit.Eventually(t, "the pause ends", func() bool { // whenever it began to wait
		c.mu.Lock()
		defer c.mu.Unlock()
		if len(c.links) == 0 {
			c.links = []*link{{}}
		} else {
			c.links = nil
		}
		c.changed.Notify()
		return tunnel.IsClosed(paused)
	})
}

// Where a cloud of several replicas has become one, an edge that kept a session with
// each keeps one.
func TestNoReplicasAnyMore(t *testing.T) {
	r := newRig(t)
	cfg := r.clientConfig("edge1")
	cfg.All = true
	c, err := NewClient(cfg)
	if err != nil {
		t.Fatal(err)
	}
	c.setReplicas([]string{"of a replica that is gone"})
	testkit.Run(t, c.Run)
	r.eventually("it joins", func() bool { return c.Ready() == nil })
	c.mu.Lock()
	missing := c.missingLocked()
	c.mu.Unlock()
	if missing {
		t.Error("it opens another session, which replaces the one it has")
	}
}

// eachWay runs a test with conns that are dialled at the replica that holds the node, over
// links that count as near and as far, and by data connections, and with relayed ones. Then it
// runs the test with conns that edges ask for, by streams and by data connections.
func eachWay(t *testing.T, test func(t *testing.T, r *rig)) {
	t.Helper()
	t.Run("direct", func(t *testing.T) { test(t, newRig(t)) })
	t.Run("far", func(t *testing.T) { test(t, newRig(t, func(cfg *ServerConfig) { cfg.farTrip = 1 })) })
	t.Run("data", func(t *testing.T) {
		r := newRig(t)
		r.spares = MaxConnections
		test(t, r)
	})
	t.Run("relayed", func(t *testing.T) { test(t, newRelayedRig(t)) })
	t.Run("reached", func(t *testing.T) { test(t, newReachRig(t)) })
	t.Run("reached by data", func(t *testing.T) {
		r := newReachRig(t)
		r.spares = MaxConnections
		test(t, r)
	})
}

// The replicas that an edge is told arrive, whatever their ids.
func FuzzReplicas(f *testing.F) {
	f.Add("n1", "{\xff}")
	f.Add("n1", "id")
	f.Fuzz(func(t *testing.T, id, other string) {
		var replicas pb.Replicas
		err := proto.Unmarshal(encode(&pb.Replicas{Instances: []string{id, other}}), &replicas)
		if err != nil || len(replicas.GetInstances()) != 2 {
			t.Fatalf("%v: %v", err, &replicas)
		}
	})
}

// leavingOthers makes the server leave while it composes the hello of a session.
type leavingOthers struct {
	*others
	leave func()
}

func (o leavingOthers) ID() string {
	o.leave()
	return o.others.ID()
}

func (leavingOthers) Joined() []string  { return []string{"another replica"} }
func (leavingOthers) Staying() []string { return nil } // the other replica is about to stop, too

// slowOthers never have the nodes of the server that leaves.
type slowOthers struct{ leavingOthers }

func (slowOthers) NodesMoved(ctx context.Context) int {
	<-ctx.Done()
	return 1
}

// A server that leaves while an edge joins tells the edge so only after the hello, which is the first
// message of every session.
func TestDrainFollowsTheHello(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var r *rig
		asked := 0
		r = newRigOn(t, newMemNet(), func(c *ServerConfig) {
			c.Replicas = leavingOthers{&others{id: uuid.NewString()}, func() {
				if asked++; asked == 2 { // the first time, the server checks whether it knows the edge's process
					go r.server.Leave(t.Context())
					synctest.Wait()
				}
			}}
		})
		e := r.start(r.clientConfig("edge1"), refuses)
		r.eventually("the edge joins", func() bool { return e.client.Ready() == nil })
		if asked < 2 || !tunnel.IsClosed(r.server.leaving) {
			t.Errorf("the server has not left while the edge joined: its id was asked %d times", asked)
		}
		r.eventually("the edge is told", func() bool { return len(r.log.lines("cloud is about to stop")) > 0 })
	})
}
