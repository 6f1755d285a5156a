package relay

import (
	"context"
	"errors"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/services"
	pb "tunnel.example/tunnel/pkg/services/servicesv1"
	"tunnel.example/tunnel/pkg/tunnel"
	"tunnel.example/tunnel/pkg/udp"
)

// Batches that belong together become visible together, and the edge asks for each of them.
func TestStateFromTheCloud(t *testing.T) {
	k, c := new(fake), newCloud()
	r, _ := newTestRelay(t, k, c)
	testkit.Run(t, r.Run)
	first := <-c.nexts
	if d, err := services.DecodeDigests(first.GetDigests()); err != nil || d != (services.Digests{}) {
		t.Errorf("the first Next is of %v, %v", d, err)
	}
	all := shop(t).GetSet()
	c.batches <- batch(t, true, &pb.Changes{Set: all[:3]})
	if next := <-c.nexts; len(next.GetDigests()) != 0 {
		t.Error("a later Next has digests")
	}
	if r.list("shop/web") != nil || len(k.redirected()) != 0 {
		t.Error("half of a state is visible")
	}
	c.batches <- batch(t, false, &pb.Changes{Set: all[3:]})
	<-c.nexts
	wantRedirected(t, k, both...)
	if note := r.Note(); note != "" {
		t.Errorf("note: %s", note)
	}

	// One change is one change of the kernel, and nothing else is written again.
	k.mu.Lock()
	programs := k.programs
	k.mu.Unlock()
	c.batches <- batch(t, false, &pb.Changes{Deleted: []string{far6}})
	<-c.nexts
	wantRedirected(t, k, web4)
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.programs != programs {
		t.Errorf("the table was written %d times more", k.programs-programs)
	}
}

// A node redirects the ports of Services that have an endpoint out of its own reach, if the node or the tunnel reaches
// an endpoint.
func TestPlan(t *testing.T) {
	direct := []netip.Prefix{netip.MustParsePrefix("10.88.2.0/24")}
	type parts struct {
		*services.Service
		*services.Endpoint
		*services.Node
	}
	here := item(t, other, endpoint("10.88.1.5", "edge1"))
	loop := item(t, far6, endpoint("10.96.0.10", "edge1"))
	for name, c := range map[string]struct {
		change func(p parts)
		direct []netip.Prefix
		more   []*pb.Item
		want   int
	}{
		"a far endpoint": {want: 1},
		"a pod of an edge node, without nodeName": {
			change: func(p parts) { p.Endpoint.Node, p.Home = "", "edge2" }, want: 1,
		},
		"no edge node":          {change: func(p parts) { p.Edge = false }},
		"the cloud reaches all": {change: func(p parts) { p.Edge, p.Cluster = false, true }, want: 1},
		"a direct network":      {direct: direct},
		"not ready":             {change: func(p parts) { p.Ready = false }},
		"only local":            {change: func(p parts) { p.InternalLocal = true }},
		"loopback as ClusterIP": {change: func(p parts) { p.ClusterIps = []string{"127.0.0.1"} }},
		"our own as ClusterIP": {
			change: func(p parts) { p.ClusterIps = []string{addr4.String(), addr6.String()} },
		},
		"no address as ClusterIP": {change: func(p parts) { p.ClusterIps = []string{"None"} }},
		"no port":                 {change: func(p parts) { p.Service.Ports[0].Port = 65536 + 80 }},
		"a ClusterIP as an endpoint": {
			change: func(p parts) { p.Endpoint.Address = "10.96.0.10" }, more: []*pb.Item{loop},
		},
		"loopback as an endpoint":   {change: func(p parts) { p.Endpoint.Address = "127.0.0.1" }},
		"link-local as an endpoint": {change: func(p parts) { p.Endpoint.Address = "169.254.77.1" }, direct: direct},
		"one here, one far":         {more: []*pb.Item{here}, want: 1},
		"one here, one out of reach": {
			change: func(p parts) { p.Edge = false }, more: []*pb.Item{here}, want: 1,
		},
		"all of them here": {change: func(p parts) { p.Endpoint.Node = "edge1" }, more: []*pb.Item{here}},
	} {
		t.Run(name, func(t *testing.T) {
			s, e, n := webService(), endpoint("10.88.2.5", "edge2"), &services.Node{Edge: true}
			if c.change != nil {
				c.change(parts{s, e, n})
			}
			state := services.NewState()
			set := append(c.more, item(t, web, s), item(t, far4, e), item(t, services.NodePath("edge2"), n))
			if _, err := state.Apply(&pb.Changes{Set: set}); err != nil {
				t.Fatal(err)
			}
			got := (planner{node: "edge1", direct: c.direct}).plan(state)
			if len(got.frontends) != c.want {
				t.Errorf("redirected: %v", got.frontends)
			}
			if _, own := got.own[address{netip.MustParseAddrPort("10.96.0.10:8080"), protocolTCP}]; own {
				t.Error("a ClusterIP is an endpoint of this node")
			}
		})
	}
}

// In place of kube-proxy, the edge leaves an address alone if the Service has no ClusterIP of the same family, and so
// no endpoints: kube-proxy writes no rules for it.
func TestPlanOtherFamily(t *testing.T) {
	s := webService()
	s.ClusterIps = s.ClusterIps[:1]
	s.ExternalIps = []string{"203.0.113.1", "2001:db8::1"}
	s.LoadBalancerIps = []string{"203.0.113.2", "2001:db8::2"}
	state := services.NewState()
	if _, err := state.Apply(&pb.Changes{Set: []*pb.Item{
		item(t, web, s), item(t, far4, endpoint("10.88.2.5", "edge1"))}}); err != nil {
		t.Fatal(err)
	}
	served := make(map[netip.Addr]bool)
	for at := range (planner{node: "edge1", full: true}).plan(state).frontends {
		served[at.Addr()] = true
	}
	for _, text := range slices.Concat(s.ClusterIps, s.ExternalIps, s.LoadBalancerIps) {
		if addr := netip.MustParseAddr(text); served[addr] != addr.Is4() {
			t.Errorf("%s is served: %t", addr, served[addr])
		}
	}
}

