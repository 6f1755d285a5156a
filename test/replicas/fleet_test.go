package replicas

import (
	"fmt"
	"maps"
	"strings"
	"sync"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/test/rig"
)

// size says what a fleet is made of.
type size struct {
	replicas []rig.Host
	edges    int
	at       rig.Host // where the edges are, and the balancer before their grpcports
	all      bool     // edges keep a session with every replica
	sockets  string   // folder of the admin sockets, by the names of replicas and edges; "": they have none
	udp      string   // target of a UDP port of every replica, whose number is that of its grpcport; "": none
}

// local returns so many replicas on our own loopback.
func local(replicas int) []rig.Host { return make([]rig.Host, replicas) }

// fleet is replicas and edges, with the targets and a balancer.
type fleet struct {
	*rig.Fleet
	t        *testing.T
	nodes    []string
	edges    []*rig.Member
	ports    []*joinPort // where each edge dials
	balancer *balancer
	https    bool // there is an HTTPS front door

	mu      sync.Mutex // guards the following
	running map[*rig.Member]*rig.Process
}

// newFleet starts a fleet and waits until each node can be reached through each
// replica. At the end of the test it checks that no process has ended by itself,
// panicked or told a token.
func newFleet(t *testing.T, s size) *fleet {
	t.Helper()
	ca, err := rig.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	f := &fleet{t: t, running: make(map[*rig.Member]*rig.Process), https: s.at.Network == nil}
	for i := range s.edges {
		f.nodes = append(f.nodes, fmt.Sprintf("edge%d", i))
	}
	cfg := rig.FleetConfig{Binary: program, Dir: t.TempDir(), CA: ca, Hosts: s.replicas, Nodes: f.nodes,
		Doors: make(map[string]string)}
	if f.https {
		cfg.HTTPS = newTLSTarget(t, ca, f.nodes)
	}
	var behind []*targets
	for _, n := range f.nodes {
		s := newTargets(t, s.at.Network, n)
		behind = append(behind, s)
		maps.Copy(cfg.Doors, s.doors(n))
	}
	if s.udp != "" {
		cfg.Cloud = fmt.Sprintf("[mode.cloud.udp]\n\"{{.IP}}:{{.GRPC}}\" = \"%s/%s\"\n", f.nodes[0], s.udp)
	}
	if s.sockets != "" {
		cfg.Cloud += fmt.Sprintf("[mode.cloud.admin]\nsocket = \"%s/{{.Name}}\"\n", s.sockets)
	}
	if f.Fleet, err = rig.NewFleet(cfg); err != nil {
		t.Fatal(err)
	}
	f.balancer = newBalancer(t, f.Replicas, s.at.Network)
	shared := f.balancer.joinPort(false)
	for i, n := range f.nodes {
		port := shared
		if !s.all {
			port = f.balancer.joinPort(true) // which tells the holder
		}
		f.ports = append(f.ports, port)
		allow := []string{behind[i].http, behind[i].echo, behind[i].pour}
		if f.https {
			allow = append(allow, cfg.HTTPS)
		}
		if s.udp != "" {
			allow = append(allow, s.udp)
		}
		more := ""
		if s.sockets != "" {
			more = fmt.Sprintf("[mode.edge.admin]\nsocket = \"%s/%s\"\n", s.sockets, n)
		}
		e, err := f.Edge(rig.EdgeConfig{Node: n, Host: s.at, Cloud: port.addr, All: s.all, Allow: allow, More: more})
		if err != nil {
			t.Fatal(err)
		}
		f.edges = append(f.edges, e)
	}
	t.Cleanup(f.end)
	for _, r := range f.Replicas {
		f.start(&r.Member)
	}
	f.joinedWithin(time.Minute, len(f.Replicas)-1)
	testkit.Within(t, time.Minute, "the balancer knows all replicas", func() error {
		if n := len(f.balancer.order()); n < len(f.Replicas) {
			return fmt.Errorf("it knows %d", n)
		}
		return nil
	})
	for _, e := range f.edges {
		f.start(e)
	}
	f.reachable(time.Minute)
	return f
}

