package hub

import (
	"crypto/tls"
	"io"
	"os"
	"sync"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if server := os.Getenv(bareEdges); server != "" {
		runBareEdges(server)
		return
	}
	goleak.VerifyTestMain(m)
}

const (
	// bareEdges is the variable that makes TestMain run the edges of BenchmarkTLSAlone. It is the server's address.
	bareEdges = "TUNNEL_BARE_EDGES"
	// batchSize and nextSize are the bytes of a batch with one endpoint and of the request for the next one, with the
	// headers of gRPC and HTTP/2.
	batchSize, nextSize = 150, 30
)

// runBareEdges runs the edges of BenchmarkTLSAlone until the server closes the connections.
func runBareEdges(server string) {
	var running sync.WaitGroup
	for range 500 {
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
