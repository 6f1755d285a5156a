package interop

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
	"tunnel.example/tunnel/test/rig"
)

// fleet is replicas of our cloud and edges, behind balancers that know only addresses.
type fleet struct {
	*rig.Fleet
	t       *testing.T
	dir     string         // of the sockets
	running []*rig.Process // of each replica
	nodes   []*fleetNode
}

// fleetNode is an edge that alone may dial its target.
type fleetNode struct {
	name, target string
	at           *balancer // leads it to the replicas
}

// newFleet starts them, and waits until the replicas have joined each other and each holds some
// of the edges.
func newFleet(t *testing.T, replicas, edges int) *fleet {
	t.Helper()
	ca, err := rig.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	f := &fleet{t: t}
	if f.dir, err = os.MkdirTemp("", "tunnel-interop-"); err != nil { // a test's own folder may be too long a path
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(f.dir) })
	cfg := rig.FleetConfig{
		Binary: build(t, t.TempDir()), Dir: t.TempDir(), CA: ca, Hosts: make([]rig.Host, replicas),
		Cloud: fmt.Sprintf("[mode.cloud.egress]\ngrpc = [\"unix://%s/{{.Name}}.g\"]\nhttpconnect = "+
			"[\"unix://%s/{{.Name}}.c\"]\n", f.dir, f.dir),
	}
	for i := range edges {
		cfg.Nodes = append(cfg.Nodes, fmt.Sprintf("edge%d", i))
	}
	if f.Fleet, err = rig.NewFleet(cfg); err != nil {
		t.Fatal(err)
	}
	var ports []string
	for _, r := range f.Replicas {
		ports = append(ports, r.GRPC())
		f.running = append(f.running, f.start(&r.Member))
	}
	for _, r := range f.Replicas {
		until(t, "the replicas have joined each other", r.Log.String, func() bool {
			m, err := rig.Metrics(r.Health())
			return err == nil && int(m["tunnel_replicas"]) == replicas-1 && rig.Ready(r.Health()) == nil
		})
	}
	for i, name := range cfg.Nodes {
		ip := fmt.Sprintf("127.0.1.%d", i+1)
		n := &fleetNode{name: name, target: f.named(ip, name), at: newBalancer(t, "tcp", "127.0.0.1:0", ports, i, true)}
		e, err := f.Edge(rig.EdgeConfig{
			Node: name, Cloud: n.at.addr, Allow: []string{n.target},
			More: fmt.Sprintf("[mode.edge.egress]\nidentifiers = \"ipv4=%s\"\n", ip),
		})
		if err != nil {
			t.Fatal(err)
		}
		f.start(e)
		f.nodes = append(f.nodes, n)
	}
	return f
}

func (f *fleet) start(m *rig.Member) *rig.Process {
	f.t.Helper()
	p, err := m.Start()
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(p.Kill)
	return p
}

// named starts a target that says its name.
func (f *fleet) named(ip, name string) string {
	f.t.Helper()
	ln, err := net.Listen("tcp", ip+":0")
	if err != nil {
		f.t.Fatal(err)
	}
	stop := accept(ln, func(c net.Conn) {
		// Who speaks first has read the answer to its dial, whatever its library makes of both at once.
		if _, err := c.Read(make([]byte, 1)); err == nil {
			io.WriteString(c, name)
		}
	})
	f.t.Cleanup(stop)
	return ln.Addr().String()
}

// sockets returns those of a front door of every replica: "g" or "c".
func (f *fleet) sockets(door string) (paths []string) {
	for _, r := range f.Replicas {
		paths = append(paths, filepath.Join(f.dir, r.Name+"."+door))
	}
	return paths
}

// reaches says why a dial does not come to a node.
func (n *fleetNode) reaches(dial dialer) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := dial(ctx, n.target)
	if err != nil {
		return err
	}
	defer c.Close()
	if answer, err := sayAndHear(c, "?", len(n.name)); err != nil || answer != n.name {
		return fmt.Errorf("%q answers, %w", answer, err)
	}
	return nil
}

func (f *fleet) logs() (all string) {
	for _, r := range f.Replicas {
		all += r.Name + "\n" + r.Log.String()
	}
	return all
}

