package tunnel

import (
	"errors"
	"net"
	"slices"
	"testing"
)

// tapDouble notes what it is shown.
type tapDouble struct {
	watched bool
	phases  []Phase
	events  []Event
}

func (d *tapDouble) Watched() bool { return d.watched }

func (d *tapDouble) Show(p Phase, e Event) {
	d.phases, d.events = append(d.phases, p), append(d.events, e)
}

// A visit feeds the counters always, the audit once at the end, the last refusals if it was refused, and the tap while
// somebody watches.
func TestVisit(t *testing.T) {
	t.Parallel()
	var audit []Event
	double := &tapDouble{watched: true}
	s := &Sink{Audit: func(e Event) { audit = append(audit, e) }, Tap: double, Refusals: new(Refusals)}
	counts := new(DoorCounters)
	who := func() Event { return Event{Kind: EventTCP, Node: "edge1"} }

	v := s.Arrived(counts)
	v.Opened(who)
	v.Ended(1, 2, errors.New("reset"), who)
	refused := s.Arrived(counts)
	refused.Refused(Refusef(Denied, "no"), who)
	invalid := s.Arrived(counts)
	invalid.Quiet = true
	invalid.Rejected(0, "nonsense", 3, 4, who)
	elsewhere := s.Arrived(counts)
	elsewhere.Failed(Refusef(Timeout, "late"), who)
	double.watched = false
	s.Deny(Event{Kind: EventTCP, Result: "denied"})

	wantPhases := []Phase{PhaseOpen, PhaseEnd, PhaseRefused, PhaseRefused, PhaseRefused}
	wantResults := []string{"ok", "ok", "denied", ResultInvalid, "timeout"}
	for i, e := range double.events {
		if i >= len(wantPhases) || double.phases[i] != wantPhases[i] || e.Result != wantResults[i] ||
			e.Node != "edge1" || e.Time.IsZero() {
			t.Errorf("the tap is shown %s %+v", double.phases[i], e)
		}
	}
	if len(double.events) != len(wantPhases) {
		t.Errorf("the tap is shown %d events", len(double.events))
	}
	if e := double.events[1]; e.Sent != 1 || e.Received != 2 || e.Err != "reset" {
		t.Errorf("the end is %+v", e)
	}
	if len(audit) != 4 || audit[0].Result != "ok" || audit[0].Sent != 1 || audit[1].Err != "denied: no" ||
		audit[2].Result != "timeout" || audit[3].Node != "" {
		t.Errorf("the audit has %+v", audit)
	}
	var kept []string // the newest first
	for _, e := range s.Refusals.Last() {
		kept = append(kept, e.Result)
	}
	if want := []string{"denied", "timeout", ResultInvalid, "denied"}; !slices.Equal(kept, want) {
		t.Errorf("the last refusals are %q, want %q", kept, want)
	}
	served, _, _ := counts.Durations()
	if served != 1 || counts.Results(Denied) != 1 || counts.Results(0) != 1 || counts.Results(Timeout) != 0 {
		t.Errorf("%d served, %d denied, %d invalid, %d late", served, counts.Results(Denied), counts.Results(0),
			counts.Results(Timeout))
	}
}

// A conn that has opened and then fails on our side counts as served alone, and has ended: it was not refused. A caller
// that is refused twice is shown once.
func TestVisitIsToldOnce(t *testing.T) {
	t.Parallel()
	double := &tapDouble{watched: true}
	s := &Sink{Tap: double, Refusals: new(Refusals)}
	counts := new(DoorCounters)
	who := func() Event { return Event{Kind: EventRequest} }
	broken := s.Arrived(counts)
	broken.Opened(who)
	broken.Rejected(Internal, "a panic", 1, 2, who)
	if served, _, _ := counts.Durations(); served != 1 || counts.Results(Internal) != 0 {
		t.Errorf("%d served, %d failed", served, counts.Results(Internal))
	}
	if !slices.Equal(double.phases, []Phase{PhaseOpen, PhaseEnd}) || double.events[1].Result != "internal" {
		t.Errorf("the tap is shown %q, %+v", double.phases, double.events)
	}
	again := s.Arrived(counts)
	again.Told = true
	again.Rejected(Timeout, "late", 0, 0, who)
	if len(double.phases) != 2 || len(s.Refusals.Last()) != 0 || counts.Results(Timeout) != 1 {
		t.Errorf("the second refusal is shown: %q, %+v", double.phases, s.Refusals.Last())
	}
}

// visit is what a front door does for a conn, but for the conn.
func visit(s *Sink, counts *DoorCounters, caller net.Addr, node NodeName) {
	v := s.Arrived(counts)
	who := func() Event { return Event{Kind: EventTCP, Node: node, Caller: caller.String()} }
	v.Opened(who)
	v.Ended(1, 2, nil, who)
}

// While nobody listens, a visit allocates nothing.
func TestVisitIsFree(t *testing.T) {
	s := &Sink{Tap: new(tapDouble), Refusals: new(Refusals)}
	counts, caller := new(DoorCounters), &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1}
	if n := testing.AllocsPerRun(100, func() { visit(s, counts, caller, "edge1") }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// BenchmarkVisit is what a conn costs its front door beside the conn, while nobody listens.
func BenchmarkVisit(b *testing.B) {
	s, counts, caller := &Sink{Tap: new(tapDouble)}, new(DoorCounters), &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1}
	b.ReportAllocs()
	for b.Loop() {
		visit(s, counts, caller, "edge1")
	}
}
