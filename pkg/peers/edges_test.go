package peers

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"net"
	"sync"
	"testing"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/stream"
	"tunnel.example/tunnel/pkg/tunnel"
)

// An edge reaches a target behind another edge, which has its session with another replica. The half-close and the
// reset of either end arrive at the other one.
func TestEdgeReachesAnEdgeOfAnotherReplica(t *testing.T) {
	var mu sync.Mutex // guards all
	var all fleet
	fleet := newFleet(t, 2, func(c *stream.ServerConfig) {
		c.Reach = func(ctx context.Context, request *stream.ReachRequest) (net.Conn, error) {
			mu.Lock()
			here := all[0].peers
			mu.Unlock()
			return here.Dial(ctx, tunnel.Request{
				Node: "edge2", Category: "tcp", Network: "tcp", Addr: request.Target, Caller: "node " + string(request.From.Node),
			})
		}
	})
	mu.Lock()
	all = fleet
	mu.Unlock()
	e1 := all[0].join("edge1", direct)
	e2 := all[1].join("edge2", direct)
	all[0].eventually("the first replica knows where edge2 is", func() bool { return all[0].peers.Holds("edge2") })
	pair := func() (net.Conn, *net.TCPConn) {
		t.Helper()
		l := testkit.NewTarget(t)
		c, err := e1.client.Reach(t.Context(), l.Address())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c, l.Next(t)
	}

	c, far := pair()
	sent := bytes.Repeat([]byte("endpoint"), 1<<19)
	go func() {
		c.Write(sent)
		c.(interface{ CloseWrite() error }).CloseWrite()
	}()
	h := sha256.New()
	if _, err := io.Copy(h, far); err != nil || [32]byte(h.Sum(nil)) != sha256.Sum256(sent) {
		t.Errorf("the target gets other bytes: %v", err)
	}
	far.Write([]byte("answer"))
	far.Close()
	if got := testkit.ReadAll(t, c); string(got) != "answer" {
		t.Errorf("the caller gets %q", got)
	}
	c.Close()

	c, far = pair()
	far.SetLinger(0)
	far.Close()
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, tunnel.ErrReset) {
		t.Errorf("the target's reset arrives as %v", err)
	}
	c, far = pair()
	tunnel.Reset(c)
	if _, err := far.Read(make([]byte, 1)); !errors.Is(err, tunnel.ErrReset) {
		t.Errorf("the caller's reset arrives as %v", err)
	}
	if _, err := e1.client.Reach(t.Context(), "127.0.0.1:1"); tunnel.CodeOf(err) != tunnel.Refused {
		t.Errorf("a target where nothing listens: %v", err)
	}
	for _, a := range all {
		a.idle(e1, e2)
	}
	e2.Stop()
	all[0].eventually("edge2 is gone", func() bool {
		_, err := e1.client.Reach(t.Context(), "127.0.0.1:1")
		return tunnel.CodeOf(err) == tunnel.NoSuchNode
	})
}
