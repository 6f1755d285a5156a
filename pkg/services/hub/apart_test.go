package hub

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	"tunnel.example/tunnel/pkg/services"
	pb "tunnel.example/tunnel/pkg/services/servicesv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

var http = []*services.Port{{Name: "http", Protocol: "TCP", Port: 80}}

// hinted sets an endpoint of web with a hint for its zone, if it has one.
func hinted(t testing.TB, h *Hub, address, node, zone string, ready bool) services.Path {
	t.Helper()
	e := &services.Endpoint{Address: address, Node: node, Zone: zone, Ready: ready, Serving: ready, Ports: http}
	if zone != "" && ready {
		e.ZoneHints = []string{zone}
	}
	p := services.EndpointPath("shop", "web", "web-a", address)
	h.Set(p, marshal(t, e))
	return p
}

func setWeb(t testing.TB, h *Hub, local bool) {
	t.Helper()
	h.Set(web, marshal(t, &services.Service{ClusterIps: []string{"10.96.0.1"}, Ports: http, InternalLocal: local}))
}

func setNode(t testing.TB, h *Hub, name, zone string) {
	t.Helper()
	h.Set(services.NodePath(name), marshal(t, &services.Node{Zone: zone}))
}

func (e *edge) wantAddresses(want ...string) {
	e.t.Helper()
	if got := addresses(e.state, web); !slices.Equal(got, want) {
		e.t.Errorf("the edge has the endpoints %q, want %q", got, want)
	}
}

// wantNothing checks that no batch comes without a change.
func (e *edge) wantNothing(why string) {
	e.t.Helper()
	synctest.Wait()
	select {
	case b := <-e.out:
		e.t.Errorf("%s: a batch comes: %v", why, changesOf(e.t, b))
	default:
	}
}

// answer waits for the one batch that the edge has asked for, and applies it.
func (e *edge) answer() *pb.Changes {
	e.t.Helper()
	b, c, err := e.take()
	if err != nil || b.GetMore() {
		e.t.Fatal(b.GetMore(), err)
	}
	if _, err := e.state.Apply(c); err != nil {
		e.t.Fatal(err)
	}
	return c
}

// A node gets the endpoints in its zone while there are some, and hears nothing of the others.
func TestZones(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHub(Config{})
		setWeb(t, h, false)
		for i, zone := range []string{"a", "b", "c"} {
			setNode(t, h, "edge"+strconv.Itoa(i), zone)
		}
		hinted(t, h, "10.88.0.1", "edge0", "a", true)
		hinted(t, h, "10.88.1.1", "edge1", "b", true)
		h.Synced()
		a, b, c := watch(t, h, "edge0", services.NewState()), watch(t, h, "edge1", services.NewState()),
			watch(t, h, "edge2", services.NewState())
		for _, e := range []*edge{a, b, c} {
			e.pull()
		}
		a.wantAddresses("10.88.0.1")
		b.wantAddresses("10.88.1.1")
		c.wantAddresses("10.88.0.1", "10.88.1.1") // there is none in its zone
		for _, e := range []*edge{a, b, c} {
			if err := e.ask(); err != nil {
				t.Fatal(err)
			}
		}
		// A second endpoint in b. Edges in c get it, since they need all.
		hinted(t, h, "10.88.1.2", "edge1", "b", true)
		b.answer()
		c.answer()
		a.wantNothing("an endpoint of another zone")
		b.wantAddresses("10.88.1.1", "10.88.1.2")
		c.wantAddresses("10.88.0.1", "10.88.1.1", "10.88.1.2")

		// The only endpoint in a ends: edges in a need all others.
		gone := hinted(t, h, "10.88.0.1", "edge0", "a", false)
		a.answer()
		a.wantAddresses("10.88.0.1", "10.88.1.1", "10.88.1.2") // with its own, which is not ready
		if err := a.ask(); err != nil {
			t.Fatal(err)
		}
		synctest.Wait() // the edge waits already
		h.Delete(gone)
		a.answer()
		a.wantAddresses("10.88.1.1", "10.88.1.2")

		// The node moves to another zone.
		setNode(t, h, "edge0", "b")
		a.pull()
		a.wantAddresses("10.88.1.1", "10.88.1.2")
		setNode(t, h, "edge0", "a")
		hinted(t, h, "10.88.0.9", "edge0", "a", true)
		a.pull()
		a.wantAddresses("10.88.0.9")

		// One endpoint without a hint: no hint counts, and all nodes need all.
		hinted(t, h, "10.88.9.9", "edge9", "", true)
		all := []string{"10.88.0.9", "10.88.1.1", "10.88.1.2", "10.88.9.9"}
		for _, e := range []*edge{a, c} {
			e.pull()
			e.wantAddresses(all...)
			e.wantEqual(h)
		}
		// It goes. For some minutes, all nodes get all, so that hints which come and go are cheap.
		h.Delete(services.EndpointPath("shop", "web", "web-a", "10.88.9.9"))
		for _, e := range []*edge{a, c} {
			e.pull()
			e.wantAddresses(all[:3]...)
		}
		time.Sleep(widePause)
		setNode(t, h, "edge7", "b")
		for _, e := range []*edge{a, c} {
			e.pull()
		}
		a.wantAddresses("10.88.0.9")
		c.wantAddresses(all[:3]...)

		// An edge that comes again gets only what differs.
		a.stop()
		hinted(t, h, "10.88.1.3", "edge1", "b", true)
		again := watch(t, h, "edge0", a.state)
		again.pull()
		if len(changesOf(t, again.last).GetSet()) > 0 {
			t.Error("the edge gets items again")
		}
		again.wantAddresses("10.88.0.9")
		for _, e := range []*edge{b, c, again} {
			e.stop()
		}
	})
}