// With spread, the kernel sends connections to the relay, and the relay gives each endpoint the same chance. Without
// spread, the kernel sends all connections to the endpoint of this node.
func TestSpread(t *testing.T) {
	annotated := webService()
	annotated.Spread = true
	for name, c := range map[string]struct {
		service *services.Service
		option  bool
		far     bool // there is an endpoint on another node
		want    kind
	}{
		"not asked for":        {webService(), false, true, toEnds},
		"by the annotation":    {annotated, false, true, toRelay},
		"by the configuration": {webService(), true, true, toRelay},
		"nothing to choose":    {annotated, true, false, toEnds},
	} {
		state := services.NewState()
		set := []*pb.Item{
			item(t, web, c.service), item(t, other, endpoint("10.88.1.5", "edge1")),
			item(t, services.NodePath("edge2"), &services.Node{Edge: true}),
		}
		if c.far {
			set = append(set, item(t, far4, endpoint("10.88.2.5", "edge2")))
		}
		if _, err := state.Apply(&pb.Changes{Set: set}); err != nil {
			t.Fatal(err)
		}
		n := planner{node: "edge1", full: true, spread: c.option}
		f := n.plan(state).frontends[address{web4, protocolTCP}]
		if f == nil || f.rule.kind != c.want {
			t.Fatalf("%s: the rule is %+v, want kind %d", name, f, c.want)
		}
		w := n.ways(state, *f, state.Endpoints(f.path))
		first := make(map[bool]int) // by whether it is far
		for range 200 {
			first[order(w, netip.AddrPort{}, n.spreads(*f))[0].far]++
		}
		if spread := c.want == toRelay; spread != (first[true] > 50) || spread != (first[false] < 150) {
			t.Errorf("%s: of the first endpoints, %d are far and %d are not", name, first[true], first[false])
		}
	}
}

// Networks to which the node has routes are direct, for as long as it has them.
func TestRoutedNetworksAreDirect(t *testing.T) {
	k, c := new(fake), newCloud()
	r, _ := newTestRelay(t, k, c)
	r.cfg.Direct = []netip.Prefix{netip.MustParsePrefix("10.99.0.0/16")}
	r.SetRouted(nil)
	testkit.Run(t, r.Run)
	<-c.nexts
	c.batches <- batch(t, false, shop(t))
	<-c.nexts
	wantRedirected(t, k, both...)
	r.SetRouted([]netip.Prefix{netip.MustParsePrefix("10.88.2.0/24"), netip.MustParsePrefix("fd00:88:2::/64")})
	wantRedirected(t, k)
	list := r.list("shop/web")
	if p := list.Ports[0]; p.Served != ServedKubeProxy || !strings.Contains(p.Endpoints[0].Why, "by itself") {
		t.Errorf("with routes: %+v", p)
	}
	r.SetRouted(nil)
	wantRedirected(t, k, both...)
}

// A plan after any changes is the plan of a node that starts with their outcome, and what is taken from it makes the
// rules of before those of now. Services share ClusterIPs, endpoints have addresses of ClusterIPs, and Nodes change.
func TestPlansFollowChanges(t *testing.T) {
	for name, n := range map[string]planner{"relay": {node: "edge1"}, "full": {node: "edge1", full: true}} {
		t.Run(name, func(t *testing.T) {
			s, had := services.NewState(), make(rules)
			p := n.plan(s)
			rng := rand.New(rand.NewPCG(1, 2))
			for i := range 2000 {
				changes := new(pb.Changes)
				for range 1 + rng.IntN(3) {
					if one := randomItem(t, rng); rng.IntN(3) == 0 {
						changes.Deleted = append(changes.Deleted, one.GetPath())
					} else {
						changes.Set = append(changes.Set, one)
					}
				}
				d, err := s.Apply(changes)
				if err != nil {
					t.Fatal(err)
				}
				if n.update(p, s, &d); i%100 == 0 {
					n.direct = []netip.Prefix{netip.PrefixFrom(netip.MustParseAddr("10.88.0.0"), 30+rng.IntN(3))}
					n.renew(p, s)
				}
				next := follow(had, p)
				wantPlan(t, p, n.plan(s), changes)
				if want := p.all(); !reflect.DeepEqual(next, want) {
					t.Fatalf("after %v, what is taken makes %v, want %v", changes, next, want)
				}
				had = next
			}
		})
	}
}

// randomItem returns one of a few Services, endpoints and nodes.
func randomItem(t *testing.T, rng *rand.Rand) *pb.Item {
	service, node := "s"+strconv.Itoa(rng.IntN(4)), "edge"+strconv.Itoa(1+rng.IntN(3))
	addr := "10.88.0." + strconv.Itoa(rng.IntN(6))
	if rng.IntN(4) == 0 {
		addr = "10.96.0." + strconv.Itoa(rng.IntN(4)) // of a Service
	}
	switch rng.IntN(6) {
	case 0:
		return item(t, services.NodePath(node), &services.Node{Edge: rng.IntN(2) == 0, Zone: strconv.Itoa(rng.IntN(2)),
			PodCidrs:    []string{"10.88.0.0/2" + strconv.Itoa(8+rng.IntN(4)/3)},
			InternalIps: []string{"10.88.0." + strconv.Itoa(rng.IntN(2))}})
	case 1:
		web := siteService(func(s *services.Service) { s.ExternalIps = []string{"203.0.113." + strconv.Itoa(rng.IntN(2))} })
		web.ClusterIps = []string{"10.96.0." + strconv.Itoa(rng.IntN(4))} // two Services may have one address
		web.ClusterDns, web.Spread = rng.IntN(2) == 0, rng.IntN(2) == 0
		web.HealthCheckNodePort = uint32(32000 * rng.IntN(2))
		web.LoadBalancerIps, web.LoadBalancerLimited = []string{"203.0.113.1"}, rng.IntN(2) == 0
		return item(t, services.ServicePath("a", service), web)
	}
	e := endpoint(addr, node)
	if rng.IntN(4) == 0 {
		e.Node, e.Home = "", node
	}
	if service != "s0" { // hints count if all endpoints have some
		e.ZoneHints = []string{strconv.Itoa(rng.IntN(2))}
	}
	return item(t, services.EndpointPath("a", service, "x", addr), e)
}

