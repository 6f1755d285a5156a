package vanish

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/internal/testkit/testca"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/test/rig"
)

// way is how a conn gets from its caller to its target.
type way struct {
	name        string
	connections int    // of the edge; 0 is the default
	counter     string // a metric of the first replica, which counts the conns that go this way; "": all do
	replicas    int    // callers ask the first; the edge has its session with the last
	egress      bool   // by HTTP CONNECT over TLS
	reach       bool   // to a Service that an edge serves, and by the cloud to another edge
}

func ways() []way {
	return []way{
		{name: "data connection", connections: 64, counter: "tunnel_conns_by_data_connection_total", replicas: 1},
		{name: "stream", connections: 1, replicas: 1},
		{name: "relayed", replicas: 2},
		{name: "egress", replicas: 1, egress: true},
		{name: "reach", counter: `tunnel_door_callers_total{door="services",result="ok"}`, replicas: 1, reach: true},
	}
}

// end is which end of each conn vanishes.
type end string

const (
	callers end = "caller"
	targets end = "target"
)

const (
	door = "door"
	node = "edge1"
	// takes bounds what happens at once on a machine that is not busy.
	takes = 20 * time.Second
)

// member is a replica or the edge.
type member struct {
	*rig.Member
	process *rig.Process
}

// tunnel is a cloud and an edge, inside. With reach there is another edge, far.
type tunnel struct {
	*networks
	way  way
	gone end

	members []member // the replicas, then the edges
	ln      net.Listener
	door    string      // address
	tls     *tls.Config // of callers; nil: plain TCP
}

// newTunnel starts cloud and edge. The ends named gone will be outside.
func newTunnel(t *testing.T, w way, gone end) *tunnel {
	t.Helper()
	n := newNetworks(t)
	tn := &tunnel{networks: n, way: w, gone: gone}
	target, targetIP := n.inside, insideIP
	if w.reach {
		tn.addFar()
		target, targetIP = n.far, farIP
	}
	if gone == targets {
		target, targetIP = n.outside, outsideIP
	}
	var err error
	if tn.ln, err = target.Listen(targetIP + ":0"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tn.ln.Close() })

	ca, err := rig.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	dir, more := t.TempDir(), ""
	if w.egress {
		more = tn.egress(dir)
	}
	binary, nodes, doors := program, []string{node}, map[string]string{door: node + "/" + tn.ln.Addr().String()}
	serving, calling := node, farNode // with reach: the edges at the target and at the caller
	if w.reach {
		if gone == callers {
			serving, calling = farNode, node
		}
		nodes, doors, more = append(nodes, farNode), nil, "[mode.cloud.services]\n"
		binary = tn.addCluster(dir, targetIP, tn.ln.Addr().(*net.TCPAddr).Port, serving)
		tn.door = net.JoinHostPort(clusterIP, strconv.Itoa(servicePort))
	}
	host := rig.Host{IP: insideIP, Network: n.inside}
	var hosts []rig.Host
	for range w.replicas {
		hosts = append(hosts, host)
	}
	fleet, err := rig.NewFleet(rig.FleetConfig{
		Binary: binary, Dir: dir, CA: ca, Hosts: hosts, Nodes: nodes, Doors: doors, Cloud: more,
	})
	if err != nil {
		t.Fatal(err)
	}
	if tn.door == "" {
		tn.door = fleet.Replicas[0].Door(door)
	}
	for _, r := range fleet.Replicas {
		tn.start(&r.Member)
	}
	holder := fleet.Replicas[w.replicas-1]
	for i, network := range []*rig.Network{n.inside, n.far}[:len(nodes)] {
		cfg := rig.EdgeConfig{
			Node: nodes[i], Host: rig.Host{Network: network}, Cloud: holder.GRPC(), Connections: w.connections,
			Allow: []string{"10.9.0.0/23:*"},
		}
		if w.reach {
			cfg.More = servesServices(dir, cfg.Node)
		}
		edge, err := fleet.Edge(cfg)
		if err != nil {
			t.Fatal(err)
		}
		tn.start(edge)
	}
	if w.reach {
		tn.awaitRules(calling)
	}
	if w.replicas > 1 {
		tn.awaitRelay()
	}
	return tn
}

