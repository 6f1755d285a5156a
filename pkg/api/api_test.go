package api

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/internal/testkit/leaks"
	"tunnel.example/tunnel/pkg/admin"
	"tunnel.example/tunnel/pkg/inventory"
	"tunnel.example/tunnel/pkg/socket"
	"tunnel.example/tunnel/pkg/tunnel"
)

func TestMain(m *testing.M) { leaks.Main(m) }

// rig is a cloud with an inventory and sessions that no transport has.
type rig struct {
	dir   *tunnel.Directory
	nodes *inventory.Inventory
	cfg   Config
}

func newRig() *rig {
	nodes := inventory.New("", slog.New(slog.DiscardHandler))
	r := &rig{dir: &tunnel.Directory{Watcher: nodes}, nodes: nodes}
	r.cfg = Config{
		Mode: "cloud", Software: "v1.2.3", Replica: "cloud-0", Counters: new(tunnel.Counters),
		Checks: func() []admin.Check { return nil }, Sessions: r.dir.Sessions, Dialer: r.dir, Inventory: nodes,
		Log: slog.New(slog.DiscardHandler),
	}
	return r
}

// attach gives a node a session that has carried bytes.
func (r *rig) attach(node string) *tunnel.Session {
	s := &tunnel.Session{
		ID: "id-of-" + node, Node: tunnel.NodeName(node), Remote: "192.0.2.7:40000",
		Since: time.Now().Add(-time.Hour), Software: "v1.2.0",
	}
	s.RTT.Store(int64(12 * time.Millisecond))
	s.Conns.Store(3)
	s.Traffic.Send(1000)
	s.Traffic.Receive(500)
	s.CertificateEnds.Store(time.Now().Add(24 * time.Hour).Unix())
	r.dir.Attach(s)
	return s
}

// client serves the rig on a unix socket until the test ends.
func (r *rig) client(tb testing.TB) *Client {
	tb.Helper()
	path := filepath.Join(tb.TempDir(), "s")
	ln, err := socket.Listen(tb.Context(), path)
	if err != nil {
		tb.Fatal(err)
	}
	srv := &http.Server{Handler: New(r.cfg).Handler()}
	go srv.Serve(ln)
	tb.Cleanup(func() { srv.Close() })
	return NewClient(path)
}

