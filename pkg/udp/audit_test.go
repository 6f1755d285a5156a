package udp

import (
	"testing"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/tunnel"
)

// The audit has one event for each flow, with its caller and its bytes; the events do not wait under the lock of
// the port.
func TestAudit(t *testing.T) {
	t.Parallel()
	seen := new(testkit.Trail[tunnel.Event])
	with := func(f *FrontDoor, _ *Edge) { f.cfg.Audit = seen.Record }
	r := run(t, Listener{Node: "edge1", Target: target(t, echo)}, with)
	c := r.caller()
	if got := ask(t, c, "hello"); got != "hello" {
		t.Fatalf("the answer is %q", got)
	}
	r.stop()
	if err := r.wait(); err != nil {
		t.Fatal(err)
	}
	all := seen.All()
	if len(all) != 1 {
		t.Fatalf("%d events: %+v", len(all), all)
	}
	if e := all[0]; e.Kind != tunnel.EventUDP || e.Result != "ok" || e.Node != "edge1" ||
		e.Caller != c.LocalAddr().String() || e.Sent != 5 || e.Received != 5 || e.Seconds <= 0 {
		t.Errorf("the event is %+v", e)
	}
	if n, _, _ := r.core.Doors[tunnel.DoorUDP].Durations(); n != 1 {
		t.Errorf("%d conns are counted", n)
	}
}

// A flood of flows keeps a bounded number of events; the rest is one event that counts them.
func TestAuditOfAFlood(t *testing.T) {
	t.Parallel()
	seen := new(testkit.Trail[tunnel.Event])
	p := &port{audit: seen.Record}
	f := &flow{mux: &mux{node: "edge1"}}
	for range maxEvents + 3 {
		p.noteLocked(f)
	}
	p.handOver()
	all := seen.All()
	if len(all) != maxEvents+1 || all[maxEvents].Result != "overloaded" ||
		all[maxEvents].Err != "3 more flows have ended, too many to list" {
		t.Errorf("%d events, the last is %+v", len(all), all[len(all)-1])
	}
}

// A flow that goes on after the port's line has changed has the target that its datagrams go to.
func TestAuditAfterAChange(t *testing.T) {
	t.Parallel()
	seen := new(testkit.Trail[tunnel.Event])
	p := &port{audit: seen.Record, Listener: Listener{Listen: "127.0.0.1:1", Target: "new:1"}}
	p.noteLocked(&flow{mux: &mux{to: Listener{Listen: "127.0.0.1:1", Target: "old:1"}}})
	p.handOver()
	if e := seen.All()[0]; e.Target != "old:1" || e.Door != "127.0.0.1:1" {
		t.Errorf("the event is %+v", e)
	}
}

// A flow whose node is lost says so.
func TestAuditOfALostNode(t *testing.T) {
	t.Parallel()
	seen := new(testkit.Trail[tunnel.Event])
	record := func(f *FrontDoor, _ *Edge) { f.cfg.Audit = seen.Record }
	r := run(t, Listener{Node: "edge1", Target: target(t, echo)}, record)
	if got := ask(t, r.caller(), "hello"); got != "hello" {
		t.Fatalf("the answer is %q", got)
	}
	r.via.cut()
	testkit.Eventually(t, "the flow has ended", func() bool { return r.door.cfg.Counters.Flows.Load() == 0 })
	r.stop()
	if err := r.wait(); err != nil {
		t.Fatal(err)
	}
	if all := seen.All(); len(all) != 1 || all[0].Err != "the conn to the node has ended before the flow" {
		t.Errorf("the events are %+v", all)
	}
}
