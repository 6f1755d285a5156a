//go:build unix

package hub

import (
	"context"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"tunnel.example/tunnel/pkg/services"
	pb "tunnel.example/tunnel/pkg/services/servicesv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// quickEdge asks for the next batch as soon as it has one.
type quickEdge struct {
	grpc.ServerStream // nil: the hub uses no other method

	ctx   context.Context
	asked bool
	has   services.Digests
	got   *sync.WaitGroup // a batch has come
}

func (q *quickEdge) Context() context.Context { return q.ctx }

func (q *quickEdge) Recv() (*pb.Next, error) {
	if q.asked {
		return new(pb.Next), q.ctx.Err()
	}
	q.asked = true
	return &pb.Next{Digests: q.has.Encode()}, nil
}

// Send encodes the batch, as gRPC does.
func (q *quickEdge) Send(b *pb.Batch) error {
	if _, err := proto.Marshal(b); err != nil {
		return err
	}
	q.got.Done()
	return nil
}

// BenchmarkChange reports what the cloud does when one endpoint of 1,000 Services with 10 endpoints each changes, and
// 500 edges watch: cpu-ms/op is the processor time in all, without that of gRPC and TLS.
func BenchmarkChange(b *testing.B) {
	h := newHub(Config{})
	largeCluster(b, h)
	const edges = 500
	ctx, stop := context.WithCancel(b.Context())
	var got, running sync.WaitGroup
	got.Add(edges) // the first batch, which is empty
	for i := range edges {
		q := &quickEdge{ctx: ctx, has: h.digests, got: &got}
		running.Go(func() { h.Watch(tunnel.NodeName("edge-"+strconv.Itoa(i)), q) })
	}
	got.Wait()
	before := processorTime(b)
	ready := false
	for b.Loop() {
		got.Add(edges)
		h.Set(anEndpoint(b, 500, 5, ready))
		got.Wait()
		ready = !ready
	}
	spent := processorTime(b) - before
	b.ReportMetric(spent.Seconds()*1e3/float64(b.N), "cpu-ms/op")
	stop()
	running.Wait()
}

// processorTime returns the processor time of this process.
func processorTime(t testing.TB) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
