//go:build unix

package hub

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"tunnel.example/tunnel/internal/testkit/testca"
	"tunnel.example/tunnel/pkg/auth"
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
	benchmarkChange(b, h, edges, func(ready bool) (services.Path, []byte) { return anEndpoint(b, 500, 5, ready) })
}

// BenchmarkChangeOfOneNode reports the same for an endpoint that only its own node needs: each of 500 nodes has one
// endpoint of a Service with internalTrafficPolicy Local, as of a DaemonSet.
func BenchmarkChangeOfOneNode(b *testing.B) {
	h := newHub(Config{})
	setWeb(b, h, true)
	endpoint := func(i int, ready bool) (services.Path, []byte) {
		address := fmt.Sprintf("10.88.%d.%d", i/250, i%250+1)
		return services.EndpointPath("shop", "web", "web-a", address), marshal(b, &services.Endpoint{
			Address: address, Node: fmt.Sprintf("edge-%d", i), Ready: ready, Serving: ready, Ports: http,
		})
	}
	for i := range edges {
		h.Set(endpoint(i, true))
	}
	h.Synced()
	benchmarkChange(b, h, 1, func(ready bool) (services.Path, []byte) { return endpoint(300, ready) })
}

// benchmarkChange changes an endpoint of h, which n of the 500 edges are told.
func benchmarkChange(b *testing.B, h *Hub, n int, endpoint func(ready bool) (services.Path, []byte)) {
	ctx, stop := context.WithCancel(b.Context())
	var got, running sync.WaitGroup
	got.Add(edges) // the first batch
	for i := range edges {
		node := tunnel.NodeName("edge-" + strconv.Itoa(i))
		has, _ := needs(h, node)
		q := &quickEdge{ctx: ctx, has: has, got: &got}
		running.Go(func() { h.Watch(node, q) })
	}
	got.Wait()
	before := processorTime(b)
	ready := false
	for b.Loop() {
		got.Add(n)
		h.Set(endpoint(ready))
		got.Wait()
		ready = !ready
	}
	spent := processorTime(b) - before
	b.ReportMetric(spent.Seconds()*1e3/float64(b.N), "cpu-ms/op")
	stop()
	running.Wait()
}

// BenchmarkTLSAlone reports how much of the cloud's processor time for a change TLS and the kernel take. It has neither
// hub nor gRPC: a goroutine for each of 500 connections writes a batch. Another process, which TestMain runs, has the
// other ends of the connections.
func BenchmarkTLSAlone(b *testing.B) {
	ca := testca.New(b, "ca")
	ln, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{ca.Pair(b, auth.Leaf{Server: true})},
	})
	if err != nil {
		b.Fatal(err)
	}
	defer ln.Close()
	others := exec.CommandContext(b.Context(), os.Args[0])
	others.Env = append(os.Environ(), bareServer+"="+ln.Addr().String())
	others.Stdout, others.Stderr = os.Stderr, os.Stderr
	if err := others.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { others.Wait() }) // the end of the context has killed it
	var written, running sync.WaitGroup
	conns, changes := make([]net.Conn, edges), make([]chan []byte, edges)
	for i := range edges {
		c, err := ln.Accept()
		if err != nil {
			b.Fatal(err)
		}
		conns[i], changes[i] = c, make(chan []byte, 1)
		running.Go(func() {
			for batch := range changes[i] {
				c.Write(batch)
				written.Done()
			}
		})
	}
	for _, c := range conns {
		if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
			b.Fatal(err)
		}
	}
	before := processorTime(b)
	for b.Loop() {
		written.Add(edges)
		batch := make([]byte, batchSize)
		for _, c := range changes {
			c <- batch
		}
		written.Wait()
	}
	spent := processorTime(b) - before
	b.ReportMetric(spent.Seconds()*1e3/float64(b.N), "cpu-ms/op")
	for i, c := range conns {
		close(changes[i])
		c.Close()
	}
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
