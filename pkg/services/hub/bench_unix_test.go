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
	"google.golang.org/grpc/credentials"
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
	startBareEdges(b, bareTLS, ln.Addr())
	var writers []chan<- func()
	var running sync.WaitGroup
	batch := make([]byte, batchSize+batchHeaders)
	for range edges {
		c, err := ln.Accept()
		if err != nil {
			b.Fatal(err)
		}
		defer c.Close()
		if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
			b.Fatal(err)
		}
		writes := make(chan func(), 1)
		writers = append(writers, writes)
		running.Go(func() {
			for written := range writes {
				c.Write(batch)
				written()
			}
		})
	}
	writeToAll(b, writers)
	running.Wait()
}

// BenchmarkGRPCAlone reports how much of the cloud's processor time for a change gRPC, TLS and the kernel take. It has
// neither hub nor sessions: a gRPC stream for each of 500 connections sends a batch.
func BenchmarkGRPCAlone(b *testing.B) {
	pair := testca.New(b, "ca").Pair(b, auth.Leaf{Server: true})
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	s := grpc.NewServer(grpc.Creds(credentials.NewServerTLSFromCert(&pair)),
		grpc.InitialWindowSize(bareWindow), grpc.InitialConnWindowSize(bareWindow))
	watches := bareWatches{joined: make(chan chan<- func())}
	pb.RegisterServicesServer(s, watches)
	var running sync.WaitGroup
	running.Go(func() { s.Serve(ln) })
	startBareEdges(b, bareGRPC, ln.Addr())
	var writers []chan<- func()
	for range edges {
		writers = append(writers, <-watches.joined)
	}
	writeToAll(b, writers)
	s.Stop()
	running.Wait()
}

// bareWatches serves the Watches of BenchmarkGRPCAlone.
type bareWatches struct {
	pb.UnimplementedServicesServer
	joined chan chan<- func() // of each Watch: it sends a batch for each function, and then calls the function
}

func (w bareWatches) Watch(stream pb.Services_WatchServer) error {
	if _, err := stream.Recv(); err != nil {
		return err
	}
	writes := make(chan func(), 1)
	w.joined <- writes
	batch := &pb.Batch{Changes: make([]byte, batchSize)}
	for written := range writes {
		if err := stream.Send(batch); err != nil {
			return err
		}
		written()
	}
	return nil
}

// startBareEdges starts the process with the edges of a benchmark.
func startBareEdges(b *testing.B, protocol string, server net.Addr) {
	b.Helper()
	process := exec.CommandContext(b.Context(), os.Args[0])
	process.Env = append(os.Environ(), bareServer+"="+server.String(), bareProtocol+"="+protocol)
	process.Stdout, process.Stderr = os.Stderr, os.Stderr
	if err := process.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { process.Wait() }) // the end of the context has killed it
}

// writeToAll has all writers write a batch, again and again, and reports the processor time of one batch to all. Then
// it ends the writers.
func writeToAll(b *testing.B, writers []chan<- func()) {
	var written sync.WaitGroup
	before := processorTime(b)
	for b.Loop() {
		written.Add(len(writers))
		for _, w := range writers {
			w <- written.Done
		}
		written.Wait()
		time.Sleep(betweenBatches)
	}
	spent := processorTime(b) - before
	b.ReportMetric(spent.Seconds()*1e3/float64(b.N), "cpu-ms/op")
	for _, w := range writers {
		close(w)
	}
}

// processorTime returns the processor time of this process.
func processorTime(t testing.TB) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
