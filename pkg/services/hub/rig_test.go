package hub

import (
	"bytes"
	"compress/flate"
	"context"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"slices"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"tunnel.example/tunnel/pkg/services"
	pb "tunnel.example/tunnel/pkg/services/servicesv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

func newHub(cfg Config) *Hub {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return New(cfg)
}

func marshal(t testing.TB, m proto.Message) []byte {
	t.Helper()
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// edge watches a hub, and keeps the state that it is told.
type edge struct {
	grpc.ServerStream // nil: the hub uses no other method

	t     testing.TB
	ctx   context.Context
	leave context.CancelFunc
	nexts chan *pb.Next  // the edge sends; the hub receives
	out   chan *pb.Batch // the hub sends; the edge receives
	ended chan error     // one error is sent, of Watch
	asked bool

	state *services.State
	bytes int // of messages in both directions, with gRPC's prefix
	last  *pb.Batch
}

// watch starts a Watch of an edge that has a state.
func watch(t testing.TB, h *Hub, node tunnel.NodeName, state *services.State) *edge {
	t.Helper()
	ctx, leave := context.WithCancel(context.Background())
	e := &edge{
		t: t, ctx: ctx, leave: leave, nexts: make(chan *pb.Next), out: make(chan *pb.Batch), ended: make(chan error, 1),
		state: state,
	}
	go func() { e.ended <- h.Watch(node, e) }()
	t.Cleanup(leave)
	return e
}

func (e *edge) Context() context.Context { return e.ctx }

func (e *edge) Recv() (*pb.Next, error) {
	select {
	case n := <-e.nexts:
		return n, nil
	case <-e.ctx.Done():
		return nil, e.ctx.Err()
	}
}

func (e *edge) Send(b *pb.Batch) error {
	select {
	case e.out <- b:
		return nil
	case <-e.ctx.Done():
		return e.ctx.Err()
	}
}

// grpcPrefix is the length of gRPC's prefix of a message.
const grpcPrefix = 5

// ask asks for the next batch. It returns why Watch has ended, if it has.
func (e *edge) ask() error {
	next := new(pb.Next)
	if !e.asked {
		has := e.state.Digests()
		next.Digests, e.asked = has.Encode(), true
	}
	select {
	case e.nexts <- next:
		e.bytes += grpcPrefix + proto.Size(next)
		return nil
	case err := <-e.ended:
		return err
	}
}

// take waits for a batch.
func (e *edge) take() (*pb.Batch, *pb.Changes, error) {
	var b *pb.Batch
	select {
	case b = <-e.out:
	case err := <-e.ended:
		return nil, nil, err
	}
	e.bytes += grpcPrefix + proto.Size(b)
	e.last = b
	return b, changesOf(e.t, b), nil
}

// changesOf decodes a batch, and checks its size.
func changesOf(t testing.TB, b *pb.Batch) *pb.Changes {
	data := b.GetChanges()
	if b.GetDeflated() {
		var err error
		if data, err = io.ReadAll(flate.NewReader(bytes.NewReader(data))); err != nil {
			t.Error(err)
		}
	}
	if len(data) > maxChanges {
		t.Errorf("a batch has %d bytes of changes", len(data))
	}
	c := new(pb.Changes)
	if err := proto.Unmarshal(data, c); err != nil {
		t.Error(err)
	}
	return c
}

// tryPull asks for batches up to the end of a series, and applies them.
func (e *edge) tryPull() error {
	var series []*pb.Changes
	for {
		if err := e.ask(); err != nil {
			return err
		}
		b, c, err := e.take()
		if err != nil {
			return err
		}
		series = append(series, c)
		if !b.GetMore() {
			break
		}
	}
	_, err := e.state.Apply(series...)
	return err
}

// pull is tryPull, and must not fail.
func (e *edge) pull() {
	e.t.Helper()
	if err := e.tryPull(); err != nil {
		e.t.Fatal(err)
	}
}

// wantEqual checks that the edge has what the hub has.
func (e *edge) wantEqual(h *Hub) {
	e.t.Helper()
	h.mu.Lock()
	defer h.mu.Unlock()
	if e.state.Digests() != h.digests || e.state.Len() != h.items {
		e.t.Fatalf("the edge has %d items, the hub has %d, or they differ", e.state.Len(), h.items)
	}
}

// stop ends the Watch.
func (e *edge) stop() {
	e.leave()
	<-e.ended
}

// The names in a large cluster are as Kubernetes makes them.
func serviceName(i int) (namespace, name string) {
	return fmt.Sprintf("team-%02d", i%20), fmt.Sprintf("payments-api-%04d", i)
}

// anEndpoint returns the item of endpoint j of Service i.
func anEndpoint(t testing.TB, i, j int, ready bool) (services.Path, []byte) {
	namespace, name := serviceName(i)
	random := rand.New(rand.NewPCG(uint64(i), 7)) //nolint:gosec // the suffix of a name
	suffix := fmt.Sprintf("%05x", random.Uint32()&0xfffff)
	address := fmt.Sprintf("10.%d.%d.%d", 64+j, i/250, i%250+1)
	return services.EndpointPath(namespace, name, name+"-"+suffix, address), marshal(t, &services.Endpoint{
		Address: address, Node: fmt.Sprintf("edge-%03d", (i*7+j*13)%500), Zone: fmt.Sprintf("site-%d", j%5),
		Ready: ready, Serving: ready,
		Ports: []*services.Port{{Name: "http", Protocol: "TCP", Port: 8080}, {Name: "metrics", Protocol: "TCP", Port: 9090}},
	})
}

// largeCluster sets 1,000 Services with 10 endpoints each, and 500 Nodes.
func largeCluster(t testing.TB, h *Hub) {
	for i := range 1000 {
		namespace, name := serviceName(i)
		h.Set(services.ServicePath(namespace, name), marshal(t, &services.Service{
			ClusterIps: []string{fmt.Sprintf("10.96.%d.%d", i/250, i%250+1)},
			Ports: []*services.Port{
				{Name: "http", Protocol: "TCP", Port: 80}, {Name: "metrics", Protocol: "TCP", Port: 9090},
			},
		}))
		for j := range 10 {
			h.Set(anEndpoint(t, i, j, true))
		}
	}
	for i := range 500 {
		h.Set(services.NodePath(fmt.Sprintf("edge-%03d", i)), marshal(t, &services.Node{
			Zone: fmt.Sprintf("site-%d", i%5), PodCidrs: []string{fmt.Sprintf("10.88.%d.0/24", i%250)},
			InternalIps: []string{fmt.Sprintf("192.168.%d.%d", i/250, i%250+1)},
		}))
	}
	h.Synced()
}

// addresses returns the addresses of the endpoints that an edge knows of a Service, sorted.
func addresses(s *services.State, service services.Path) (all []string) {
	for _, e := range s.Endpoints(service) {
		all = append(all, e.GetAddress())
	}
	slices.Sort(all)
	return all
}
