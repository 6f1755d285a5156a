package tcp

import (
	"errors"
	"io"
	"net"
	"syscall"
	"testing"
)

func TestResetWhileTheClientSends(t *testing.T) {
	addr := target(t, func(c *net.TCPConn) {
		io.ReadFull(c, make([]byte, 1<<20))
		c.SetLinger(0)
	})
	r := run(t, Listener{Target: addr}, new(tunnelDouble))
	bad := 0
	for range 200 {
		c := r.connect()
		werr := make(chan error, 1)
		go func() {
			buf := make([]byte, 64<<10)
			for {
				if _, err := c.Write(buf); err != nil {
					werr <- err
					return
				}
			}
		}()
		_, rerr := io.Copy(io.Discard, c)
		w := <-werr
		if !errors.Is(rerr, syscall.ECONNRESET) && !errors.Is(w, syscall.ECONNRESET) {
			bad++
			if bad == 1 {
				t.Errorf("read %v, write %v", rerr, w)
			}
		}
		c.Close()
	}
	t.Logf("%d of 200 resets came as a clean end", bad)
}

// A client that has closed completely answers later bytes with a reset. The bytes that it sent
// before its FIN still arrive at the target and end cleanly.
func TestCloseThenReset(t *testing.T) {
	const sent = 16 << 10 // less than the first window, so that the FIN is not delayed
	type result struct {
		n   int
		err error
	}
	closed, results := make(chan struct{}), make(chan result)
	addr := target(t, func(c *net.TCPConn) {
		<-closed
		go func() {
			for range 50 {
				if _, err := c.Write([]byte("x")); err != nil {
					return
				}
			}
		}()
		n, err := io.Copy(io.Discard, c)
		results <- result{int(n), err}
	})
	r := run(t, Listener{Target: addr}, new(tunnelDouble))
	for range 200 {
		c := r.connect()
		c.Write(make([]byte, sent))
		c.Close()
		closed <- struct{}{}
		if got := <-results; got.n != sent || got.err != nil {
			t.Fatalf("the target got %d bytes and %v, want %d and a clean end", got.n, got.err, sent)
		}
	}
}