// Of a Service that only callers on the nodes of its endpoints may use, a node gets its own endpoints, and one more so
// that it knows that there are some.
func TestEndpointsOfTheNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHub(Config{Cluster: true, Domain: "cluster.local"})
		setWeb(t, h, true)
		for i := range 5 {
			setNode(t, h, "edge"+strconv.Itoa(i), "")
			hinted(t, h, fmt.Sprintf("10.88.%d.1", i), "edge"+strconv.Itoa(i), "", true)
		}
		h.Synced()
		e := watch(t, h, "edge3", services.NewState())
		e.pull()
		e.wantAddresses("10.88.0.1", "10.88.3.1")
		if err := e.ask(); err != nil {
			t.Fatal(err)
		}
		hinted(t, h, "10.88.4.1", "edge4", "", false)
		e.wantNothing("an endpoint of another node")
		hinted(t, h, "10.88.3.1", "edge3", "", false)
		if c := e.answer(); len(c.GetSet()) != 1 || len(c.GetDeleted()) != 0 {
			t.Errorf("for one change: %v", c)
		}
		if _, refusal := h.Target("edge4", "endpoint/shop/web/web-a/10.88.0.1 TCP 80"); refusal == nil ||
			refusal.Code != tunnel.Denied {
			t.Errorf("a node reaches an endpoint that only callers on its node may use: %v", refusal)
		}

		// All may use it again.
		setWeb(t, h, false)
		e.pull()
		e.wantEqual(h)
		if n := len(addresses(e.state, web)); n != 5 {
			t.Errorf("the edge has %d endpoints", n)
		}
		if _, refusal := h.Target("edge4", "endpoint/shop/web/web-a/10.88.0.1 TCP 80"); refusal != nil {
			t.Errorf("a node does not reach an endpoint: %v", refusal)
		}
		e.stop()
	})
}

// If a first series breaks off, the buckets that have arrived are whole, but for the last one. An edge keeps them.
func TestBucketsThatArriveAreWhole(t *testing.T) {
	h := newHub(Config{})
	largeCluster(t, h)
	for i := range 1000 { // of each Service, a node needs two endpoints of ten
		for j := range 10 {
			p, value := anEndpoint(t, i, j, true)
			var e services.Endpoint
			if err := proto.Unmarshal(value, &e); err != nil {
				t.Fatal(err)
			}
			e.ZoneHints = []string{e.GetZone()}
			h.Set(p, marshal(t, &e))
		}
	}
	for node, most := range map[tunnel.NodeName]int{"edge-007": 4000, "a node without a zone": 12000} {
		t.Run(string(node), func(t *testing.T) { arriveWhole(t, h, node, most) })
	}
}