// wantPlan checks a plan after changes, all of which were taken.
func wantPlan(t *testing.T, p, want *plan, changes *pb.Changes) {
	t.Helper()
	want.take()
	if !reflect.DeepEqual(p, want) {
		t.Fatalf("after %v, the plan is %+v, want %+v", changes, p, want)
	}
}

// Budget: a change takes 50 ms at most with 5,000 Services of 10 endpoints each. This is all of it but the kernel.
func BenchmarkChange(b *testing.B) {
	changes := &pb.Changes{Set: []*pb.Item{item(b, services.NodePath("edge2"), &services.Node{Edge: true})}}
	for i := range 5000 {
		name, web := "s"+strconv.Itoa(i), webService()
		web.ClusterIps = []string{netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}).String()}
		changes.Set = append(changes.Set, item(b, services.ServicePath("a", name), web))
		for k := range 10 {
			addr := netip.AddrFrom4([4]byte{10, byte(88 + k), byte(i >> 8), byte(i)}).String()
			changes.Set = append(changes.Set, item(b, services.EndpointPath("a", name, "x", addr), endpoint(addr, "edge2")))
		}
	}
	r, _ := newTestRelay(b, new(fake), newCloud())
	if _, _, err := r.applySeries([]*pb.Changes{changes}); err != nil {
		b.Fatal(err)
	}
	d := newDoor(b.Context(), r, func(error) {})
	if err := d.program(); err != nil {
		b.Fatal(err)
	}
	one := services.EndpointPath("a", "s7", "x", "10.200.0.1")
	for i := 0; b.Loop(); i++ {
		change := &pb.Changes{Set: []*pb.Item{item(b, one, endpoint("10.200.0.1", "edge"+strconv.Itoa(i)))}}
		_, _, err := r.applySeries([]*pb.Changes{change})
		if err := errors.Join(err, d.program()); err != nil {
			b.Fatal(err)
		}
	}
	d.close()
	d.drain()
}

// A relay whose stream ends opens another one, and says what it has. An old cloud has no such stream.
func TestStreamEnds(t *testing.T) {
	k, c := new(fake), newCloud()
	r, _ := newTestRelay(t, k, c)
	open, again := r.cfg.Watch, make(chan struct{}, 2) // capacity 2: one for each stream
	again <- struct{}{}
	r.cfg.Watch = func(ctx context.Context) (Stream, error) {
		<-again
		return open(ctx)
	}
	testkit.Run(t, r.Run)
	<-c.nexts
	c.batches <- batch(t, false, shop(t))
	<-c.nexts
	c.failed <- status.Error(codes.Unimplemented, "")
	testkit.Eventually(t, "the note says what to do", func() bool {
		note := r.Note()
		return strings.Contains(note, "out of date since 20") && strings.Contains(note, "[mode.cloud.services]")
	})
	again <- struct{}{}
	next := <-c.nexts
	r.mu.RLock()
	want := r.state.Digests()
	r.mu.RUnlock()
	if got, err := services.DecodeDigests(next.GetDigests()); err != nil || got != want {
		t.Errorf("the new stream begins with other digests than those of the state: %v", err)
	}
	wantRedirected(t, k, both...)
	c.batches <- batch(t, false, new(pb.Changes))
	<-c.nexts
	testkit.Eventually(t, "the state is current again", func() bool { return r.Note() == "" })
}

// When the next process of the edge takes over, it has its rules in the kernel before those of this process go.
func TestTakenOver(t *testing.T) {
	k, c := new(fake), newCloud()
	r, _ := newTestRelay(t, k, c)
	left := make(chan struct{})
	r.cfg.Left = left
	old := testkit.Run(t, r.Run)
	<-c.nexts
	c.batches <- batch(t, false, shop(t))
	<-c.nexts
	wantRedirected(t, k, both...)

	close(left)
	old.Cancel()
	k2, c2 := new(fake), newCloud()
	next := again(r, k2, c2)
	next.cfg.Left = nil
	testkit.Run(t, next.Run)
	wantRedirected(t, k2, both...) // by the file, which is free
	if got := k.redirected(); !slices.Equal(got, both) {
		t.Errorf("before the kernel has the new rules, the old ones redirect %v", got)
	}
	k.mu.Lock()
	k.replaced = true
	k.mu.Unlock()
	old.Stop()
	if got := k.redirected(); len(got) > 0 {
		t.Errorf("after that, they redirect %v", got)
	}
}

