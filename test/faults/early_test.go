package faults

import (
	"bytes"
	"context"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"tunnel.example/tunnel/test/rig"
)

// TestEarlyAnswer has a target answer before it has read its input, and close. Its kernel
// then sends the answer and behind it a reset, as for an HTTP 413. TCP delivers the whole
// answer, and so must the tunnel.
func TestEarlyAnswer(t *testing.T) {
	t.Parallel()
	callers := 20
	if soak() {
		callers = 200
	}
	for way, change := range map[string]func(*rig.Config){
		"data connection": func(*rig.Config) {},
		"stream":          func(cfg *rig.Config) { cfg.Edge = "connections = 1\n" },
	} {
		t.Run(way, func(t *testing.T) {
			t.Parallel()
			for _, answer := range []int{200, 32 << 10} {
				target := serve(t, func(_ context.Context, c net.Conn) {
					if _, err := io.ReadFull(c, make([]byte, 1)); err == nil {
						c.Write(rig.Noise[:answer])
					}
				})
				p := newPair(t, change, func(cfg *rig.Config) { cfg.TCP["early"] = target })
				p.start()
				for _, upload := range []int{1 << 10, 64 << 10, 1 << 20} {
					for from, address := range map[string]string{"the target": target, "the tunnel": p.Door("early")} {
						cut := 0
						for range callers {
							began := time.Now()
							// A reset waits a second at most behind bytes that a busy machine has not taken.
							if got := askEarly(t, address, upload); !bytes.Equal(got, rig.Noise[:answer]) &&
								(time.Since(began) < time.Second || time.Since(began) >= hangs) {
								cut++
							}
						}
						if cut > 0 {
							t.Errorf("%d bytes up: %d of %d callers got less than the answer of %d bytes from %s", upload, cut,
								callers, answer, from)
						}
					}
				}
			}
		})
	}
}

// askEarly uploads, and returns what came back. The upload fails, and the reset behind the
// answer may be the error of the read or of the write.
func askEarly(t *testing.T, address string, upload int) []byte {
	c, err := net.Dial("tcp", address)
	if err != nil {
		t.Error(err)
		return nil
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(hangs))
	var sending sync.WaitGroup
	defer sending.Wait()
	sending.Go(func() { c.Write(make([]byte, upload)) })
	got, _ := io.ReadAll(c)
	return got
}