// arriveWhole has an edge get its first series, of up to most items.
func arriveWhole(t *testing.T, h *Hub, node tunnel.NodeName, most int) {
	want, items := needs(h, node)
	if items > most {
		t.Fatalf("the node needs %d items", items)
	}
	e := watch(t, h, node, services.NewState())
	var got services.Digests
	var whole []uint32
	for batches := 1; ; batches++ {
		if err := e.ask(); err != nil {
			t.Fatal(err)
		}
		b, c, err := e.take()
		if err != nil {
			t.Fatal(err)
		}
		for _, item := range c.GetSet() {
			got.Flip(item.GetPath(), item.GetValue())
		}
		whole = append(whole, c.GetWhole()...)
		if !b.GetMore() {
			break
		}
		if batches >= 3 && len(whole) < 2 {
			t.Fatal("no bucket has arrived with the first batches")
		}
		for _, bucket := range whole[:max(0, len(whole)-1)] {
			if got[bucket] != want[bucket] {
				t.Fatalf("after %d batches, bucket %d lacks items", batches, bucket)
			}
		}
	}
	if got != want || len(whole) != services.Buckets {
		t.Errorf("the node gets other items than it needs, in %d buckets", len(whole))
	}
	e.stop()
}

// A Service's endpoints are put apart, or no more, while an edge gets its first series. At the end of the series, the
// edge has what its node needs.
func TestChangesOfViewDuringASeries(t *testing.T) {
	for _, local := range []bool{true, false} {
		t.Run(strconv.FormatBool(local), func(t *testing.T) {
			h := newHub(Config{})
			largeCluster(t, h)
			setWeb(t, h, !local)
			setNode(t, h, "edge0", "a")
			for i := range 20 {
				hinted(t, h, "10.88.0."+strconv.Itoa(i+1), "edge0", "", true)
			}
			for i := range 20 {
				hinted(t, h, "10.88.1."+strconv.Itoa(i+1), "edge1", "", true)
			}
			e := watch(t, h, "edge0", services.NewState())
			var series []*pb.Changes
			for {
				if err := e.ask(); err != nil {
					t.Fatal(err)
				}
				b, c, err := e.take()
				if err != nil {
					t.Fatal(err)
				}
				if series = append(series, c); len(series) == 2 {
					setWeb(t, h, local)
				}
				if !b.GetMore() {
					break
				}
			}
			if _, err := e.state.Apply(series...); err != nil {
				t.Fatal(err)
			}
			if want, items := needs(h, "edge0"); e.state.Digests() != want || e.state.Len() != items {
				t.Errorf("of %d batches, the edge has %d items and needs %d, or they differ", len(series), e.state.Len(), items)
			}
			e.stop()
		})
	}
}

// While no endpoint is ready, a node has its own, and it gets the others no sooner than it needs them.
func TestNoneIsReady(t *testing.T) {
	h := newHub(Config{})
	setWeb(t, h, false)
	setNode(t, h, "edge0", "a")
	for i, zone := range []string{"a", "b", "c"} {
		hinted(t, h, fmt.Sprintf("10.88.%d.1", i), "edge"+strconv.Itoa(i), zone, true)
	}
	h.Synced()
	e := watch(t, h, "edge0", services.NewState())
	e.pull()
	e.wantAddresses("10.88.0.1")
	for range 2 {
		for _, ready := range []bool{false, true} {
			for i, zone := range []string{"c", "b", "a"} { // the endpoint of the node's zone changes last
				hinted(t, h, fmt.Sprintf("10.88.%d.1", 2-i), "edge"+strconv.Itoa(2-i), zone, ready)
			}
			e.pull()
			e.wantAddresses("10.88.0.1")
		}
	}
	e.stop()
}

// needs returns what a node needs now.
func needs(h *Hub, node tunnel.NodeName) (digests services.Digests, items int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.settleLocked()
	self := services.Self{Node: string(node)}
	state := services.NewState()
	all := new(pb.Changes)
	for _, bucket := range h.buckets {
		for p, c := range bucket {
			all.Set = append(all.Set, &pb.Item{Path: p, Value: c.value})
		}
	}
	if _, err := state.Apply(all); err != nil {
		panic(err)
	}
	self.Zone = state.Node(string(node)).GetZone()
	put := func(p services.Path) {
		digests.Flip(p, h.itemLocked(p).value)
		items++
	}
	for _, item := range all.GetSet() {
		if of := services.ServiceOf(item.GetPath()); of == "" || h.apart[of] == nil {
			put(item.GetPath())
		}
	}
	for path := range h.apart {
		namespace, name, _ := services.CutService(path)
		endpoints := state.Endpoints(path)
		for _, i := range services.ViewOf(state.Service(namespace, name), endpoints).For(self) {
			put(endpoints[i].Path)
		}
	}
	return digests, items
}

