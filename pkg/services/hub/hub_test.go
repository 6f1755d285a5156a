package hub

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/pkg/services"
	pb "tunnel.example/tunnel/pkg/services/servicesv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

var web = services.ServicePath("shop", "web")

// set sets an endpoint of web.
func setEndpoint(t testing.TB, h *Hub, address, node string, ports ...*services.Port) services.Path {
	t.Helper()
	p := services.EndpointPath("shop", "web", "web-a", address)
	h.Set(p, marshal(t, &services.Endpoint{Address: address, Node: node, Ready: true, Serving: true, Ports: ports}))
	return p
}

func TestWatch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHub(Config{})
		h.Set(web, marshal(t, &services.Service{ClusterIps: []string{"10.96.0.1"}}))
		setEndpoint(t, h, "10.88.1.1", "edge1")
		h.Synced()

		e := watch(t, h, "edge1", services.NewState())
		e.pull()
		e.wantEqual(h)
		if got := e.state.Service("shop", "web").GetClusterIps(); !slices.Equal(got, []string{"10.96.0.1"}) {
			t.Errorf("the Service has the addresses %q", got)
		}

		if err := e.ask(); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		select {
		case b := <-e.out:
			t.Fatalf("a batch comes without a change: %v", b)
		default:
		}
		gone := setEndpoint(t, h, "10.88.1.2", "edge1")
		if _, c, err := e.take(); err != nil || len(c.GetSet()) != 1 || c.GetSet()[0].GetPath() != gone {
			t.Fatalf("%v, %v", c, err)
		} else if _, err = e.state.Apply(c); err != nil {
			t.Fatal(err)
		}

		// While the edge does not ask, changes of one item become one.
		for i := range 10 {
			setEndpoint(t, h, "10.88.1.3", "edge"+strconv.Itoa(i))
		}
		h.Delete(gone)
		h.Delete("endpoint/shop/web/web-a/10.99.99.99") // is not there
		if err := e.ask(); err != nil {
			t.Fatal(err)
		}
		_, c, err := e.take()
		if err != nil || len(c.GetSet()) != 1 || !slices.Equal(c.GetDeleted(), []string{gone}) {
			t.Fatalf("%v, %v", c, err)
		}
		if _, err = e.state.Apply(c); err != nil {
			t.Fatal(err)
		}
		e.wantEqual(h)
		if got := addresses(e.state, web); !slices.Equal(got, []string{"10.88.1.1", "10.88.1.3"}) {
			t.Errorf("the endpoints are %q", got)
		}

		// A value that is there already is no change, and neither is an item that comes and goes unseen.
		if err := e.ask(); err != nil {
			t.Fatal(err)
		}
		setEndpoint(t, h, "10.88.1.1", "edge1")
		synctest.Wait()
		select {
		case b := <-e.out:
			t.Fatalf("a batch comes without a change: %v", b)
		default:
		}
		e.stop()
	})
}

// An edge that heeds unasked gets some small batches for one Next. Then, and after a large one, the hub waits.
func TestUnasked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHub(Config{})
		h.Synced()
		e := watch(t, h, "edge1", services.NewState())
		e.nexts <- &pb.Next{Unasked: true}
		took := func() (n int) {
			for {
				synctest.Wait()
				select {
				case b := <-e.out:
					if _, err := e.state.Apply(changesOf(t, b)); err != nil {
						t.Fatal(err)
					}
					if n++; !b.GetUnasked() {
						return n
					}
				default:
					setEndpoint(t, h, "10.88.1.1", "edge"+strconv.Itoa(h.items+int(h.seq)))
				}
			}
		}
		for range 2 {
			if n := took(); n != maxUnasked {
				t.Errorf("%d batches come for one Next", n)
			}
			setEndpoint(t, h, "10.88.1.2", "edge"+strconv.FormatUint(h.seq, 10))
			e.wantNothing("without a Next")
			e.nexts <- new(pb.Next)
		}
		took()
		e.nexts <- new(pb.Next)
		random := make([]byte, maxUnaskedBytes)
		rand.NewChaCha8([32]byte{}).Read(random)
		h.Set("node/large", marshal(t, &services.Node{Zone: fmt.Sprintf("%x", random)}))
		if b := <-e.out; b.GetUnasked() {
			t.Error("a large batch asks for another one")
		}
		e.stop()
	})
}

