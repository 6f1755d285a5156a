package hub

import (
	"crypto/tls"
	"io"
	"os"
	"sync"
	"testing"

	"tunnel.example/tunnel/internal/testkit/leaks"
)

func TestMain(m *testing.M) {
	if server := os.Getenv(bareServer); server != "" {
		runBareEdges(server)
		return
	}
	leaks.Main(m)
}

const (
	// edges is how many edges a benchmark has.
	edges = 500
	// bareServer is an environment variable with the address of the server of BenchmarkTLSAlone. A process with the
	// variable runs the edges of the benchmark, and no test.
	bareServer = "TUNNEL_BARE_SERVER"
	// batchSize and nextSize are the bytes of BenchmarkChange's batch (146), and of an empty request. Each has 14 bytes
	// of headers: 5 of gRPC, and 9 of HTTP/2.
	batchSize, nextSize = 160, 14
)

// runBareEdges connects to the server of BenchmarkTLSAlone, and asks for batches until the server hangs up.
func runBareEdges(server string) {
	var running sync.WaitGroup
	for range edges {
		running.Go(func() {
			c, err := tls.Dial("tcp", server, &tls.Config{InsecureSkipVerify: true}) //nolint:gosec // the test's own server
			if err != nil {
				panic(err)
			}
			defer c.Close()
			next, batch := make([]byte, nextSize), make([]byte, batchSize)
			for {
				if _, err = c.Write(next); err != nil {
					return
				}
				if _, err = io.ReadFull(c, batch); err != nil {
					return
				}
			}
		})
	}
	running.Wait()
}