// A first series that breaks off again and again arrives in parts: each stream claims the buckets that the streams
// before it have brought whole, and nothing is applied before the end.
func TestFirstSeriesInParts(t *testing.T) {
	c := newCloud()
	r, _ := newTestRelay(t, new(fake), c)
	file := closedFile(r.cfg.File, r.log)
	kept := make(aside)
	follow := func() <-chan error {
		ended := make(chan error, 1) // how the stream has ended; closed by nobody
		go func() {
			_, err := r.followOnce(t.Context(), file, kept)
			ended <- err
		}()
		return ended
	}
	all := shop(t).GetSet()
	parts := make(map[uint32][]*pb.Item)
	for _, item := range all {
		b := uint32(services.Bucket(item.GetPath()))
		parts[b] = append(parts[b], item)
	}
	var claimed services.Digests
	for _, b := range slices.Sorted(maps.Keys(parts)) {
		ended := follow()
		next := <-c.nexts
		if has, err := services.DecodeDigests(next.GetDigests()); err != nil || has != claimed {
			t.Fatalf("before bucket %d, a stream claims other buckets: %v", b, err)
		}
		// The bucket is whole, because the next bucket has begun. Its items may come more than once.
		c.batches <- batch(t, true, &pb.Changes{Set: parts[b]})
		<-c.nexts
		c.batches <- batch(t, true, &pb.Changes{Whole: []uint32{b, (b + 1) % services.Buckets}, Set: parts[b]})
		<-c.nexts
		c.failed <- status.Error(codes.Unavailable, "")
		if err := <-ended; status.Code(err) != codes.Unavailable {
			t.Fatal(err)
		}
		for _, item := range parts[b] {
			claimed.Flip(item.GetPath(), item.GetValue())
		}
		if r.state.Len() > 0 {
			t.Fatal("a part of a series is applied")
		}
	}
	ended := follow()
	<-c.nexts
	c.batches <- batch(t, false, new(pb.Changes))
	<-c.nexts
	c.failed <- status.Error(codes.Unavailable, "")
	<-ended
	if got := r.state.Digests(); got != claimed || r.state.Len() != len(all) {
		t.Errorf("the state has %d items of %d, or other items", r.state.Len(), len(all))
	}
}

// An edge says that it heeds unasked, and then asks for no batch that comes anyway.
func TestUnasked(t *testing.T) {
	c := newCloud()
	r, _ := newTestRelay(t, new(fake), c)
	ended := make(chan error, 1)
	go func() {
		_, err := r.followOnce(t.Context(), closedFile(r.cfg.File, r.log), make(aside))
		ended <- err
	}()
	if next := <-c.nexts; !next.GetUnasked() {
		t.Error("the edge does not say that it heeds unasked")
	}
	node := func(name string) *pb.Changes {
		return &pb.Changes{Set: []*pb.Item{{Path: services.NodePath(name)}}}
	}
	for _, name := range []string{"a", "b"} {
		b := batch(t, false, node(name))
		b.Unasked = true
		c.batches <- b
	}
	c.batches <- batch(t, false, node("c"))
	if next := <-c.nexts; len(next.GetDigests()) > 0 || next.GetUnasked() {
		t.Errorf("a later Next is %v", next)
	}
	c.failed <- status.Error(codes.Unavailable, "")
	<-ended
	if n := len(c.nexts); n > 0 || r.state.Len() != 3 {
		t.Errorf("the edge asks %d times more, and has %d items", n, r.state.Len())
	}
}

// A cloud that sends empty batches without end is left.
func TestEndlessSeries(t *testing.T) {
	c := newCloud()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var next atomic.Pointer[pb.Batch]
	next.Store(batch(t, true, new(pb.Changes)))
	var sent atomic.Int64
	go func() {
		for ctx.Err() == nil {
			select {
			case c.batches <- next.Load():
				sent.Add(1)
			case <-c.nexts:
			case <-ctx.Done():
			}
		}
	}()
	for name, one := range map[string]*pb.Changes{
		"nothing":        new(pb.Changes),
		"many deletions": {Deleted: make([]string, maxBatch/4)}, // 2 bytes on the wire, and 16 in memory
	} {
		next.Store(batch(t, true, one))
		before := sent.Load()
		if _, _, err := receive(stream{c, ctx}, 0, 0); err == nil || !strings.Contains(err.Error(), "at once") {
			t.Errorf("%s: %v", name, err)
		}
		if n := int(sent.Load()-before-1) * len(one.GetDeleted()); n > 2*maxEntry {
			t.Errorf("%s: %d entries are taken", name, n)
		}
	}
}

// What a hostile or broken cloud sends ends the stream, and leaves the state.
func TestHostileCloud(t *testing.T) {
	long := item(t, "node/"+strings.Repeat("x", maxPath), new(services.Node))
	for name, b := range map[string]*pb.Batch{
		"a bomb":           {Changes: deflate(t, make([]byte, 64<<20)), Deflated: true},
		"no deflate":       {Changes: []byte{1, 2, 3}, Deflated: true},
		"no protobuf":      {Changes: []byte{0xff}},
		"a long batch":     {Changes: make([]byte, maxBatch+1)},
		"a long path":      batch(t, false, &pb.Changes{Set: []*pb.Item{long}}),
		"an empty path":    batch(t, false, &pb.Changes{Set: []*pb.Item{{}}}),
		"a very long item": batch(t, false, &pb.Changes{Set: []*pb.Item{{Path: "node/a", Value: make([]byte, maxValue+1)}}}),
	} {
		t.Run(name, func(t *testing.T) {
			c := newCloud()
			go func() { c.batches <- b }()
			if series, _, err := receive(stream{c, t.Context()}, 0, 0); err == nil {
				t.Errorf("the edge takes %d batches", len(series))
			}
		})
	}
}

// An edge that starts without its cloud goes on with what its file has.
func TestStartsFromTheFile(t *testing.T) {
	k, c := new(fake), newCloud()
	r, _ := newTestRelay(t, k, c)
	running := testkit.Run(t, r.Run)
	<-c.nexts
	c.batches <- batch(t, false, shop(t))
	<-c.nexts
	wantRedirected(t, k, both...)
	running.Stop()
	if k.intact() {
		t.Error("the table is there after the end")
	}

	away := newCloud() // it never answers
	offline := again(r, k, away)
	second := testkit.Run(t, offline.Run)
	wantRedirected(t, k, both...)
	if note := offline.Note(); !strings.Contains(note, "out of date since 20") {
		t.Errorf("note: %s", note)
	}
	next := <-away.nexts
	if got, err := services.DecodeDigests(next.GetDigests()); err != nil || got == (services.Digests{}) {
		t.Errorf("it asks for everything again: %v", err)
	}
	second.Stop()
}

