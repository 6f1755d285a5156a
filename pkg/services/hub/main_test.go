package hub

import (
	"context"
	"crypto/tls"
	"io"
	"os"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"tunnel.example/tunnel/internal/testkit/leaks"
	pb "tunnel.example/tunnel/pkg/services/servicesv1"
)

func TestMain(m *testing.M) {
	if server := os.Getenv(bareServer); server != "" {
		runBareEdges(server, os.Getenv(bareProtocol))
		return
	}
	leaks.Main(m)
}

const (
	// edges is how many edges a benchmark has.
	edges = 500
	// bareServer is an environment variable with the address of the server of BenchmarkTLSAlone or BenchmarkGRPCAlone.
	// A process with the variable runs the edges of the benchmark, and no test.
	bareServer = "TUNNEL_BARE_SERVER"
	// bareProtocol is an environment variable with the protocol of the edges: bareTLS or bareGRPC.
	bareProtocol      = "TUNNEL_BARE_PROTOCOL"
	bareTLS, bareGRPC = "tls", "grpc"
	// batchSize is the bytes of BenchmarkChange's batch. batchHeaders are 5 of gRPC, and 9 of HTTP/2.
	batchSize, batchHeaders = 146, 14
	// bareWindow is a window in bytes. Given one, gRPC does not measure the link by pings.
	bareWindow = 1 << 20
	// betweenBatches is the pause after a batch. gRPC writes a batch some time after Send has returned. Without the pause
	// it would write two batches in one system call.
	betweenBatches = 20 * time.Millisecond
)

// runBareEdges connects to the server of a benchmark, and reads batches until the server hangs up.
func runBareEdges(server, protocol string) {
	conf := &tls.Config{InsecureSkipVerify: true} //nolint:gosec // the test's own server
	edge := readBatches
	if protocol == bareGRPC {
		edge = watchBatches
	}
	var running sync.WaitGroup
	for range edges {
		running.Go(func() {
			if err := edge(server, conf); err != nil {
				panic(err)
			}
		})
	}
	running.Wait()
}

// readBatches is an edge of BenchmarkTLSAlone.
func readBatches(server string, conf *tls.Config) error {
	c, err := tls.Dial("tcp", server, conf)
	if err != nil {
		return err
	}
	defer c.Close()
	if _, err = c.Write(make([]byte, 1)); err == nil { // the handshake is over
		io.Copy(io.Discard, c)
	}
	return err
}

// watchBatches is an edge of BenchmarkGRPCAlone.
func watchBatches(server string, conf *tls.Config) error {
	cc, err := grpc.NewClient(server, grpc.WithTransportCredentials(credentials.NewTLS(conf)),
		grpc.WithInitialWindowSize(bareWindow), grpc.WithInitialConnWindowSize(bareWindow))
	if err != nil {
		return err
	}
	defer cc.Close()
	watch, err := pb.NewServicesClient(cc).Watch(context.Background())
	if err != nil {
		return err
	}
	for err = watch.Send(new(pb.Next)); err == nil; {
		_, err = watch.Recv()
	}
	return nil // the server has hung up
}