// An edge that has a state gets what differs, also what was deleted while it was away.
func TestWatchAgain(t *testing.T) {
	h := newHub(Config{})
	largeCluster(t, h)
	first := watch(t, h, "edge1", services.NewState())
	first.pull()
	first.wantEqual(h)
	first.stop()
	full := first.bytes

	again := watch(t, h, "edge1", first.state)
	again.pull()
	again.stop()
	t.Logf("a full send takes %d bytes, and one without a difference %d", full, again.bytes)
	if again.bytes > 4<<10 {
		t.Errorf("nothing has changed, and %d bytes are sent", again.bytes)
	}

	for i := range 8 {
		h.Set(anEndpoint(t, i*100, i, false))
	}
	gone, _ := anEndpoint(t, 900, 0, true)
	h.Delete(gone)
	h.Delete(services.NodePath("edge-007"))
	later := watch(t, h, "edge1", again.state)
	later.pull()
	later.wantEqual(h)
	later.stop()
	t.Logf("10 changes take %d bytes, %.1f %% of a full send", later.bytes, 100*float64(later.bytes)/float64(full))
	if later.bytes > full/20 {
		t.Errorf("10 changes take %d bytes, and a full send %d", later.bytes, full)
	}
}

// Edges at one position get the same batch, also at their start.
func TestBatchesAreShared(t *testing.T) {
	h := newHub(Config{})
	largeCluster(t, h)
	a, b := watch(t, h, "edge1", services.NewState()), watch(t, h, "edge2", services.NewState())
	a.pull()
	b.pull()
	if !sameMemory(a.last, b.last) {
		t.Error("two edges without a state get batches of their own")
	}
	setEndpoint(t, h, "10.88.1.1", "edge1")
	a.pull()
	b.pull()
	if !sameMemory(a.last, b.last) {
		t.Error("two edges get batches of their own for one change")
	}
	a.wantEqual(h)
	b.wantEqual(h)
	a.stop()
	b.stop()
}

// sameMemory reports whether two batches share their changes.
func sameMemory(a, b *pb.Batch) bool { return &a.GetChanges()[0] == &b.GetChanges()[0] }

// A cloud that has just started does not know everything yet: an edge must not delete what it has.
func TestNothingBeforeSynced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHub(Config{})
		setEndpoint(t, h, "10.88.1.1", "edge1")
		e := watch(t, h, "edge1", services.NewState())
		if err := e.ask(); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		select {
		case b := <-e.out:
			t.Fatalf("a batch comes: %v", b)
		default:
		}
		h.Synced()
		if _, c, err := e.take(); err != nil || len(c.GetSet()) != 1 {
			t.Fatalf("%v, %v", c, err)
		}
		e.stop()

		gives := watch(t, newHub(Config{}), "edge1", services.NewState())
		if err := gives.ask(); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		gives.leave()
		if err := <-gives.ended; status.Code(err) != codes.Canceled {
			t.Errorf("an edge that leaves before: %v", err)
		}
	})
}

// A newer Watch of a node ends the one before.
func TestNewestWatchStays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHub(Config{})
		h.Synced()
		old := watch(t, h, "edge1", services.NewState())
		old.pull()
		if err := old.ask(); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		now := watch(t, h, "edge1", services.NewState())
		now.pull()
		if err := <-old.ended; status.Code(err) != codes.Aborted {
			t.Errorf("the old one ends with %v", err)
		}
		setEndpoint(t, h, "10.88.1.1", "edge1")
		now.pull()
		now.wantEqual(h)
		now.stop()
		if len(h.watchers) != 0 {
			t.Errorf("%d watchers are left", len(h.watchers))
		}
	})
}

func TestBrokenEdges(t *testing.T) {
	h := newHub(Config{})
	setEndpoint(t, h, "10.88.1.1", "edge1")
	h.Synced()
	e := watch(t, h, "edge1", services.NewState())
	e.nexts <- &pb.Next{Digests: make([]byte, services.Buckets*8-1)}
	if err := <-e.ended; status.Code(err) != codes.InvalidArgument {
		t.Errorf("digests of a wrong length: %v", err)
	}
	e = watch(t, h, "edge1", services.NewState())
	e.pull()
	e.nexts <- &pb.Next{Digests: make([]byte, services.Buckets*8)}
	if err := <-e.ended; status.Code(err) != codes.InvalidArgument {
		t.Errorf("digests in a later Next: %v", err)
	}
}

