package tunnel

import (
	"errors"
	"strings"
	"testing"
)

const (
	traceID = "4bf92f3577b34da6a3ce929d0e0e4736"
	parent  = "00-" + traceID + "-00f067aa0ba902b7-01"
)

func TestParseTraceContext(t *testing.T) {
	for text, want := range map[string]string{
		parent:                                  parent,
		strings.TrimSuffix(parent, "1") + "0":   "00-" + traceID + "-00f067aa0ba902b7-00",
		strings.TrimSuffix(parent, "01") + "03": parent, // the random flag of level 2
		"01" + parent[2:]:                       parent,
		"fe" + parent[2:] + "-more":             parent,

		"":                                   "",
		"00":                                 "",
		"ff" + parent[2:]:                    "",
		parent + "-more":                     "",
		"01" + parent[2:] + "more":           "",
		strings.ToUpper(parent):              "",
		strings.Replace(parent, "-", "_", 1): "",
		strings.Replace(parent, "4", "g", 1): "",
		"00-" + strings.Repeat("0", 32) + "-00f067aa0ba902b7-01": "",
		"00-" + traceID + "-0000000000000000-01":                 "",
		" " + parent:                                             "",
		strings.Repeat("0", 1<<20):                               "",
		strings.Replace(parent, "4b", "é", 1):                    "",
	} {
		if got := ParseTraceContext(text, "").Traceparent(); got != want {
			t.Errorf("%.80q is %q, want %q", text, got, want)
		}
	}
	for state, want := range map[string]string{
		"":                        "",
		"a=1,b=2":                 "a=1,b=2",
		strings.Repeat("x", 512):  strings.Repeat("x", 512),
		strings.Repeat("x", 513):  "",
		"a=\x1b[31m":              "",
		"a=é":                     "",
		"a=1\r\nAuthorization: x": "",
	} {
		if got := ParseTraceContext(parent, state).State; got != want {
			t.Errorf("the state %.80q is %q", state, got)
		}
	}
}

// FuzzParseTraceContext: what is accepted is sent on in the one form of version 00, and is accepted again.
func FuzzParseTraceContext(f *testing.F) {
	f.Add(parent, "a=1")
	f.Add("fe"+parent[2:]+"-more", strings.Repeat("x", 600))
	f.Add("00-", "\x00")
	f.Fuzz(func(t *testing.T, parent, state string) {
		c := ParseTraceContext(parent, state)
		if c == nil {
			return
		}
		again := ParseTraceContext(c.Traceparent(), c.State)
		if again == nil || *again != *c || len(c.Traceparent()) != 55 || len(c.State) > 512 {
			t.Errorf("%q, %q is %+v, and then %+v", parent, state, c, again)
		}
	})
}

// taken collects spans.
type taken []*Span

func (all *taken) take(s *Span) { *all = append(*all, s) }

func TestTracer(t *testing.T) {
	var all taken
	some, every := &Tracer{Take: all.take}, &Tracer{PerMillion: 1_000_000, Take: all.take}
	recorded := ParseTraceContext(parent, "a=1")
	other := *recorded
	other.Sampled = false
	if some.Begin(nil) != nil || every.Begin(&other) != nil || every.Child(SpanOpen, nil) != nil ||
		(*Tracer)(nil).Begin(recorded) != nil {
		t.Error("a span of a conn that is not traced")
	}
	s := some.Begin(recorded)
	if s == nil || s.TraceID != recorded.TraceID || s.Parent != recorded.SpanID || s.SpanID == recorded.SpanID ||
		s.State != "a=1" {
		t.Errorf("the span of the caller's trace is %+v", s)
	}
	root, another := every.Begin(nil), every.Begin(nil)
	if root.Parent != [8]byte{} || !root.Sampled || root.TraceID == another.TraceID || root.SpanID == another.SpanID {
		t.Errorf("two traces of our own are %+v and %+v", root, another)
	}
	child := every.Child(SpanOpen, root.Context())
	if child.TraceID != root.TraceID || child.Parent != root.SpanID || child.Name != SpanOpen {
		t.Errorf("the child is %+v", child)
	}
	child.End(Event{Target: "a:1"})
	if len(all) != 1 || all[0] != child || child.Ended.Before(child.Start) || child.Event.Target != "a:1" {
		t.Errorf("the tracer has taken %+v", all)
	}
	var off *Span
	off.End(Event{})
	if off.Context() != nil || off.Context().Traceparent() != "" {
		t.Error("a conn that is not traced has a context")
	}
}

// A visit ends its span once, with what the audit would have, and however the visit ends.
func TestVisitSpan(t *testing.T) {
	who := func() Event { return Event{Kind: EventTCP, Node: "edge1"} }
	for name, tt := range map[string]struct {
		visit func(v *Visit)
		want  Event
	}{
		"served": {func(v *Visit) { v.Opened(who); v.Ended(3, 4, nil, who) },
			Event{Kind: EventTCP, Node: "edge1", Result: ResultOK, Sent: 3, Received: 4}},
		"refused": {func(v *Visit) { v.Refused(Refusef(Refused, "no"), who) },
			Event{Kind: EventTCP, Node: "edge1", Result: "refused", Err: "refused: no"}},
		"failed": {func(v *Visit) { v.Failed(errors.New("no"), who) },
			Event{Kind: EventTCP, Node: "edge1", Result: "internal", Err: "no"}},
		"not audited": {func(v *Visit) { v.Quiet = true; v.Rejected(0, "no", 0, 0, who) },
			Event{Kind: EventTCP, Node: "edge1", Result: ResultInvalid, Err: "no"}},
	} {
		var all taken
		sink := Sink{Tracer: &Tracer{PerMillion: 1_000_000, Take: all.take}}
		v := sink.Arrived(new(DoorCounters))
		if v.Trace() == nil {
			t.Fatal("the visit is not traced")
		}
		tt.visit(&v)
		if len(all) != 1 {
			t.Errorf("%s: %d spans", name, len(all))
			continue
		}
		got := all[0].Event
		got.Seconds = 0
		if got != tt.want || all[0].Name != SpanConn {
			t.Errorf("%s: the span is %+v", name, all[0])
		}
	}
}

// While traces are off, a conn allocates nothing for them.
func TestNoTraceNoAllocations(t *testing.T) {
	var sink Sink
	counts, node := new(DoorCounters), NodeName("edge1")
	if n := testing.AllocsPerRun(100, func() {
		v := sink.Arrived(counts)
		r := Request{Node: node, Trace: v.Trace()}
		if span := sink.Tracer.Child(SpanOpen, r.Trace); span != nil || r.Trace.Traceparent() != "" {
			t.Error("a span")
		}
		who := func() Event { return Event{Node: node} }
		v.Opened(who)
		v.Ended(1, 2, nil, who)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
