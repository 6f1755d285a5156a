package relay

import (
	"bytes"
	"compress/flate"
	"context"
	"errors"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/services"
	pb "tunnel.example/tunnel/pkg/services/servicesv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// fake is a kernel that notes what it is told. Its only own address is loopback.
type fake struct {
	mu       sync.Mutex // guards the following
	table    rules      // nil: there is no table
	proxy    error      // what refused answers
	programs int        // calls of program
	changes  int        // calls of change
	removals int        // calls of removeLeft
	replaced bool       // another process has replaced the table
	broken   error      // what open answers
	to       netip.AddrPort
	sentTo   map[netip.AddrPort]netip.AddrPort // where callers of UDP have sent to
	forgot   []address                         // what forget was told, without those that leave
}

func (f *fake) open() ([]netip.Addr, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return []netip.Addr{netip.MustParseAddr("127.0.0.1")}, f.broken
}

func (f *fake) refused() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.proxy
}

func (f *fake) removeLeft(*slog.Logger) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.removals++
}

func (f *fake) program(_ []netip.AddrPort, all rules) error {
	f.mu.Lock()
	f.programs++
	f.table = make(rules)
	f.mu.Unlock()
	return f.write(nil, all)
}

func (f *fake) change(before, after rules) error {
	f.mu.Lock()
	f.changes++
	f.mu.Unlock()
	return f.write(before, after)
}

func (f *fake) write(before, after rules) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.table == nil {
		return errors.New("there is no table")
	}
	for at := range before {
		delete(f.table, at)
	}
	maps.Copy(f.table, after)
	return nil
}

func (f *fake) clear() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	maps.DeleteFunc(f.table, func(at address, one rule) bool { return at.isPort() && one.relayed() })
	return nil
}

func (f *fake) route(_, _ rules) error { return nil }

func (f *fake) forget(_, after rules) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, at := range after.sorted() {
		if at.protocol == protocolUDP {
			f.forgot = append(f.forgot, at)
		}
	}
	return nil
}

func (f *fake) destination(caller, _ netip.AddrPort) (netip.AddrPort, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if to, ok := f.sentTo[caller]; ok {
		return to, nil
	}
	return netip.AddrPort{}, errUntracked
}

func (f *fake) intact() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.table != nil && !f.replaced
}

func (f *fake) remove() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.table = nil
	return nil
}

func (f *fake) original(net.Conn) (netip.AddrPort, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.to, nil
}

// redirected returns what the kernel redirects, by whatever protocol.
func (f *fake) redirected() (all []netip.AddrPort) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, at := range f.table.sorted() {
		if at.isPort() {
			all = append(all, at.AddrPort)
		}
	}
	return slices.Compact(all)
}

// cloud is what an edge sees of a cloud.
type cloud struct {
	batches chan *pb.Batch // the test sends; never closed
	nexts   chan *pb.Next  // the edge sends; never closed
	failed  chan error     // ends a stream; never closed

	mu      sync.Mutex // guards the following
	reached []string   // the targets that were asked for
	reach   func(target string) (net.Conn, error)
}

func newCloud() *cloud {
	return &cloud{batches: make(chan *pb.Batch), nexts: make(chan *pb.Next, 100), failed: make(chan error)}
}

// stream implements Stream.
type stream struct {
	*cloud
	ctx context.Context
}

func (s stream) Send(n *pb.Next) error {
	s.nexts <- n
	return nil
}

func (s stream) Recv() (*pb.Batch, error) {
	select {
	case b := <-s.batches:
		return b, nil
	case err := <-s.failed:
		return nil, err
	case <-s.ctx.Done():
		return nil, s.ctx.Err()
	}
}

func (c *cloud) watch(ctx context.Context) (Stream, error) { return stream{c, ctx}, nil }

// Reach implements Config.Reach.
func (c *cloud) Reach(_ context.Context, target string) (net.Conn, error) {
	c.mu.Lock()
	c.reached = append(c.reached, target)
	reach := c.reach
	c.mu.Unlock()
	return reach(target)
}

func (c *cloud) targets() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.reached)
}