// The hub forgets deletions that an edge lacks when there are too many of them. The edge begins again.
func TestTooFarBehind(t *testing.T) {
	h := newHub(Config{})
	setEndpoint(t, h, "10.88.1.1", "edge1")
	h.Synced()
	slow, quick := watch(t, h, "slow", services.NewState()), watch(t, h, "quick", services.NewState())
	slow.pull()
	quick.pull()
	for i := range 3 * maxDeleted {
		p := services.NodePath("n" + strconv.Itoa(i))
		h.Set(p, nil)
		if i%100 == 0 {
			quick.pull()
		}
		h.Delete(p)
	}
	if n := len(h.deleted); n > maxDeleted+h.items+1 {
		t.Errorf("the hub remembers %d deletions", n)
	}
	if n := len(h.changes); n > 3*maxDeleted {
		t.Errorf("the hub remembers %d changes", n)
	}
	quick.pull()
	quick.wantEqual(h)
	quick.stop()
	if err := slow.tryPull(); status.Code(err) != codes.Aborted {
		t.Fatalf("the slow edge: %v", err)
	}
	again := watch(t, h, "slow", slow.state)
	again.pull()
	again.wantEqual(h)
	again.stop()
}

// Whatever changes, and whenever edges ask, leave and come back: each has what the hub has once it is current.
func TestEdgesConverge(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	h := newHub(Config{})
	h.Synced()
	edges := make([]*edge, 4)
	for i := range edges {
		edges[i] = watch(t, h, tunnel.NodeName("edge"+strconv.Itoa(i)), services.NewState())
	}
	padding := make([]byte, 2000) // a series then takes several batches
	for range 4000 {
		p := services.NodePath("n" + strconv.Itoa(random.IntN(300)))
		switch random.IntN(5) {
		case 0, 1, 2:
			h.Set(p, marshal(t, &services.Node{Zone: string(padding[:random.IntN(len(padding))]) + strconv.Itoa(random.Int())}))
		case 3:
			h.Delete(p)
		case 4:
			i := random.IntN(len(edges))
			e := edges[i]
			h.mu.Lock()
			current := e.asked && e.state.Digests() == h.digests
			h.mu.Unlock()
			switch {
			case random.IntN(10) == 0:
				e.stop()
				edges[i] = watch(t, h, tunnel.NodeName("edge"+strconv.Itoa(i)), e.state)
			case !current:
				e.pull()
			}
		}
	}
	for _, e := range edges {
		for range 2 { // the changes during a series come in the next
			h.mu.Lock()
			current := e.asked && e.state.Digests() == h.digests
			h.mu.Unlock()
			if !current {
				e.pull()
			}
		}
		e.wantEqual(h)
		e.stop()
	}
}

// Buckets change while they are sent in several batches.
func TestChangesDuringASeries(t *testing.T) {
	h := newHub(Config{})
	largeCluster(t, h)
	e := watch(t, h, "edge1", services.NewState())
	var series []*pb.Changes
	for i := 0; ; i++ {
		if err := e.ask(); err != nil {
			t.Fatal(err)
		}
		b, c, err := e.take()
		if err != nil {
			t.Fatal(err)
		}
		series = append(series, c)
		gone, _ := anEndpoint(t, i, 0, true)
		h.Delete(gone)
		h.Set(anEndpoint(t, i, 1, false))
		h.Set(services.NodePath("new"+strconv.Itoa(i)), nil)
		if !b.GetMore() {
			break
		}
	}
	if len(series) < 5 {
		t.Fatalf("the series has only %d batches", len(series))
	}
	if _, err := e.state.Apply(series...); err != nil {
		t.Fatal(err)
	}
	e.pull()
	e.wantEqual(h)
	e.stop()
}