// awaitRelay waits until the first replica has heard that another one holds the node.
func (tn *tunnel) awaitRelay() {
	tn.t.Helper()
	err := testkit.Poll(takes, func() error {
		raw, err := tn.inside.Dial(tn.t.Context(), "tcp", tn.door)
		if err != nil {
			return err
		}
		defer raw.Close()
		tn.ln.(*net.TCPListener).SetDeadline(time.Now().Add(time.Second))
		accepted, err := tn.ln.Accept()
		if err == nil {
			accepted.Close()
		}
		return err
	})
	if err != nil {
		tn.t.Fatalf("the replicas do not relay: %v", err)
	}
}

// egress writes the certificates of the egress front door, and returns its table.
func (tn *tunnel) egress(dir string) string {
	tn.t.Helper()
	ca, err := rig.NewCA() // of callers; edges have another
	if err != nil {
		tn.t.Fatal(err)
	}
	pair := testca.CA{CA: ca}.Pair(tn.t, auth.Leaf{CommonName: "kube-apiserver", Client: true})
	if err = os.WriteFile(filepath.Join(dir, "callers.crt"), ca.CertPEM(), 0o600); err != nil {
		tn.t.Fatal(err)
	}
	port := testkit.FreePort(tn.t)
	tn.door = fmt.Sprintf("%s:%d", insideIP, port)
	// the test is about callers
	tn.tls = &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{pair}, InsecureSkipVerify: true}
	return fmt.Sprintf(`[mode.cloud.egress]
httpconnect = ["tls://%s"]
cert = "{{.Name}}.crt"
key = "{{.Name}}.key"
clientca = "callers.crt"
clientnames = ["kube-apiserver"]
strategies = ["default"]
`, tn.door)
}

// start starts a replica or the edge, and waits until it is ready.
func (tn *tunnel) start(m *rig.Member) {
	tn.t.Helper()
	p, err := m.Start()
	if err != nil {
		tn.t.Fatal(err)
	}
	tn.members = append(tn.members, member{m, p})
	tn.t.Cleanup(func() {
		if !p.Alive() {
			tn.t.Errorf("%s has ended by itself", m.Name)
		}
		p.Kill()
		if strings.Contains(m.Log.String(), "panic") {
			tn.t.Errorf("%s has panicked", m.Name)
		}
		if tn.t.Failed() {
			log := m.Log.String()
			tn.t.Logf("log of %s, its end:\n%s", m.Name, log[max(0, len(log)-4<<10):])
		}
	})
	if err := testkit.Poll(takes, m.Ready); err != nil {
		tn.t.Fatalf("%s is not ready: %v", m.Name, err)
	}
}

// conn is what both a TCP and a TLS connection can do.
type conn interface {
	net.Conn
	CloseWrite() error
}

// pair is the two ends of a conn.
type pair struct{ gone, seen conn }

// reset ends a connection at once. Its peer gets a reset if the link is up.
func reset(c conn) {
	socket := socketOf(c)
	socket.SetLinger(0)
	socket.Close()
}

func socketOf(c conn) *net.TCPConn {
	if c, ok := c.(*tls.Conn); ok {
		return c.NetConn().(*net.TCPConn)
	}
	return c.(*net.TCPConn)
}

// open opens a conn, which goes the tunnel's way.
func (tn *tunnel) open() pair {
	tn.t.Helper()
	for late := time.Now().Add(takes); ; time.Sleep(50 * time.Millisecond) {
		before := tn.counted()
		p, err := tn.dial()
		if err == nil && (tn.way.counter == "" || tn.counted() > before) {
			return p
		}
		if err == nil {
			// For example, no data connection was ready. The edge opens one when the cloud asks.
			reset(p.gone)
			reset(p.seen)
			err = fmt.Errorf("it goes another way: %s does not count it", tn.way.counter)
		}
		if time.Now().After(late) {
			tn.t.Fatalf("opening a conn: %v", err)
		}
	}
}

// counted returns how many conns have gone this way.
func (tn *tunnel) counted() float64 {
	tn.t.Helper()
	var values map[string]float64
	testkit.Within(tn.t, time.Minute, "the cloud tells its metrics", func() (err error) {
		values, err = tn.members[0].Metrics()
		return err
	})
	return values[tn.way.counter]
}