// end ends the processes and looks at what they have left.
func (f *fleet) end() {
	members := f.edges
	for _, r := range f.Replicas {
		members = append(members, &r.Member)
	}
	for _, m := range members {
		if p := f.process(m); p != nil {
			if !p.Alive() {
				f.t.Errorf("%s has ended by itself, with exit code %d", m.Name, p.ExitCode())
			}
			f.kill(m)
		}
		if log := m.Log.String(); strings.Contains(log, "panic") {
			f.t.Errorf("%s has panicked:\n%s", m.Name, tail(log, 60))
		}
		if m.Leaks() {
			f.t.Errorf("a token shows in the log of %s", m.Name)
		}
	}
	if f.t.Failed() {
		for _, r := range f.Replicas {
			f.t.Logf("log of %s, its end:\n%s", r.Name, tail(r.Log.String(), 40))
		}
		f.t.Logf("log of %s, its end:\n%s", f.edges[0].Name, tail(f.edges[0].Log.String(), 20))
	}
}

// tail returns the last lines of a log.
func tail(log string, lines int) string {
	all := strings.Split(log, "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

func (f *fleet) start(m *rig.Member) {
	f.t.Helper()
	p, err := m.Start()
	if err != nil {
		f.t.Fatal(err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.running[m] = p
}

// process returns the process of a member, nil when it is not meant to run.
func (f *fleet) process(m *rig.Member) *rig.Process {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.running[m]
}

// kill is kill -9.
func (f *fleet) kill(m *rig.Member) {
	p := f.process(m)
	p.Kill()
	f.forget(m)
}

// forget says that a process has ended as it should.
func (f *fleet) forget(m *rig.Member) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.running, m)
}

// joined waits until each replica that runs is ready and so many others have joined it.
func (f *fleet) joined(others int) time.Duration {
	f.t.Helper()
	return f.joinedWithin(healWithin, others)
}

func (f *fleet) joinedWithin(limit time.Duration, others int) time.Duration {
	f.t.Helper()
	return testkit.Within(f.t, limit, "the replicas have joined each other", func() error {
		for _, r := range f.Replicas {
			if f.process(&r.Member) == nil {
				continue
			}
			if err := rig.Ready(r.Health()); err != nil {
				return fmt.Errorf("%s: %w", r.Name, err)
			}
			if n, err := metric(r, "tunnel_replicas"); err != nil || int(n) != others {
				return fmt.Errorf("%s: %v replicas (%w)", r.Name, n, err)
			}
		}
		return nil
	})
}

// reachable waits until each node can be reached through each replica that runs.
func (f *fleet) reachable(limit time.Duration) time.Duration {
	f.t.Helper()
	started := time.Now()
	for i, r := range f.Replicas {
		if f.process(&r.Member) == nil {
			continue
		}
		for n := range f.nodes {
			left := max(poll, limit-time.Since(started))
			testkit.Within(f.t, left, f.nodes[n]+" is reached through "+r.Name, func() error {
				return f.do(f.t.Context(), request{node: n, replica: i})
			})
		}
	}
	return time.Since(started)
}

// sessionsWithin is how long it may take until there are as many sessions as there
// should be: an edge that wants one with every replica tries until the balancer has led
// it to each.
const sessionsWithin = time.Minute

// sessions waits until the replicas that run have so many sessions together.
func (f *fleet) sessions(want int) time.Duration {
	f.t.Helper()
	return testkit.Within(f.t, sessionsWithin, fmt.Sprint(want, " sessions in all"), func() error {
		sum := 0
		for _, r := range f.Replicas {
			if f.process(&r.Member) == nil {
				continue
			}
			n, err := metric(r, "tunnel_sessions")
			if err != nil {
				return err
			}
			sum += int(n)
		}
		if sum != want {
			return fmt.Errorf("there are %d", sum)
		}
		return nil
	})
}

// held returns which nodes a replica holds.
func (f *fleet) held(replica int) (nodes []int) {
	for n, p := range f.ports {
		if p.holder() == replica {
			nodes = append(nodes, n)
		}
	}
	return nodes
}

// fullest returns the replica that holds most nodes.
func (f *fleet) fullest() (replica int) {
	for i := range f.Replicas {
		if len(f.held(i)) > len(f.held(replica)) {
			replica = i
		}
	}
	return replica
}

// metric returns one metric of a replica.
func metric(r *rig.Replica, name string) (float64, error) {
	values, err := rig.Metrics(r.Health())
	if err != nil {
		return 0, err
	}
	v, ok := values[name]
	if !ok {
		return 0, fmt.Errorf("%s has no metric %s", r.Name, name)
	}
	return v, nil
}
