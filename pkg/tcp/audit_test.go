package tcp

import (
	"context"
	"io"
	"net"
	"testing"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/tunnel"
)

// choosing is a tunnel that has chosen a node.
type choosing struct {
	*tunnelDouble
	node tunnel.NodeName
}

func (c choosing) Dial(ctx context.Context, r tunnel.Request) (net.Conn, error) {
	if r.Node == "" {
		r.Node = c.node
		r.Chose()
	}
	return c.tunnelDouble.Dial(ctx, r)
}

// The audit has one event for each conn, with its node even if the tunnel has chosen it, and one for each that
// was refused. The counts say the same.
func TestAudit(t *testing.T) {
	t.Parallel()
	seen := new(testkit.Trail[tunnel.Event])
	counters := new(tunnel.Counters)
	with := func(f *FrontDoor) { f.Sink.Audit, f.Counters = seen.Record, counters }
	echo := testkit.Serve(t, testkit.Echo)

	r := run(t, Listener{Target: echo}, choosing{new(tunnelDouble), "edge7"}, with)
	c := r.connect()
	io.WriteString(c, "hello")
	c.CloseWrite()
	if b, err := io.ReadAll(c); err != nil || string(b) != "hello" {
		t.Fatalf("read %q, %v", b, err)
	}
	testkit.Eventually(t, "an event", func() bool { return len(seen.All()) == 1 })
	e := seen.All()[0]
	if e.Kind != tunnel.EventTCP || e.Result != "ok" || e.Node != "edge7" || e.Sent != 5 || e.Received != 5 ||
		e.Caller != c.LocalAddr().String() || e.Target != echo || e.Door != "127.0.0.1:0" || e.Seconds <= 0 || e.Err != "" {
		t.Errorf("the event is %+v", e)
	}

	r = run(t, Listener{Node: "edge1", Target: echo},
		&tunnelDouble{refuse: tunnel.Refusef(tunnel.NoSuchNode, "node edge1 is not connected")}, with)
	if refused, err := net.Dial("tcp", r.door.Addrs()[0].String()); err == nil { // else it was reset as fast as that
		io.ReadAll(refused)
		refused.Close()
	}
	testkit.Eventually(t, "a second event", func() bool { return len(seen.All()) == 2 })
	if e = seen.All()[1]; e.Result != "no-such-node" || e.Node != "edge1" || e.Err == "" || e.Sent != 0 {
		t.Errorf("the event is %+v", e)
	}
	counts := &counters.Doors[tunnel.DoorTCP]
	if n, _, _ := counts.Durations(); n != 1 || counts.Results(tunnel.NoSuchNode) != 1 {
		t.Errorf("%d conns, and %d refused", n, counts.Results(tunnel.NoSuchNode))
	}
}