// In place of kube-proxy, an edge without a state leaves the table as the last process has left it.
func TestFullStartsWithoutAState(t *testing.T) {
	k, c := new(fake), newCloud()
	r, _ := newTestRelay(t, k, c)
	r.cfg.Full, r.planner.full = true, true
	testkit.Run(t, r.Run)
	<-c.nexts
	k.mu.Lock()
	programs := k.programs
	k.mu.Unlock()
	if programs != 0 {
		t.Error("a table is written")
	}
	c.batches <- batch(t, false, shop(t))
	<-c.nexts
	testkit.Eventually(t, "the state of the cloud is served", k.intact)
}

// An endpoint with an IPv4 address in the form of IPv6 is none of IPv6: the kernel would refuse the whole table.
func TestPlanMappedAddress(t *testing.T) {
	mapped := endpoint("::ffff:10.88.1.9", "edge1")
	for _, full := range []bool{true, false} {
		state := services.NewState()
		changes := shop(t)
		changes.Set = append(changes.Set,
			item(t, services.EndpointPath("shop", "web", "web-b", mapped.GetAddress()), mapped))
		if _, err := state.Apply(changes); err != nil {
			t.Fatal(err)
		}
		for at, r := range (planner{node: "edge1", full: full}).plan(state).all() {
			for _, end := range slices.Concat(r.ends, r.local) {
				if end.Addr().Is4() != at.Addr().Is4() {
					t.Errorf("full: %t: %s leads to %s", full, at, end)
				}
			}
		}
	}
}

// The relay writes rules again that another program has removed, and tries again what has failed.
func TestKernelIsMended(t *testing.T) {
	k, c := &fake{broken: errors.New("no rights")}, newCloud()
	r, log := newTestRelay(t, k, c)
	r.every = time.Millisecond
	testkit.Run(t, r.Run)
	<-c.nexts
	c.batches <- batch(t, false, shop(t))
	<-c.nexts
	testkit.Eventually(t, "the note says what is wrong", func() bool { return strings.Contains(r.Note(), "no rights") })
	if len(k.redirected()) != 0 {
		t.Errorf("redirected: %v", k.redirected())
	}
	k.mu.Lock()
	k.broken = nil
	k.mu.Unlock()
	wantRedirected(t, k, both...)
	testkit.Eventually(t, "nothing is wrong any more", func() bool { return r.Note() == "" })
	if err := k.remove(); err != nil {
		t.Fatal(err)
	}
	wantRedirected(t, k, both...)
	if lines := log.Lines("another program has removed the rules"); len(lines) != 1 {
		t.Errorf("log: %s", log)
	}
}

// started returns a running relay with a state, and a function that connects as if to an address.
func started(t *testing.T, changes *pb.Changes) (*Relay, *cloud, func(to netip.AddrPort) net.Conn) {
	t.Helper()
	k, c := new(fake), newCloud()
	r, _ := newTestRelay(t, k, c)
	door := newDoor(t.Context(), r, failing(t))
	if err := door.open(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		door.close()
		door.drain()
	})
	if _, _, err := r.applySeries([]*pb.Changes{changes}); err != nil {
		t.Fatal(err)
	}
	return r, c, func(to netip.AddrPort) net.Conn {
		k.mu.Lock()
		k.to = to
		k.mu.Unlock()
		conn, err := net.Dial("tcp", door.addrs()[0].String())
		if errors.Is(err, syscall.ECONNRESET) {
			return nil // the relay was faster
		}
		if err != nil {
			t.Fatal(err)
		}
		return conn
	}
}

// wantReset checks that the relay aborts a conn; nil: it has done so already.
func wantReset(t *testing.T, c net.Conn) {
	t.Helper()
	if c == nil {
		return
	}
	defer c.Close()
	if n, err := io.Copy(io.Discard, c); err == nil {
		t.Errorf("the conn ends cleanly after %d bytes, and was not reset", n)
	}
}

// A connection gets an endpoint, and another one if the way to the first is away. The answer of an endpoint counts.
func TestReach(t *testing.T) {
	changes := shop(t)
	changes.Set = append(changes.Set, item(t, other, endpoint("10.88.3.5", "edge3")))
	r, c, connect := started(t, changes)
	toEcho := echo(t)
	c.reach = toEcho
	wantEcho(t, connect(web4))
	if got := c.targets(); len(got) != 1 || got[0] != far4+" TCP 8080" && got[0] != other+" TCP 8080" {
		t.Errorf("asked for %v", got)
	}

	away := []tunnel.Code{tunnel.NoSuchNode, tunnel.Gone, tunnel.Draining, tunnel.Unreachable, tunnel.Timeout}
	for _, code := range away {
		first := ""
		c.mu.Lock()
		c.reached, c.reach = nil, func(target string) (net.Conn, error) {
			if first == "" || target == first {
				first = target
				return nil, tunnel.Refusef(code, "away")
			}
			return toEcho(target)
		}
		c.mu.Unlock()
		wantEcho(t, connect(web4))
		if got := c.targets(); len(got) != 2 || got[0] == got[1] {
			t.Errorf("after %s, asked for %v", code, got)
		}
		r.refusals.mu.Lock()
		r.refusals.last = nil
		r.refusals.mu.Unlock()
	}

	c.mu.Lock()
	c.reached, c.reach = nil, func(string) (net.Conn, error) { return nil, tunnel.Refusef(tunnel.Refused, "no") }
	c.mu.Unlock()
	wantReset(t, connect(web4))
	if got := c.targets(); len(got) != 1 {
		t.Errorf("after a refusal of the endpoint, asked for %v", got)
	}
	wantReset(t, connect(netip.MustParseAddrPort("10.96.0.11:80"))) // no Service has it
	wantReset(t, connect(netip.MustParseAddrPort("10.96.0.10:53"))) // no TCP port of the Service
	if refused := r.counts.refused[tunnel.Refused].Load(); refused != 1 {
		t.Errorf("%d are counted as refused", refused)
	}
}

// Who connects to the relay itself gets nothing.
func TestNotRedirected(t *testing.T) {
	_, c, connect := started(t, shop(t))
	c.reach = echo(t)
	wantReset(t, connect(netip.AddrPort{}))
	if got := c.targets(); len(got) != 0 {
		t.Errorf("asked for %v", got)
	}
}