// balancer leads connections to backends in turn, and to the next where it cannot connect. A
// sticky one leads all to one backend while there are any, as docs/replicas.md would have it
// before edges.
type balancer struct {
	// Set once.
	addr     string
	network  string
	backends []string
	sticky   bool

	mu    sync.Mutex // guards the following
	turn  int
	leads int // where the newest connection has gone
	live  int // connections
}

func newBalancer(t *testing.T, network, addr string, backends []string, first int, sticky bool) *balancer {
	t.Helper()
	ln, err := net.Listen(network, addr)
	if err != nil {
		t.Fatal(err)
	}
	b := &balancer{addr: ln.Addr().String(), network: network, backends: backends, sticky: sticky, turn: first, leads: -1}
	t.Cleanup(accept(ln, func(c net.Conn) {
		back, err := b.connect()
		if err != nil {
			tunnel.Reset(c)
			return
		}
		tunnel.Splice(context.Background(), c, back)
		b.mu.Lock()
		defer b.mu.Unlock()
		b.live--
	}))
	return b
}

func (b *balancer) connect() (net.Conn, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	var errs []error
	if b.sticky && b.live > 0 {
		b.turn = b.leads
	}
	for range b.backends {
		i := b.turn % len(b.backends)
		b.turn++
		c, err := net.DialTimeout(b.network, b.backends[i], time.Second)
		if err == nil {
			b.leads = i
			b.live++
			return c, nil
		}
		errs = append(errs, err)
	}
	return nil, errors.Join(errs...)
}

func (b *balancer) holder() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.leads
}

// Three replicas, and clients that reach any of them: every dial comes to the node whose address
// it is, wherever that is held. A replica that is killed takes its own nodes away for a moment,
// and nobody else's.
func TestReplicas(t *testing.T) {
	f := newFleet(t, 3, 6)
	overGRPC, overConnect := f.sockets("g"), f.sockets("c")
	balanced := func() map[string]dialer {
		return ways(t, newBalancer(t, "unix", filepath.Join(f.dir, "g"), overGRPC, 0, false).addr,
			newBalancer(t, "unix", filepath.Join(f.dir, "c"), overConnect, 0, false).addr)
	}()
	direct := make([]map[string]dialer, len(f.Replicas))
	for i := range f.Replicas {
		direct[i] = ways(t, overGRPC[i], overConnect[i])
	}
	known := func(replicas ...int) { // all nodes, by all of these
		t.Helper()
		for _, i := range replicas {
			for _, n := range f.nodes {
				until(t, fmt.Sprintf("%s is reached through replica %d", n.name, i), f.logs,
					func() bool { return n.reaches(direct[i]["CONNECT"]) == nil })
			}
		}
	}
	known(0, 1, 2)
	held := make(map[int]int)
	for _, n := range f.nodes {
		held[n.at.holder()]++
	}
	if len(held) != len(f.Replicas) {
		t.Fatalf("the nodes are held by %v: less is tested than should be", held)
	}

	all := func(dials map[string]dialer, nodes []*fleetNode, what string) {
		t.Helper()
		var wg sync.WaitGroup
		for way, dial := range dials {
			for _, n := range nodes {
				for range len(f.Replicas) { // each gets a turn
					wg.Go(func() {
						if err := n.reaches(dial); err != nil {
							t.Errorf("%s: %s, %s: %v", what, n.name, way, err)
						}
					})
				}
			}
		}
		wg.Wait()
	}
	all(balanced, f.nodes, "through the balancer")
	for i, dials := range direct {
		all(dials, f.nodes, fmt.Sprintf("through replica %d", i))
	}

	const victim = 0
	var others []*fleetNode
	for _, n := range f.nodes {
		if n.at.holder() != victim {
			others = append(others, n)
		}
	}
	f.running[victim].Kill()
	// The client of the reusable tunnel has to notice, and connects again by itself.
	until(t, "the reusable tunnel has moved", f.logs,
		func() bool { return others[0].reaches(balanced["reusable"]) == nil })
	all(balanced, others, "with a replica less, to nodes that others hold")
	known(1, 2)
	all(balanced, f.nodes, "with a replica less")

	f.start(&f.Replicas[victim].Member)
	known(victim)
	all(balanced, f.nodes, "with a new replica")
}
