package relay

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
)

// When the relay gives up a dial, the endpoint must not see a connection that ends cleanly without a byte: a protocol
// without a greeting could take that for a complete request.
func TestDirectDialGivenUp(t *testing.T) {
	r, _ := newTestRelay(t, new(fake), newCloud())
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	const dials = 1000
	var connected, clean atomic.Int64
	var taking sync.WaitGroup
	taking.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			connected.Add(1)
			if _, err := c.Read(make([]byte, 1)); errors.Is(err, io.EOF) {
				clean.Add(1)
			}
			c.Close()
		}
	})
	for range dials {
		ctx, cancel := context.WithCancel(t.Context())
		go cancel()
		// The relay owns no conn after a dial that wins the race. An edge that is killed now closes it so, too.
		if c, err := r.dial(ctx, "tcp", ln.Addr().String()); err == nil {
			c.Close()
		}
		cancel()
	}
	ln.Close()
	taking.Wait()
	if n := clean.Load(); n > 0 {
		t.Errorf("of %d dials %d reached the endpoint, and %d ended there cleanly", dials, connected.Load(), n)
	}
}