// Whatever changes, and whenever edges ask, leave and come back: each has what its node needs once it is current.
func TestNarrowViewsConverge(t *testing.T) {
	for seed := range uint64(4) {
		t.Run(strconv.FormatUint(seed, 10), func(t *testing.T) {
			// An edge that waits for ever for what it lacks is a deadlock, which synctest reports.
			synctest.Test(t, func(t *testing.T) { converge(t, rand.New(rand.NewPCG(seed, 2))) })
		})
	}
}

func converge(t *testing.T, random *rand.Rand) {
	const nodes = 6
	h := newHub(Config{})
	for i := range 3 {
		h.Set(services.ServicePath("shop", "web"+strconv.Itoa(i)), marshal(t, &services.Service{Ports: http}))
	}
	h.Synced()
	name := func(i int) tunnel.NodeName { return tunnel.NodeName("edge" + strconv.Itoa(i)) }
	zones := []string{"a", "b", "c", ""}
	edges := make([]*edge, nodes)
	for i := range edges {
		edges[i] = watch(t, h, name(i), services.NewState())
	}
	series := make([][]*pb.Changes, nodes) // what each edge has got of a series that goes on
	asked := make([]bool, nodes)           // the edge has asked for a batch, and not taken it
	current := func(i int) bool {
		want, _ := needs(h, name(i))
		return edges[i].asked && len(series[i]) == 0 && edges[i].state.Digests() == want
	}
	ask := func(i int) {
		if asked[i] {
			return
		}
		if err := edges[i].ask(); err != nil {
			t.Fatal(err)
		}
		asked[i] = true
	}
	step := func(i int) {
		ask(i)
		asked[i] = false
		e := edges[i]
		b, c, err := e.take()
		if err != nil {
			t.Fatal(err)
		}
		if series[i] = append(series[i], c); b.GetMore() {
			return
		}
		if _, err := e.state.Apply(series[i]...); err != nil {
			t.Fatal(err)
		}
		series[i] = nil
	}
	hints := true
	for range 3000 {
		service := "web" + strconv.Itoa(random.IntN(3))
		switch i := random.IntN(nodes); random.IntN(8) {
		case 0:
			setNode(t, h, string(name(i)), zones[random.IntN(4)])
		case 1:
			if random.IntN(10) == 0 {
				hints = !hints
			}
			if random.IntN(10) == 0 {
				time.Sleep(widePause)
			}
			h.Set(services.ServicePath("shop", service), marshal(t, &services.Service{
				ClusterIps: []string{"10.96.0.1"}, Ports: http, InternalLocal: random.IntN(3) == 0,
			}))
		case 2, 3, 4:
			e := &services.Endpoint{
				Address: "10.88.0." + strconv.Itoa(random.IntN(12)), Node: string(name(i)), Ready: random.IntN(4) > 0, Ports: http,
				Hostname: string(make([]byte, random.IntN(3)*3000)), // a series then takes several batches
			}
			if hints && random.IntN(200) > 0 {
				e.ZoneHints = zones[:1+random.IntN(3)]
			}
			h.Set(services.EndpointPath("shop", service, "a", e.Address), marshal(t, e))
		case 5:
			h.Delete(services.EndpointPath("shop", service, "a", "10.88.0."+strconv.Itoa(random.IntN(12))))
		default:
			switch {
			case random.IntN(10) == 0:
				edges[i].stop()
				edges[i], series[i], asked[i] = watch(t, h, name(i), edges[i].state), nil, false
			case !current(i):
				step(i)
			case random.IntN(2) == 0:
				ask(i)
			}
		}
	}
	for i, e := range edges {
		for n := 0; !current(i) && n < 100; n++ {
			step(i)
		}
		if want, items := needs(h, name(i)); e.state.Digests() != want || e.state.Len() != items {
			t.Errorf("%s has %d items and needs %d, or they differ", name(i), e.state.Len(), items)
		}
		e.stop()
	}
	if len(h.watchers) > 0 {
		t.Errorf("%d watchers are left", len(h.watchers))
	}
}