// The edge of a Node counts as serving Services from its first session with Services on. It counts until a session
// without Services, or until the Node is deleted.
func TestJoined(t *testing.T) {
	held := map[tunnel.NodeName]bool{}
	h := newHub(Config{Serves: func(n tunnel.NodeName) bool { return held[n] }})
	isEdge := func(node string) bool {
		e := watch(t, h, "looks", services.NewState())
		e.pull()
		e.wantEqual(h)
		e.stop()
		return e.state.Node(node).GetEdge()
	}
	value := marshal(t, &services.Node{Zone: "a"})
	h.Joined("edge1")
	h.Joined("stranger")
	h.Set(services.NodePath("edge1"), value)
	h.Set(services.NodePath("node2"), value)
	h.Synced()
	if !isEdge("edge1") || isEdge("node2") || len(h.joined) != 1 {
		t.Errorf("before all objects are known: %v", h.joined)
	}
	h.Joined("stranger2")
	h.Joined("node2")
	h.Joined("node2")
	h.Set(services.NodePath("node2"), marshal(t, &services.Node{Zone: "b"}))
	if !isEdge("node2") || len(h.joined) != 2 {
		t.Errorf("after all objects are known: %v", h.joined)
	}
	h.Left("node2")
	h.Left("stranger")
	if isEdge("node2") || !isEdge("edge1") || len(h.joined) != 1 {
		t.Errorf("without Services: %v", h.joined)
	}
	h.Joined("node2")
	h.Delete(services.NodePath("node2"))
	h.Set(services.NodePath("node2"), value)
	if isEdge("node2") {
		t.Error("a new Node of the same name is an edge's")
	}
	held["node3"] = true
	h.Set(services.NodePath("node3"), value)
	if !isEdge("node3") {
		t.Error("a Node that is created while its edge has a session is no edge's")
	}
}

// A hub that is stopped ends each Watch, so that edges ask another replica.
func TestStop(t *testing.T) {
	h := newHub(Config{})
	h.Synced()
	e := watch(t, h, "edge1", services.NewState())
	if err := e.tryPull(); err != nil {
		t.Fatal(err)
	}
	if err := e.ask(); err != nil {
		t.Fatal(err)
	}
	h.Stop()
	if _, _, err := e.take(); status.Code(err) != codes.Aborted {
		t.Errorf("a Watch ends with %v", err)
	}
	if err := watch(t, h, "edge2", services.NewState()).tryPull(); status.Code(err) != codes.Aborted {
		t.Errorf("a new Watch ends with %v", err)
	}
}

// inBubble runs a subtest on the fake clock of testing/synctest.
func inBubble(t *testing.T, name string, f func(t *testing.T)) {
	t.Helper()
	t.Run(name, func(t *testing.T) { synctest.Test(t, f) })
}

// Edges are served when all objects and all nodes are known, in any order. While objects come, an edge that waits is
// not woken by each of them.
func TestServedWhenAllIsKnown(t *testing.T) {
	for name, steps := range map[string][2]func(*Hub){
		"objects first": {(*Hub).Synced, (*Hub).NodesKnown},
		"nodes first":   {(*Hub).NodesKnown, (*Hub).Synced},
	} {
		inBubble(t, name, func(t *testing.T) {
			h := newHub(Config{AwaitNodes: true})
			ctx, cancel := context.WithCancel(t.Context())
			begun := make(chan error, 2) // capacity 2: nobody waits for the second one before it has ended
			begin := func() {
				_, err := h.begin(ctx, "edge1", services.Digests{}, ignore)
				begun <- err
			}
			go begin()
			h.Joined("edge2")
			h.Set(services.NodePath("edge2"), nil)
			steps[0](h)
			synctest.Wait()
			select {
			case err := <-begun:
				t.Fatalf("an edge is served early: %v", err)
			default:
			}
			steps[1](h)
			steps[1](h)
			if err := <-begun; err != nil {
				t.Fatal(err)
			}
			e := watch(t, h, "edge1", services.NewState())
			e.pull()
			e.stop()
			if !e.state.Node("edge2").GetEdge() {
				t.Error("a node that the cloud remembers is not told")
			}
			cancel()
		})
	}
	h := newHub(Config{})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := h.begin(ctx, "edge1", services.Digests{}, ignore); status.Code(err) != codes.Canceled {
		t.Errorf("an edge that has left gets %v", err)
	}
}

// ignore is the end of a watcher that has no Watch.
func ignore(error) {}

// BenchmarkFirstList sets the objects of a cluster while 500 edges wait for the first batch.
func BenchmarkFirstList(b *testing.B) {
	for b.Loop() {
		h := newHub(Config{})
		ctx, cancel := context.WithCancel(b.Context())
		var waiting sync.WaitGroup
		for range 500 {
			waiting.Go(func() { h.begin(ctx, "edge", services.Digests{}, ignore) })
		}
		for i := range 55_000 {
			h.Set(services.NodePath(strconv.Itoa(i)), nil)
		}
		h.Synced()
		waiting.Wait()
		cancel()
	}
}
