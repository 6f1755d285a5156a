package ping

import (
	"context"
	"errors"
	"net"
	"sync"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit/leaks"
	"tunnel.example/tunnel/pkg/tunnel"
)

func TestMain(m *testing.M) { leaks.Main(m) }

// cloud is a dialer whose conns lead to an Edge's echo over TCP, or that refuses.
type cloud struct {
	t       *testing.T
	refusal error
	last    tunnel.Request
	splices sync.WaitGroup
}

func (c *cloud) Dial(ctx context.Context, r tunnel.Request) (net.Conn, error) {
	c.last = r
	if c.refusal != nil {
		return nil, c.refusal
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	defer l.Close()
	near, err := new(net.Dialer).DialContext(ctx, "tcp", l.Addr().String())
	if err != nil {
		return nil, err
	}
	far, err := l.Accept()
	if err != nil {
		near.Close()
		return nil, err
	}
	c.splices.Go(func() { tunnel.Splice(context.WithoutCancel(ctx), far, newEcho()) })
	return near, nil
}

// A ping comes back, and leaves nothing behind at the edge.
func TestNode(t *testing.T) {
	c := &cloud{t: t}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	trip, err := Node(ctx, c, "edge1")
	if err != nil || trip.Open <= 0 || trip.Echo <= 0 {
		t.Errorf("%+v, %v", trip, err)
	}
	if c.last.Node != "edge1" || c.last.Category != NewEdge().Name() {
		t.Errorf("the request was %+v", c.last)
	}
	c.splices.Wait()
}

// An edge without the module, and a konnectivity agent, are reported as such. Other refusals stay as they are.
func TestRefused(t *testing.T) {
	away := tunnel.Refusef(tunnel.NoSuchNode, "node edge1 is not connected")
	for err, want := range map[error]error{
		tunnel.Refusef(tunnel.Internal, "node edge1 runs no module %q", "ping"):                              ErrOld,
		tunnel.Refusef(tunnel.Denied, "node edge1 has joined as a konnectivity agent, which dials tcp only"): ErrOld,
		away: away,
	} {
		if _, got := Node(t.Context(), &cloud{t: t, refusal: err}, "edge1"); !errors.Is(got, want) {
			t.Errorf("%v becomes %v; want %v", err, got, want)
		}
	}
}

// A ping of a target opens a conn by the edge's tcp module, and closes it.
func TestTarget(t *testing.T) {
	c := &cloud{t: t}
	trip, err := Target(t.Context(), c, "edge1", "10.0.0.5:22")
	if err != nil || trip.Open <= 0 || trip.Echo != 0 {
		t.Errorf("%+v, %v", trip, err)
	}
	if c.last.Category != "tcp" || c.last.Addr != "10.0.0.5:22" {
		t.Errorf("the request was %+v", c.last)
	}
	c.splices.Wait()
}