// dial opens a conn and sees that bytes pass both ways.
func (tn *tunnel) dial() (p pair, err error) {
	tn.t.Helper()
	from := tn.inside
	if tn.way.reach {
		from = tn.far
	}
	if tn.gone == callers {
		from = tn.outside
	}
	ctx, cancel := context.WithTimeout(context.Background(), takes)
	defer cancel()
	raw, err := from.Dial(ctx, "tcp", tn.door)
	if err != nil {
		return p, err
	}
	raw.SetDeadline(time.Now().Add(takes))
	caller := raw.(conn)
	if tn.tls != nil {
		if caller, err = tn.connect(raw); err != nil {
			raw.Close()
			return p, err
		}
	}
	if _, err = caller.Write([]byte("?")); err != nil {
		raw.Close()
		return p, err
	}
	tn.ln.(*net.TCPListener).SetDeadline(time.Now().Add(takes))
	one := make([]byte, 1)
	var target conn
	for { // a conn of awaitRelay, which has given up, may come before ours
		accepted, err := tn.ln.Accept()
		if err != nil {
			raw.Close()
			return p, err
		}
		target = accepted.(conn)
		target.SetDeadline(time.Now().Add(takes))
		if _, err = target.Read(one); err == nil {
			break
		}
		target.Close()
	}
	if _, err = target.Write([]byte("!")); err == nil {
		_, err = caller.Read(one)
	}
	if err != nil {
		reset(caller)
		reset(target)
		return p, err
	}
	caller.SetDeadline(time.Time{})
	target.SetDeadline(time.Time{})
	if tn.gone == callers {
		return pair{gone: caller, seen: target}, nil
	}
	return pair{gone: target, seen: caller}, nil
}

// connect asks the egress front door for the target.
func (tn *tunnel) connect(raw net.Conn) (conn, error) {
	c := tls.Client(raw, tn.tls)
	if _, err := fmt.Fprintf(c, "CONNECT %[1]s HTTP/1.1\r\nHost: %[1]s\r\n\r\n", tn.ln.Addr()); err != nil {
		return nil, err
	}
	// The target says nothing before the caller does, so nothing behind the answer is lost.
	resp, err := http.ReadResponse(bufio.NewReader(c), &http.Request{Method: http.MethodConnect})
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("CONNECT: %s", resp.Status)
	}
	return c, nil
}

// weight is what a process holds that it must give back.
type weight struct{ conns, goroutines, descriptors float64 }

func (m member) weigh() (w weight, err error) {
	values, err := m.Metrics()
	if err != nil {
		return w, err
	}
	descriptors, err := m.process.Descriptors()
	// An idle data connection waits for the next conn. It is a descriptor, and a goroutine at the edge.
	data := values["tunnel_data_connections"]
	w = weight{conns: values["tunnel_conns"], goroutines: values["go_goroutines"],
		descriptors: float64(descriptors) - data}
	if m.Name == node || m.Name == farNode {
		w.goroutines -= data
	}
	if err == nil && w.goroutines <= 0 {
		err = errors.New("the Go collector is not registered")
	}
	return w, err
}

// baseline returns the most that each member holds when there are no conns.
func (tn *tunnel) baseline() map[string]weight {
	tn.t.Helper()
	most := make(map[string]weight)
	for until := time.Now().Add(2 * time.Second); time.Now().Before(until); time.Sleep(50 * time.Millisecond) {
		for _, m := range tn.members {
			w, err := m.weigh()
			if err != nil {
				tn.t.Fatal(err)
			}
			most[m.Name] = weight{0, max(w.goroutines, most[m.Name].goroutines), max(w.descriptors, most[m.Name].descriptors)}
		}
	}
	return most
}

// back returns nil when no member holds more than base.
func (tn *tunnel) back(base map[string]weight) error {
	var errs []error
	for _, m := range tn.members {
		w, err := m.weigh()
		b := base[m.Name]
		if err == nil && (w.conns > b.conns || w.goroutines > b.goroutines || w.descriptors > b.descriptors) {
			err = fmt.Errorf("%s holds %+v, before %+v", m.Name, w, b)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