// batch returns changes as they travel.
func batch(t testing.TB, more bool, changes *pb.Changes) *pb.Batch {
	t.Helper()
	data, err := proto.Marshal(changes)
	if err != nil {
		t.Fatal(err)
	}
	return &pb.Batch{Changes: deflate(t, data), Deflated: true, More: more}
}

func deflate(t testing.TB, data []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	w, err := flate.NewWriter(&b, flate.BestSpeed)
	if err == nil {
		_, err = w.Write(data)
	}
	if err = errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func item(t testing.TB, p services.Path, v proto.Message) *pb.Item {
	t.Helper()
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return &pb.Item{Path: p, Value: b}
}

// The Service of the tests, with endpoints on edge2 and edge3. This node is edge1.
var (
	web4  = netip.MustParseAddrPort("10.96.0.10:80")
	web6  = netip.MustParseAddrPort("[fd00:96::10]:80")
	both  = []netip.AddrPort{web4, web6}
	web   = services.ServicePath("shop", "web")
	far4  = services.EndpointPath("shop", "web", "web-a", "10.88.2.5")
	far6  = services.EndpointPath("shop", "web", "web-b", "fd00:88:2::5")
	other = services.EndpointPath("shop", "web", "web-a", "10.88.3.5")
)

func webService() *services.Service {
	return &services.Service{ClusterIps: []string{"10.96.0.10", "fd00:96::10"},
		Ports: []*services.Port{{Name: "http", Protocol: "TCP", Port: 80}, {Name: "dns", Protocol: "UDP", Port: 53}}}
}

func endpoint(addr, node string) *services.Endpoint {
	return &services.Endpoint{Address: addr, Node: node, Ready: true, Serving: true,
		Ports: []*services.Port{{Name: "http", Protocol: "TCP", Port: 8080}}}
}

func shop(t testing.TB) *pb.Changes {
	return &pb.Changes{Set: []*pb.Item{
		item(t, web, webService()),
		item(t, far4, endpoint("10.88.2.5", "edge2")),
		item(t, far6, endpoint("fd00:88:2::5", "edge2")),
		item(t, services.NodePath("edge1"), &services.Node{Edge: true}),
		item(t, services.NodePath("edge2"), &services.Node{Edge: true}),
		item(t, services.NodePath("edge3"), &services.Node{Edge: true}),
	}}
}

func newTestRelay(t testing.TB, k kernel, c *cloud) (*Relay, *testkit.Log) {
	t.Helper()
	log, lines := testkit.NewLog()
	r := newRelay(Config{
		Node: "edge1", File: filepath.Join(t.TempDir(), "lib", "services.db"), Watch: c.watch, Reach: c.Reach,
		Counters: new(tunnel.Counters), Log: log,
	}, k)
	r.successor = time.Minute // this machine may be busy
	return r, lines
}

// failing returns the function that a door calls when its listener breaks. The function makes the test fail.
func failing(t *testing.T) context.CancelCauseFunc {
	return func(err error) { t.Errorf("the door is broken: %v", err) }
}

// again returns a new relay with the configuration and the file of an earlier relay.
func again(r *Relay, k kernel, c *cloud) *Relay {
	cfg := r.cfg
	cfg.Watch, cfg.Reach = c.watch, c.Reach
	next := newRelay(cfg, k)
	next.successor = r.successor
	return next
}

// wantRedirected waits until the kernel redirects these addresses.
func wantRedirected(t *testing.T, f *fake, want ...netip.AddrPort) {
	t.Helper()
	testkit.Eventually(t, "the kernel redirects what the state says", func() bool {
		return slices.Equal(f.redirected(), want)
	})
}

// echo returns a conn to a server that sends back what it gets.
func echo(t testing.TB) func(string) (net.Conn, error) {
	addr := testkit.Serve(t, testkit.Echo)
	return func(string) (net.Conn, error) { return net.Dial("tcp", addr) }
}

// wantEcho checks that a conn leads to an echo server.
func wantEcho(t testing.TB, c net.Conn) {
	t.Helper()
	defer c.Close()
	if _, err := c.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	if err := c.(interface{ CloseWrite() error }).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(c); err != nil || string(got) != "hello" {
		t.Fatalf("got %q, %v", got, err)
	}
}
