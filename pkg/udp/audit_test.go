package udp

import (
	"slices"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/tunnel"
)

// The audit has one event for each flow, with its caller and its bytes, and the traces have a span; the events do not
// wait under the lock of the port.
func TestAudit(t *testing.T) {
	t.Parallel()
	seen := new(testkit.Trail[tunnel.Event])
	spans := new(testkit.Trail[*tunnel.Span])
	with := func(f *FrontDoor, _ *Edge) {
		f.cfg.Sink.Audit, f.cfg.Sink.Tracer = seen.Record, &tunnel.Tracer{PerMillion: 1_000_000, Take: spans.Record}
	}
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
	if s := spans.All(); len(s) != 1 || s[0].Event != all[0] || s[0].Ended.Sub(s[0].Start).Seconds() < all[0].Seconds {
		t.Errorf("the spans are %+v", s)
	}
	if n, _, _ := r.core.Doors[tunnel.DoorUDP].Durations(); n != 1 {
		t.Errorf("%d conns are counted", n)
	}
}

// brittleTap panics when it is shown the end of a conn.
type brittleTap struct{}

func (brittleTap) Watched() bool { return true }

func (brittleTap) Show(p tunnel.Phase, _ tunnel.Event) {
	if p == tunnel.PhaseEnd {
		panic("the test wants it")
	}
}

// A panic while the front door ends idle flows, or while it writes the audit, ends neither the process nor the
// front door: later callers are served, idle flows end, and the front door stops in time.
func TestPanicsOfSweep(t *testing.T) {
	t.Parallel()
	for name, sink := range map[string]tunnel.Sink{
		"the end of a flow": {Tap: brittleTap{}},
		"the audit":         {Audit: func(tunnel.Event) { panic("the test wants it") }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := run(t, Listener{Node: "edge1", Target: target(t, echo)}, func(f *FrontDoor, _ *Edge) {
				f.cfg.Sink, f.idle = sink, 3*time.Second
			})
			for i := range uint64(2) {
				if got := ask(t, r.caller(), "hello"); got != "hello" {
					t.Fatalf("the answer is %q", got)
				}
				testkit.Eventually(t, "the end of the idle flow panics", func() bool { return r.core.Panics.Load() > i })
			}
			ask(t, r.caller(), "hello") // this flow ends while the front door drains
			r.stop()
			if err := r.wait(); err != nil {
				t.Error(err)
			}
			if n := r.core.Panics.Swap(0); n != 3 {
				t.Errorf("%d panics; want one for each flow", n)
			}
		})
	}
}

// A flood of flows keeps a bounded number of events; the rest is one event that counts them.
func TestAuditOfAFlood(t *testing.T) {
	t.Parallel()
	seen := new(testkit.Trail[tunnel.Event])
	p := &port{sink: &tunnel.Sink{Audit: seen.Record}}
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

// With a status page and no audit, flows that have ended are not kept for anybody, and a flood is no refusal.
func TestRefusalsOfAFlood(t *testing.T) {
	t.Parallel()
	refused := new(tunnel.Refusals)
	p := &port{sink: &tunnel.Sink{Refusals: refused}}
	for range maxEvents + 3 {
		p.noteLocked(&flow{mux: &mux{node: "edge1"}})
	}
	p.noteLocked(&flow{mux: &mux{node: "edge2", failure: tunnel.Refusef(tunnel.Timeout, "late")}})
	if len(p.events) > 0 || p.missed > 0 {
		t.Errorf("%d events wait, %d are missed", len(p.events), p.missed)
	}
	p.handOver()
	if all := refused.Last(); len(all) != 1 || all[0].Node != "edge2" || all[0].Result != "timeout" {
		t.Errorf("the refusals are %+v", all)
	}
}

// shownEvents is a tap that always has a watcher. It notes what it is shown.
type shownEvents struct{ testkit.Trail[string] }

func (*shownEvents) Watched() bool { return true }

func (s *shownEvents) Show(phase tunnel.Phase, e tunnel.Event) {
	s.Record(string(phase) + " " + string(e.Node) + " " + e.Result)
}

// The tap is shown that a flow opens when there is a conn for it: not while the node is dialled, and not if that fails.
func TestTap(t *testing.T) {
	t.Parallel()
	tap := new(shownEvents)
	r := run(t, Listener{Node: "edge1", Target: target(t, echo)}, func(f *FrontDoor, _ *Edge) { f.cfg.Sink.Tap = tap })
	r.via.refuseWith(tunnel.Refusef(tunnel.NoSuchNode, "away"))
	refused := r.caller()
	testkit.Eventually(t, "the flow is refused", func() bool {
		refused.Write([]byte("hello"))
		return len(tap.All()) > 0
	})
	if first := tap.All()[0]; first != "refused edge1 no-such-node" {
		t.Errorf("the tap is shown %q", first)
	}
	r.via.refuseWith(nil)
	before := len(tap.All())
	c := r.caller()
	testkit.Eventually(t, "the flow opens", func() bool {
		c.Write([]byte("hello"))
		return slices.Contains(tap.All()[before:], "open edge1 ok")
	})
}

// A flow that goes on after the port's line has changed has the target that its datagrams go to.
func TestAuditAfterAChange(t *testing.T) {
	t.Parallel()
	seen := new(testkit.Trail[tunnel.Event])
	p := &port{sink: &tunnel.Sink{Audit: seen.Record}, Listener: Listener{Listen: "127.0.0.1:1", Target: "new:1"}}
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
	record := func(f *FrontDoor, _ *Edge) { f.cfg.Sink.Audit = seen.Record }
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
