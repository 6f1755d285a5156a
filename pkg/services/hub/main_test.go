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
	// batchSize is the bytes of BenchmarkChange's batch (146), with 14 bytes of headers: 5 of gRPC, and 9 of HTTP/2.
	batchSize = 160
)

// runBareEdges connects to the server of BenchmarkTLSAlone, and reads batches until the server hangs up.
func runBareEdges(server string) {
	var running sync.WaitGroup
	for range edges {
		running.Go(func() {
			c, err := tls.Dial("tcp", server, &tls.Config{InsecureSkipVerify: true}) //nolint:gosec // the test's own server
			if err != nil {
				panic(err)
			}
			defer c.Close()
			if _, err = c.Write(make([]byte, 1)); err == nil { // the handshake is over
				io.Copy(io.Discard, c)
			}
		})
	}
	running.Wait()
}