// The list has connected nodes, nodes that were connected, and nodes that only Kubernetes knows.
func TestNodes(t *testing.T) {
	r := newRig()
	r.cfg.Expected = func() ([]tunnel.NodeName, bool) { return []tunnel.NodeName{"edge1", "never"}, true }
	r.attach("edge1")
	gone := r.attach("gone")
	why := "connection lost"
	gone.EndedBecause.Store(&why)
	r.dir.Detach(gone)
	r.nodes.Issued("gone", &x509.Certificate{SerialNumber: big.NewInt(255), NotAfter: time.Now().Add(48 * time.Hour)})
	list, err := r.client(t).Nodes(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if list.APIVersion != "v1" || len(list.Nodes) != 3 || list.Incomplete != nil {
		t.Fatalf("%+v", list)
	}
	here, away, never := list.Nodes[0], list.Nodes[1], list.Nodes[2]
	s := here.Newest()
	if here.Name != "edge1" || here.State != Connected || !here.Kubernetes || s.Replica != "cloud-0" ||
		s.RoundTripSeconds != 0.012 || s.Conns != 3 || s.SentBytes != 1000 || s.ReceivedBytes != 500 ||
		s.Software != "v1.2.0" || s.Remote != "192.0.2.7:40000" || s.CertificateEnds.IsZero() {
		t.Errorf("edge1 is %+v", here)
	}
	if away.Name != "gone" || away.State != Missing || away.Sessions != nil || away.LastEnd != why ||
		away.LastReplica != "cloud-0" || away.LastSeen.IsZero() || away.CertificatesIssued != 1 ||
		away.CertificateSerial != "ff" || away.Kubernetes {
		t.Errorf("gone is %+v", away)
	}
	if never.Name != "never" || never.State != Missing || !never.LastSeen.IsZero() || !never.Kubernetes {
		t.Errorf("never is %+v", never)
	}
}

// While Kubernetes has not answered, the list says that it is incomplete.
func TestIncomplete(t *testing.T) {
	r := newRig()
	r.cfg.Expected = func() ([]tunnel.NodeName, bool) { return nil, false }
	list, err := r.client(t).Nodes(t.Context())
	if err != nil || len(list.Incomplete) != 1 {
		t.Errorf("%+v, %v", list, err)
	}
}

// While nodes are about to come from the process before, neither the list nor a renewal claims to be complete.
func TestNodesThatCome(t *testing.T) {
	r := newRig()
	coming := 2
	r.cfg.Coming = func() int { return coming }
	client := r.client(t)
	for _, want := range []int{1, 0} {
		list, err := client.Nodes(t.Context())
		if err != nil || len(list.Incomplete) != want {
			t.Errorf("%d nodes come: %+v, %v", coming, list, err)
		}
		renewal := new(RenewAnswer)
		err = client.Call(t.Context(), http.MethodPost, "/v1/certificates/renew", RenewRequest{}, renewal)
		if err != nil || len(renewal.Incomplete) != want {
			t.Errorf("%d nodes come: %+v, %v", coming, renewal, err)
		}
		coming = 0
	}
}

// The lists of two replicas become one: sessions side by side, facts of the newest session, totals added.
func TestMerge(t *testing.T) {
	at := func(hour int) time.Time { return time.Date(2026, 1, 2, hour, 0, 0, 0, time.UTC) }
	a := &NodeList{Nodes: []Node{
		{
			Name: "both", State: Connected, Sessions: []Session{{Replica: "a", Since: at(1)}},
			FirstSeen: at(1), LastSeen: at(9), FactsAt: at(8), LastReplica: "a", LastEnd: "old", SessionsTotal: 2,
			CertificatesIssued:  1,
			CertificateIssuedAt: at(3), CertificateSerial: "a1", CertificateEnds: at(20),
		},
		{Name: "relayed", State: Missing, LastSeen: at(4), FactsAt: at(4), LastReplica: "a", LastRemote: "here"},
		{
			Name: "moved", State: Missing, FirstSeen: at(2), LastSeen: at(9), FactsAt: at(3), LastReplica: "a", LastEnd: "gone",
			Kubernetes: true,
		},
	}}
	b := &NodeList{Nodes: []Node{
		{
			Name: "both", State: Connected, Sessions: []Session{{Replica: "b", Since: at(2)}},
			FirstSeen: at(2), LastSeen: at(8), FactsAt: at(7), LastReplica: "b", SessionsTotal: 3, CertificatesIssued: 1,
			CertificateIssuedAt: at(4), CertificateSerial: "b1", CertificateEnds: at(21),
		},
		{
			Name: "moved", State: Connected, Sessions: []Session{{Replica: "b", Since: at(5)}},
			FirstSeen: at(5), LastSeen: at(9), FactsAt: at(5), LastReplica: "b",
		},
		{Name: "only-b", State: Missing},
		{Name: "relayed", State: Missing, LastSeen: at(5), Flapping: true},
	}}
	nodes := make(map[tunnel.NodeName]*Node)
	merge(nodes, a)
	merge(nodes, b)
	for _, want := range []Node{
		{
			Name: "both", State: Connected,
			Sessions:  []Session{{Replica: "b", Since: at(2)}, {Replica: "a", Since: at(1)}},
			FirstSeen: at(1), LastSeen: at(9), FactsAt: at(8), LastReplica: "a", LastEnd: "old", SessionsTotal: 5,
			CertificatesIssued:  2,
			CertificateIssuedAt: at(4), CertificateSerial: "b1", CertificateEnds: at(21),
		},
		{
			Name: "moved", State: Connected, Sessions: []Session{{Replica: "b", Since: at(5)}},
			FirstSeen: at(2), LastSeen: at(9), FactsAt: at(5), LastReplica: "b", LastEnd: "gone", Kubernetes: true,
		},
		{Name: "only-b", State: Missing},
		{
			Name: "relayed", State: Missing, LastSeen: at(5), FactsAt: at(4), LastReplica: "a", LastRemote: "here",
			Flapping: true,
		},
	} {
		if got := nodes[tunnel.NodeName(want.Name)]; got == nil || !reflect.DeepEqual(*got, want) {
			t.Errorf("%s is\n%+v; want\n%+v", want.Name, got, want)
		}
	}
	if len(nodes) != 4 {
		t.Errorf("%d nodes", len(nodes))
	}
}

// The status has the checks with their states, and what this process counts.
func TestStatus(t *testing.T) {
	r := newRig()
	r.cfg.Checks = func() []admin.Check {
		return []admin.Check{
			{Name: "good", Status: func() string { return "fine" }},
			{Name: "worn", Note: func() string { return "look here" }},
			{Name: "bad", Ready: func() error { return errors.New("line one\nline two") }},
		}
	}
	r.cfg.Counters.Refuse(tunnel.Denied)
	r.cfg.Refusals = new(tunnel.Refusals)
	r.cfg.Refusals.Record(tunnel.Event{Kind: tunnel.EventTCP, Result: "denied", Err: "not allowed"})
	r.attach("edge1")
	got, err := r.client(t).Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	want := []Check{{"good", "ok", "fine"}, {"worn", "degraded", "look here"}, {"bad", "failed", "line one; line two"}}
	if got.Ready || !reflect.DeepEqual(got.Checks, want) {
		t.Errorf("ready %t, checks %+v", got.Ready, got.Checks)
	}
	if c := got.Counts; c.Nodes != 1 || c.Remembered != 1 || c.Conns != 3 || c.Refused["denied"] != 1 {
		t.Errorf("counts %+v", c)
	}
	if len(got.Refusals) != 1 || got.Refusals[0].Err != "not allowed" {
		t.Errorf("refusals %+v", got.Refusals)
	}
}

// Without other replicas, the list of statuses is the status of this one.
func TestStatuses(t *testing.T) {
	for _, mode := range []string{"cloud", "edge"} {
		r := newRig()
		r.cfg.Mode = mode
		list, err := r.client(t).Statuses(t.Context())
		if err != nil || len(list.Statuses) != 1 || list.Statuses[0].Mode != mode || list.APIVersion != Version ||
			list.Incomplete != nil {
			t.Errorf("%+v, %v", list, err)
		}
	}
}

// An edge has a status, and no nodes.
func TestEdge(t *testing.T) {
	r := newRig()
	r.cfg.Mode, r.cfg.Inventory = "edge", nil
	s := &tunnel.Session{Remote: "cloud:9000", Instance: "of-the-cloud"}
	r.cfg.Sessions = func() []*tunnel.Session { return []*tunnel.Session{s} }
	c := r.client(t)
	status, err := c.Status(t.Context())
	if err != nil || len(status.Sessions) != 1 || status.Sessions[0].Replica != "of-the-cloud" ||
		status.Counts.Nodes != 0 {
		t.Errorf("%+v, %v", status, err)
	}
	if _, err = c.Nodes(t.Context()); err == nil || !strings.Contains(err.Error(), "ask the cloud") {
		t.Errorf("an edge lists nodes: %v", err)
	}
}

// A refusal comes back with its code. A ping of an old edge answers with the last heartbeat.
func TestPing(t *testing.T) {
	r := newRig()
	c := r.client(t)
	var failed *Failure
	if _, err := c.Ping(t.Context(), "away", ""); !errors.As(err, &failed) || failed.Code != "no-such-node" {
		t.Errorf("a node that is away: %v", err)
	}
	for _, bad := range [][2]string{{"UPPER", ""}, {"edge1", "no-port"}} {
		if _, err := c.Ping(t.Context(), bad[0], bad[1]); !errors.As(err, &failed) || failed.Code != "" {
			t.Errorf("%q: %v", bad, err)
		}
	}
	s := r.attach("edge1")
	s.Dialer = refuses{tunnel.Refusef(tunnel.Internal, "node edge1 runs no module %q", "ping")}
	if got, err := c.Ping(t.Context(), "edge1", ""); err != nil || !got.Old || got.HeartbeatSeconds != 0.012 {
		t.Errorf("an old edge: %+v, %v", got, err)
	}
}

// refuses is a dialer that refuses.
type refuses struct{ err error }

func (r refuses) Dial(context.Context, tunnel.Request) (net.Conn, error) { return nil, r.err }

// A missing node can be forgotten, a connected one cannot.
func TestForget(t *testing.T) {
	r := newRig()
	c := r.client(t)
	s := r.attach("edge1")
	var failed *Failure
	if _, err := c.Forget(t.Context(), "edge1"); !errors.As(err, &failed) {
		t.Errorf("a connected node: %v", err)
	}
	r.dir.Detach(s)
	for _, want := range []bool{true, false} {
		if had, err := c.Forget(t.Context(), "edge1"); err != nil || had != want {
			t.Errorf("%t, %v; want %t", had, err, want)
		}
	}
}

// What another replica sends is answered by this replica alone, and there is no way from there to a node.
func TestInside(t *testing.T) {
	r := newRig()
	r.attach("edge1")
	s := New(r.cfg)
	running := testkit.Run(t, s.Run)
	var list NodeList
	err := call(t.Context(), clientOf(s.Dial), http.MethodGet, "/v1/nodes", nil, &list)
	if err != nil || len(list.Nodes) != 1 {
		t.Errorf("%+v, %v", list, err)
	}
	if err := call(t.Context(), clientOf(s.Dial), http.MethodPost, "/v1/ping?node=edge1", nil, new(Pinged)); err == nil {
		t.Error("another replica may ping through this one")
	}
	running.Stop()
	if _, err := s.Dial(t.Context()); err == nil {
		t.Error("a stopped server accepts a conn")
	}
}

// A socket that nobody serves, and one of an older process, lead to errors that say so.
func TestClientErrors(t *testing.T) {
	if _, err := NewClient(filepath.Join(t.TempDir(), "none")).Status(t.Context()); err == nil ||
		!strings.Contains(err.Error(), "is it running") || !NotRunning(err) {
		t.Errorf("no socket: %v", err)
	}
	path := filepath.Join(t.TempDir(), "s")
	ln, err := socket.Listen(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := NewClient(path).Status(ctx); err == nil || NotRunning(err) ||
		!strings.HasPrefix(err.Error(), "the process does not answer on "+path) {
		t.Errorf("a process that hangs: %v", err)
	}
	srv := &http.Server{Handler: http.NotFoundHandler()}
	go srv.Serve(ln)
	defer srv.Close()
	if _, err := NewClient(path).Status(t.Context()); err == nil || !strings.Contains(err.Error(), "older") ||
		NotRunning(err) {
		t.Errorf("an older process: %v", err)
	}
}

// BenchmarkNodes asks for 10,000 nodes over a unix socket: the cloud's part of `tunnel ls` and the decoding.
func BenchmarkNodes(b *testing.B) {
	r := newRig()
	for n := range 10_000 {
		s := r.attach(fmt.Sprintf("edge-%05d.site-%03d.example.com", n, n%100))
		if n%10 == 0 {
			r.dir.Detach(s)
		}
	}
	c := r.client(b)
	for b.Loop() {
		list, err := c.Nodes(b.Context())
		if err != nil || len(list.Nodes) != 10_000 {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Milliseconds())/float64(b.N), "ms/list")
}

// A replica adopts what another one remembers of missing nodes, and nothing else. The older memory gives way.
func TestAdopt(t *testing.T) {
	r := newRig()
	at := time.Now().Add(-time.Hour).UTC()
	r.attach("here")
	late := r.attach("late")
	r.dir.Detach(late)
	New(r.cfg).adopt(&NodeList{Nodes: []Node{
		{
			Name: "gone", State: Missing, FirstSeen: at.Add(-time.Hour), LastSeen: at, FactsAt: at, LastReplica: "cloud-1",
			LastRemote: "there", LastSoftware: "v1.0.0", LastEnd: "connection lost", SessionsTotal: 7, CertificatesIssued: 7,
			LastServices: true, CertificateEnds: at,
		},
		{Name: "here", State: Missing, LastSeen: at},
		{Name: "late", State: Missing, LastSeen: at, LastEnd: "old"},
		{Name: "connected", State: Connected, LastSeen: at},
		{Name: "in-kubernetes", State: Missing, Kubernetes: true},
		{Name: "NO NAME", State: Missing, LastSeen: at},
	}})
	list, err := r.client(t).Nodes(t.Context())
	if err != nil || len(list.Nodes) != 3 {
		t.Fatalf("%+v, %v", list, err)
	}
	want := Node{
		Name: "gone", State: Missing, FirstSeen: at.Add(-time.Hour), LastSeen: at, FactsAt: at, LastReplica: "cloud-1",
		LastRemote: "there", LastSoftware: "v1.0.0", LastEnd: "connection lost", LastServices: true, CertificateEnds: at,
	}
	if got := list.Nodes[0]; !reflect.DeepEqual(got, want) {
		t.Errorf("gone is\n%+v; want\n%+v", got, want)
	}
	if n := list.Nodes[1]; n.Name != "here" || n.State != Connected {
		t.Errorf("here is %+v", n)
	}
	if n := list.Nodes[2]; n.Name != "late" || n.LastEnd != "" || n.LastReplica != "cloud-0" {
		t.Errorf("late is %+v", n)
	}
}
