package faults

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/tunnel"
	"tunnel.example/tunnel/test/rig"
)

// TestKilledWhileDialling kills the edge while callers come and go. Each caller sends a
// request and waits for the answer. A target that has read nothing when its connection ends
// must see a reset: to a clean end without a byte many protocols give a meaning.
func TestKilledWhileDialling(t *testing.T) {
	t.Parallel()
	kills := 15
	if soak() {
		kills = 60
	}
	var taken, resets, ghosts atomic.Int64
	target := serve(t, func(_ context.Context, c net.Conn) {
		taken.Add(1)
		n, err := c.Read(make([]byte, 16))
		switch {
		case n > 0:
			c.Write([]byte("answer"))
		case errors.Is(err, io.EOF):
			ghosts.Add(1)
		default:
			resets.Add(1)
		}
	})
	p := newPair(t, func(cfg *rig.Config) { cfg.TCP["ghost"] = target })
	p.start()

	ctx, cancel := context.WithCancel(t.Context())
	var calling sync.WaitGroup
	for range 16 {
		calling.Go(func() {
			for ctx.Err() == nil {
				call(p.Door("ghost"))
			}
		})
	}
	defer calling.Wait()
	defer cancel()
	for range kills {
		before := taken.Load()
		testkit.Within(t, backWithin, "callers reach the target", func() error {
			if taken.Load() < before+100 {
				return errors.New("fewer than 100 have")
			}
			return nil
		})
		p.edge.Kill()
		p.startEdge()
		p.waitReady(patience)
	}
	t.Logf("%d kills, %d connections at the target, %d of them reset before a byte", kills, taken.Load(), resets.Load())
	if n := ghosts.Load(); n > 0 {
		t.Errorf("the target saw %d clean ends without a byte, though every caller had sent", n)
	}
}

// call is one short request. Whether it succeeds does not matter here. A caller that gives up before it has sent the
// request resets its connection: the tunnel would rightly pass on a clean end.
func call(door string) {
	dialer := net.Dialer{Timeout: time.Second, Control: tunnel.ResetOnDeathControl}
	c, err := dialer.Dial("tcp", door)
	if err != nil {
		time.Sleep(10 * time.Millisecond)
		return
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(hangs))
	if _, err = c.Write([]byte("request")); err == nil {
		c.(*net.TCPConn).SetLinger(-1)
		_, err = io.ReadAll(c)
	}
	if err != nil {
		time.Sleep(10 * time.Millisecond) // there is no edge
	}
}