// at1 adds a Node edge1 with a network of pods to changes. All addresses of that network lead to containers of the
// machine.
func at1(t testing.TB, r *Relay, changes *pb.Changes) {
	changes.Set = append(changes.Set,
		item(t, services.NodePath("edge1"), &services.Node{Edge: true, PodCidrs: []string{"10.88.1.0/24"}}))
	r.cfg.InContainer = func(netip.Addr) bool { return true }
}

// A connection gets an endpoint that this node reaches by itself, if there is one, and this node dials it.
func TestDirect(t *testing.T) {
	changes := shop(t)
	changes.Set = append(changes.Set, item(t, other, endpoint("10.88.1.5", "edge1")))
	r, c, connect := started(t, changes)
	node := new(pb.Changes)
	at1(t, r, node)
	if _, _, err := r.applySeries([]*pb.Changes{node}); err != nil {
		t.Fatal(err)
	}
	toEcho := echo(t)
	dialled := make(chan string, 1) // capacity 1: one dial
	r.dial = func(_ context.Context, _, addr string) (net.Conn, error) {
		dialled <- addr
		return toEcho(addr)
	}
	wantEcho(t, connect(web4))
	if got := <-dialled; got != "10.88.1.5:8080" || len(c.targets()) != 0 {
		t.Errorf("dialled %s, asked for %v", got, c.targets())
	}
}

// A user who may write EndpointSlices claims that addresses around the node are on it. The edge does not dial them; an
// endpoint elsewhere is next.
func TestClaimedEndpointsAreNotDialled(t *testing.T) {
	for _, claimed := range []string{"168.63.129.16", "192.168.1.1"} {
		changes := shop(t)
		dns := []*services.Port{{Name: "http", Protocol: "TCP", Port: 8080}, {Name: "dns", Protocol: "UDP", Port: 53}}
		e := endpoint(claimed, "edge1")
		e.Ports = dns
		changes.Set = append(changes.Set, item(t, other, e))
		r, c, connect := started(t, changes)
		c.reach = echo(t)
		r.cfg.InContainer = func(netip.Addr) bool { return true }
		r.cfg.IsOwn = func(a netip.Addr) bool { return a == netip.MustParseAddr("192.168.1.7") }
		node := item(t, services.NodePath("edge1"),
			&services.Node{Edge: true, PodCidrs: []string{"10.88.1.0/24"}, InternalIps: []string{"192.168.1.7"}})
		if _, _, err := r.applySeries([]*pb.Changes{{Set: []*pb.Item{node}}}); err != nil {
			t.Fatal(err)
		}
		r.dial = func(_ context.Context, _, addr string) (net.Conn, error) {
			t.Errorf("dialled %s", addr)
			return nil, errors.New("no")
		}
		wantEcho(t, connect(web4))
		r.direct = udp.NewEdge(claimedTarget{t}, r.cfg.Datagrams)
		target := services.Target{Endpoint: other, Protocol: protocolUDP, Port: 53}.String()
		if _, err := r.dialDatagrams(t.Context(), target); tunnel.CodeOf(err) != tunnel.Denied {
			t.Errorf("datagrams to %s: %v", claimed, err)
		}
		// What the policy of the edge permits is dialled, and what is in a network of direct.
		NewEdge(r, noting{permits: netip.MustParseAddr(claimed)})
		if err := r.mayDial(e, netip.AddrPortFrom(netip.MustParseAddr(claimed), 8080)); err != nil {
			t.Errorf("permitted: %v", err)
		}
		NewEdge(r, noting{})
		at := netip.AddrPortFrom(netip.MustParseAddr(claimed), 8080)
		if err := r.mayDial(e, at); tunnel.CodeOf(err) != tunnel.Denied {
			t.Errorf("not permitted: %v", err)
		}
		r.SetRouted([]netip.Prefix{netip.PrefixFrom(at.Addr(), 24).Masked()})
		if err := r.mayDial(e, at); err != nil {
			t.Errorf("in a network of direct: %v", err)
		}
	}
}

// claimedTarget fails a test that sends datagrams.
type claimedTarget struct{ t *testing.T }

func (c claimedTarget) DialUDP(
	_ context.Context, addr string, _ func(netip.AddrPort) time.Time,
) (*net.UDPConn, error) {
	c.t.Errorf("datagrams go to %s", addr)
	return nil, tunnel.Refusef(tunnel.Unreachable, "no")
}

// When the relay stops, nothing is redirected any more, even if it does not know what the kernel has.
func TestStopsAfterAFailure(t *testing.T) {
	k := new(fake)
	r, _ := newTestRelay(t, k, newCloud())
	if _, _, err := r.applySeries([]*pb.Changes{shop(t)}); err != nil {
		t.Fatal(err)
	}
	d := newDoor(t.Context(), r, failing(t))
	if err := d.program(); err != nil || len(k.redirected()) != 2 {
		t.Fatalf("%v, redirected: %v", err, k.redirected())
	}
	d.programmed = false // as after a change that has failed
	d.close()
	d.drain()
	if got := k.redirected(); len(got) != 0 {
		t.Errorf("after the end, the kernel redirects %v", got)
	}
}

