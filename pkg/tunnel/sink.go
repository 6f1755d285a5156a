package tunnel

import "time"

// Sink is told what becomes of each caller of a front door. It feeds the counters of the front door, the audit, the
// tap, the last refusals and the traces. For each caller a front door makes a [Visit]:
//
//	v := sink.Arrived(counts)
//	c, err := dial()
//	if err != nil {
//		v.Refused(err, who)
//		return
//	}
//	v.Opened(who)
//	sent, received, err := Splice(ctx, caller, c)
//	v.Ended(sent, received, err, who)
//
// who returns an event that describes the caller. The Visit calls who only if the event goes anywhere, so that a conn
// costs less while the other parts are off. The zero Sink feeds the counters alone.
type Sink struct {
	Audit    Trail     // takes an event of each conn that has ended or was refused; nil: off
	Tap      Tap       // is shown each conn when it opens and when it ends; nil: off
	Refusals *Refusals // keeps the callers that were refused; nil: off
	Tracer   *Tracer   // makes a span of each conn; nil: off
}

// Tap shows conns to an operator, while tunnel tap runs.
type Tap interface {
	// Watched reports whether an operator watches. Front doors call it for each conn, so it must be fast.
	Watched() bool
	// Show must return at once: front doors call it with locks held.
	Show(Phase, Event)
}

// Phase says what has happened to a conn that a [Tap] is shown.
type Phase string

// The phases of a conn.
const (
	PhaseOpen    Phase = "open"    // the caller has got its conn
	PhaseEnd     Phase = "end"     // the conn has ended
	PhaseRefused Phase = "refused" // the caller has got no conn
)

// Watched reports whether an operator watches the tap.
func (s *Sink) Watched() bool { return s.Tap != nil && s.Tap.Watched() }

// Shows reports whether Show does anything.
func (s *Sink) Shows(phase Phase) bool {
	return s.Watched() || phase == PhaseRefused && s.Refusals != nil
}

// Show shows an event to the tap, if an operator watches. It also adds a refusal to the last refusals. The audit does
// not get the event.
func (s *Sink) Show(phase Phase, e Event) {
	if !s.Shows(phase) {
		return
	}
	if e.Time.IsZero() {
		e.Time = time.Now()
	}
	if phase == PhaseRefused && s.Refusals != nil {
		s.Refusals.Record(e)
	}
	if s.Watched() {
		s.Tap.Show(phase, e)
	}
}

// Deny records a caller that was turned away at once, in the audit, the tap and the last refusals. Strangers can cause
// such events. So the front door calls Deny at a limited rate, and counts these callers itself.
func (s *Sink) Deny(e Event) {
	s.Audit.Record(e)
	s.Show(PhaseRefused, e)
}

// Visit is one caller of a front door, from its arrival to its end. One goroutine owns it at a time. Its methods take
// a function that describes the caller: kind, node, caller and target. The rest of the [Event] is the Visit's.
type Visit struct {
	// Quiet: the audit takes no event of this visit. The owner may set it at any time.
	Quiet bool
	// Told: another visit has told the tap and the last refusals that this caller is refused. The owner may set it.
	Told bool

	opened bool // the caller has got its conn

	// Set once.
	sink   *Sink
	counts *DoorCounters
	start  time.Time
	span   *Span // nil: not traced
}

// Arrived returns the visit of a caller that arrives now.
func (s *Sink) Arrived(counts *DoorCounters) Visit { return s.ArrivedIn(nil, counts) }

// ArrivedIn is Arrived for a caller that has sent the context of a trace; nil: it has sent none.
func (s *Sink) ArrivedIn(trace *TraceContext, counts *DoorCounters) Visit {
	return Visit{sink: s, counts: counts, start: time.Now(), span: s.Tracer.Begin(trace)}
}

// Trace returns the context of the visit's span, for [Request]; nil: the visit is not traced.
func (v *Visit) Trace() *TraceContext { return v.span.Context() }

// Since returns how long ago the caller has arrived.
func (v *Visit) Since() time.Duration { return time.Since(v.start) }

// Opened tells that the caller has got its conn.
func (v *Visit) Opened(who func() Event) {
	took := v.Since()
	v.opened = true
	v.counts.Served(took)
	if !v.sink.Watched() {
		return
	}
	e := who()
	e.Result, e.Seconds = ResultOK, took.Seconds()
	v.sink.Show(PhaseOpen, e)
}

// Ended tells that the conn has ended. sent and received are bytes of payload; err is nil for a clean end.
func (v *Visit) Ended(sent, received int64, err error, who func() Event) {
	v.end(PhaseEnd, ResultOK, TextOf(err), sent, received, who)
}

// Refused tells that err is why the caller gets no conn.
func (v *Visit) Refused(err error, who func() Event) {
	v.counts.Failed(CodeOf(err))
	v.Failed(err, who)
}

// Failed is Refused without the count. It is for a caller whose later answer is counted instead.
func (v *Visit) Failed(err error, who func() Event) {
	v.end(PhaseRefused, ResultOf(err), TextOf(err), 0, 0, who)
}

// Rejected tells that the caller was refused with a code after it had sent some bytes; code 0: [ResultInvalid]. If the
// caller had got its conn, it counts as served, and the conn ends with that code.
func (v *Visit) Rejected(code Code, why string, sent, received int64, who func() Event) {
	result := ResultInvalid
	if code != 0 {
		result = code.String()
	}
	phase := PhaseEnd
	if !v.opened {
		phase = PhaseRefused
		v.counts.Failed(code)
	}
	v.end(phase, result, why, sent, received, who)
}

// end tells the audit, the tap and the last refusals, and ends the span.
func (v *Visit) end(phase Phase, result, why string, sent, received int64, who func() Event) {
	to := v.sink.Audit
	if v.Quiet {
		to = nil
	}
	shows := !v.Told && v.sink.Shows(phase)
	if to == nil && !shows && v.span == nil {
		return
	}
	e := who()
	e.Result, e.Err, e.Sent, e.Received, e.Seconds = result, why, sent, received, v.Since().Seconds()
	to.Record(e)
	if shows {
		v.sink.Show(phase, e)
	}
	v.span.End(e)
}