// With session affinity, a caller gets the endpoint that it had, while that is usable. What is remembered is bounded.
func TestAffinity(t *testing.T) {
	changes := shop(t)
	s := webService()
	s.AffinitySeconds = 60
	changes.Set[0] = item(t, web, s)
	changes.Set = append(changes.Set, item(t, other, endpoint("10.88.3.5", "edge3")))
	_, c, connect := started(t, changes)
	c.reach = echo(t)
	for range 20 {
		wantEcho(t, connect(web4))
	}
	if got := slices.Compact(slices.Sorted(slices.Values(c.targets()))); len(got) != 1 {
		t.Errorf("one caller got %v", got)
	}
	synctest.Test(t, func(t *testing.T) {
		a := newAffinity(2)
		key := func(port string) affinityKey { return affinityKey{port: port} }
		end := func(port uint16) netip.AddrPort { return netip.AddrPortFrom(web4.Addr(), port) }
		a.put(key("a"), end(1), time.Second)
		a.put(key("b"), end(2), time.Minute)
		time.Sleep(2 * time.Second)
		if got := a.get(key("a"), time.Second); got.IsValid() {
			t.Errorf("after its time: %s", got)
		}
		a.put(key("c"), end(3), time.Minute)
		if a.get(key("b"), time.Minute) != end(2) || a.get(key("c"), time.Minute) != end(3) || len(a.last) != 2 {
			t.Errorf("remembered: %v", a.last)
		}
		a.put(key("d"), end(4), time.Minute)
		if a.get(key("d"), time.Minute) != end(4) || len(a.last) != 2 {
			t.Errorf("remembered: %v", a.last)
		}
	})
}

// noting is a Policy that notes what is dialled.
type noting struct {
	dialled *[]string
	permits netip.Addr // what Permits permits
}

func (n noting) Permits(to netip.AddrPort) bool { return to.Addr() == n.permits }

func (n noting) DialRequest(_ context.Context, r tunnel.Request) (net.Conn, error) {
	*n.dialled = append(*n.dialled, r.Addr)
	return nil, nil
}

func (n noting) DialUDP(ctx context.Context, addr string, _ func(netip.AddrPort) time.Time) (*net.UDPConn, error) {
	*n.dialled = append(*n.dialled, addr)
	return nil, tunnel.Refusef(tunnel.Timeout, "the test dials nothing")
}

// An edge dials the endpoints that its own state has on this node, and nothing else, whoever asks.
func TestEdgeDialsItsEndpoints(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _ := newTestRelay(t, new(fake), newCloud())
		apply := func(changes *pb.Changes) {
			if _, _, err := r.applySeries([]*pb.Changes{changes}); err != nil {
				t.Error(err)
			}
		}
		apply(shop(t))
		own := endpoint("10.88.1.5", "edge1")
		own.Ports = append(own.Ports, &services.Port{Name: "dns", Protocol: "UDP", Port: 53})
		apply(&pb.Changes{Set: []*pb.Item{item(t, other, own)}})
		var dialled []string
		e := NewEdge(r, noting{dialled: &dialled})
		for _, c := range []struct {
			network, addr string
			code          tunnel.Code // 0: it dials
		}{
			{"tcp", "10.88.1.5:8080", 0},
			{"tcp", "[::ffff:10.88.1.5]:8080", 0},
			{"tcp", "10.88.1.5:8081", tunnel.Denied},
			{"udp", "10.88.1.5:8080", tunnel.Denied},
			{"udp", "10.88.1.5:53", 0},
			{"udp", "10.88.1.5:54", tunnel.Denied},
			{"udp", "10.88.2.5:53", tunnel.Denied},
			{"tcp", "10.88.1.5:53", tunnel.Denied},
			{"tls", "10.88.1.5:8080", tunnel.Denied},
			{"tcp", "10.88.2.5:8080", tunnel.Denied}, // of another node
			{"tcp", "127.0.0.1:8080", tunnel.Denied},
			{"tcp", "localhost:8080", tunnel.Denied},
			{"tcp", "", tunnel.Denied},
		} {
			dialled = nil
			_, err := e.serve(t.Context(), tunnel.Request{Network: c.network, Addr: c.addr})
			if c.code == 0 && c.network == "udp" && tunnel.CodeOf(err) == tunnel.Timeout {
				err = nil
			}
			if c.code == 0 && (err != nil || len(dialled) != 1) ||
				c.code != 0 && (err == nil || tunnel.CodeOf(err) != c.code || dialled != nil) {
				t.Errorf("%s %s: dialled %v, %v", c.network, c.addr, dialled, err)
			}
		}

		// The cloud asks for an endpoint that this node does not know yet.
		go func() {
			time.Sleep(stateTime / 2)
			apply(&pb.Changes{Set: []*pb.Item{item(t, far4+"x", endpoint("10.88.1.6", "edge1"))}})
		}()
		if _, err := e.serve(t.Context(), tunnel.Request{Network: "tcp", Addr: "10.88.1.6:8080"}); err != nil {
			t.Error(err)
		}
		// A Service is deleted.
		apply(&pb.Changes{Deleted: []string{other}})
		if _, err := e.serve(t.Context(), tunnel.Request{Network: "tcp", Addr: "10.88.1.5:8080"}); err == nil {
			t.Error("the edge dials an endpoint that is deleted")
		}
	})
}

// The first rules that an edge writes know the routes of its node.
func TestFirstRulesKnowTheRoutes(t *testing.T) {
	k, c := new(fake), newCloud()
	r, _ := newTestRelay(t, k, c)
	r.cfg.AwaitsRouted, r.patience = true, time.Hour
	testkit.Run(t, r.Run)
	time.Sleep(50 * time.Millisecond)
	programs := func() int {
		k.mu.Lock()
		defer k.mu.Unlock()
		return k.programs
	}
	if n := programs(); n > 0 {
		t.Errorf("%d sets of rules before the routes are known", n)
	}
	r.SetRouted([]netip.Prefix{netip.MustParsePrefix("10.88.2.0/24")})
	testkit.Eventually(t, "the rules are written", func() bool { return programs() > 0 })
}

// After tunnel restart, the new process can read its file only when the old process has closed it. Until then, an open
// waits.
func TestEdgeWaitsForItsFile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, _ := newTestRelay(t, new(fake), newCloud())
		var dialled []string
		e := NewEdge(r, noting{dialled: &dialled})
		go func() {
			time.Sleep((stateTime + loadTime) / 2)
			if _, _, err := r.applySeries([]*pb.Changes{
				shop(t), {Set: []*pb.Item{item(t, other, endpoint("10.88.1.5", "edge1"))}},
			}); err != nil {
				t.Error(err)
			}
		}()
		if _, err := e.serve(t.Context(), tunnel.Request{Network: "tcp", Addr: "10.88.1.5:8080"}); err != nil {
			t.Error(err)
		}
	})
}

// Addresses of the node and of its pods are its own, whatever EndpointSlices say, and whatever the cloud says.
func TestHome(t *testing.T) {
	r, _ := newTestRelay(t, new(fake), newCloud())
	r.cfg.InContainer = func(a netip.Addr) bool {
		return slices.Contains([]string{"10.88.1.5", "10.88.2.5", "fd00:88:1::5", "172.17.0.2"}, a.String())
	}
	r.cfg.IsOwn = func(a netip.Addr) bool { return slices.Contains([]string{"192.168.1.7", "127.0.0.1"}, a.String()) }
	if r.Home(netip.MustParseAddr("10.88.1.5")) {
		t.Error("a relay without a state has addresses of its own")
	}
	if _, _, err := r.applySeries([]*pb.Changes{{Set: []*pb.Item{
		item(t, services.NodePath("edge1"), &services.Node{
			PodCidrs: []string{"10.88.1.0/24", "fd00:88:1::/64"}, InternalIps: []string{"192.168.1.7"},
		}),
		item(t, services.NodePath("edge2"), &services.Node{PodCidrs: []string{"10.88.2.0/24"}}),
		item(t, other, endpoint("192.168.1.1", "edge1")),
	}}}); err != nil {
		t.Fatal(err)
	}
	want := func(want map[string]bool) {
		t.Helper()
		for addr, want := range want {
			if got := r.Home(netip.MustParseAddr(addr)); got != want {
				t.Errorf("%s: %t", addr, got)
			}
		}
	}
	want(map[string]bool{
		"10.88.1.5": true, "::ffff:10.88.1.5": true, "fd00:88:1::5": true, "192.168.1.7": true,
		"10.88.1.6": false, "10.88.2.5": false, "172.17.0.2": false, "192.168.1.1": false, "127.0.0.1": false,
	})

	// A cloud that says that everything is on this node reaches the containers and the addresses of this machine.
	if _, _, err := r.applySeries([]*pb.Changes{{Set: []*pb.Item{item(t, services.NodePath("edge1"), &services.Node{
		PodCidrs: []string{"0.0.0.0/0", "::/0"}, InternalIps: []string{"192.168.1.1", "127.0.0.1", "192.168.1.7"},
	})}}}); err != nil {
		t.Fatal(err)
	}
	want(map[string]bool{
		"10.88.1.5": true, "192.168.1.7": true,
		"192.168.1.1": false, "192.168.1.2": false, "127.0.0.1": false, "169.254.169.254": false, "fd00:1::1": false,
	})
}

// A target that the cloud has refused is not asked for again for a moment: a caller that tries a Service without end
// must not use up what a session may ask.
func TestRefusedTargetsWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCloud()
		r, _ := newTestRelay(t, new(fake), c)
		if _, _, err := r.applySeries([]*pb.Changes{shop(t)}); err != nil {
			t.Fatal(err)
		}
		for _, one := range []struct {
			code tunnel.Code
			asks int // of 100 connections
		}{{tunnel.NoSuchNode, 1}, {tunnel.Denied, 1}, {tunnel.Internal, 1}, {tunnel.Refused, 100}, {tunnel.Overloaded, 100}} {
			time.Sleep(refusalTime)
			c.reach = func(string) (net.Conn, error) { return nil, tunnel.Refusef(one.code, "no") }
			before := len(c.targets())
			for range 100 {
				if _, err := r.reach(t.Context(), address{web4, protocolTCP}, netip.Addr{}); tunnel.CodeOf(err) != one.code {
					t.Fatalf("%s arrives as %v", one.code, err)
				}
			}
			if n := len(c.targets()) - before; n != one.asks {
				t.Errorf("after %s, the cloud is asked %d times, want %d", one.code, n, one.asks)
			}
		}
		c.reach = func(string) (net.Conn, error) { return nil, nil }
		time.Sleep(refusalTime)
		r.refusals.last = nil
		if _, err := r.reachFar(t.Context(), "works"); err != nil || len(r.refusals.last) != 0 {
			t.Errorf("a success is remembered as a refusal: %v, %v", r.refusals.last, err)
		}
		datagrams := services.Target{Endpoint: far4, Protocol: protocolUDP, Port: 5353}.String()
		c.reach = func(string) (net.Conn, error) { return nil, tunnel.Refusef(tunnel.NoSuchNode, "no") }
		before := len(c.targets())
		for range 3 {
			if _, err := r.dialDatagrams(t.Context(), datagrams); tunnel.CodeOf(err) != tunnel.NoSuchNode {
				t.Errorf("for datagrams: %v", err)
			}
		}
		if n := len(c.targets()) - before; n != 1 {
			t.Errorf("for datagrams, the cloud is asked %d times", n)
		}
		for i := range 2 * maxRefusals {
			r.refusals.put(strconv.Itoa(i), errors.New("no"))
		}
		if n := len(r.refusals.last); n > maxRefusals {
			t.Errorf("%d refusals are remembered", n)
		}
	})
}

// One caller does not get all connections.
func TestConnsPerCaller(t *testing.T) {
	var c callers
	c.max = 2
	one, other := netip.MustParseAddr("10.88.1.2"), netip.MustParseAddr("10.88.1.3")
	var got []bool
	for _, from := range []netip.Addr{one, one, one, other} {
		got = append(got, c.enter(from))
	}
	if !slices.Equal(got, []bool{true, true, false, true}) {
		t.Error("a caller gets more or less than its share")
	}
	c.leave(one)
	if !c.enter(one) {
		t.Error("a connection that has ended still counts")
	}
	c.leave(one)
	c.leave(one)
	c.leave(other)
	if len(c.of) != 0 {
		t.Errorf("callers without connections are remembered: %v", c.of)
	}
}
