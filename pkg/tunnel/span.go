package tunnel

import (
	"encoding/binary"
	"encoding/hex"
	"math/rand/v2"
	"strings"
	"time"
)

// Tracer makes spans: the timed parts of conns, for OpenTelemetry. A nil Tracer makes none, and a conn then costs
// nothing more. Any goroutine may call its methods.
//
//	span := tracer.Child(SpanOpen, r.Trace) // nil: not traced
//	if span != nil {
//		r.Trace = &span.TraceContext
//	}
//	c, err := dial(r)
//	span.End(Event{Node: r.Node, Target: r.Addr, Result: ResultOf(err), Err: TextOf(err)})
type Tracer struct {
	// PerMillion is how many of a million conns begin a trace, if their caller sends no context of a trace.
	PerMillion int
	// Take gets each span that has ended. It must return at once: front doors end spans with locks held.
	Take func(*Span)
}

// SpanName says what a span is.
type SpanName string

// The spans of a conn. docs/traces.md says which span is the parent of which.
const (
	SpanConn  SpanName = "tunnel.conn"  // a conn, from the arrival of its caller to its end
	SpanOpen  SpanName = "tunnel.open"  // asking the other end of a session to dial
	SpanRelay SpanName = "tunnel.relay" // serving the open of another replica
	SpanDial  SpanName = "tunnel.dial"  // the edge's dial of the target
)

// Span is one timed part of a conn. One goroutine owns it until End. The methods of a nil Span do nothing.
type Span struct {
	TraceContext         // the context of this span, for its children
	Parent       [8]byte // id of the parent; zero: none
	Name         SpanName
	Start        time.Time

	// Set by End.
	Ended time.Time
	Event Event // describes the span's part of the conn and its result; the event's times are not set

	tracer *Tracer
}

// TraceContext identifies a span to its children, as the header traceparent of HTTP does (W3C Trace Context). It
// never changes.
type TraceContext struct {
	TraceID [16]byte
	SpanID  [8]byte
	Sampled bool   // the trace is recorded
	State   string // the header tracestate, for systems that record the trace; "": none
}

// Begin begins the span of a conn. parent is the context that the caller has sent; nil: none. Begin returns nil
// if the conn is not traced: the caller does not record its trace, or chance has not chosen the conn.
func (t *Tracer) Begin(parent *TraceContext) *Span {
	if parent != nil {
		return t.Child(SpanConn, parent)
	}
	if t == nil || rand.IntN(1_000_000) >= t.PerMillion {
		return nil
	}
	s := &Span{Name: SpanConn, Start: time.Now(), tracer: t}
	s.Sampled = true
	binary.BigEndian.PutUint64(s.TraceID[:], rand.Uint64())
	binary.BigEndian.PutUint64(s.TraceID[8:], rand.Uint64())
	s.SpanID = newSpanID()
	return s
}

// Child begins a span below parent. It returns nil if parent is nil, or is of a trace that is not recorded.
func (t *Tracer) Child(name SpanName, parent *TraceContext) *Span {
	if t == nil || parent == nil || !parent.Sampled {
		return nil
	}
	s := &Span{TraceContext: *parent, Parent: parent.SpanID, Name: name, Start: time.Now(), tracer: t}
	s.SpanID = newSpanID()
	return s
}

// newSpanID returns a random id, which is not zero.
func newSpanID() (id [8]byte) {
	binary.BigEndian.PutUint64(id[:], 1+rand.Uint64N(1<<64-1))
	return id
}

// Context returns the context that children of s need; nil if s is nil.
func (s *Span) Context() *TraceContext {
	if s == nil {
		return nil
	}
	return &s.TraceContext
}

// End ends the span. e says what became of it.
func (s *Span) End(e Event) {
	if s == nil {
		return
	}
	s.Ended, s.Event = time.Now(), e
	s.tracer.Take(s)
}

// maxTraceState is the longest tracestate that is kept, in bytes. W3C Trace Context, section 3.3.1.5, asks systems to
// keep at least this much.
const maxTraceState = 512

// ParseTraceContext parses the headers traceparent and tracestate. It returns nil if traceparent is not valid. It
// ignores a tracestate that is too long or is not printable ASCII.
func ParseTraceContext(parent, state string) *TraceContext {
	// Version 00 is version-trace-span-flags: 2, 32, 16 and 2 hexadecimal digits. A later version may append a dash
	// and more.
	const length = 55
	switch {
	case len(parent) < length, parent[2] != '-', parent[35] != '-', parent[52] != '-':
		return nil
	case len(parent) > length && (parent[:2] == "00" || parent[length] != '-'):
		return nil
	}
	var version, flags [1]byte
	var c TraceContext
	ok := unhex(version[:], parent[:2]) && unhex(c.TraceID[:], parent[3:35]) && unhex(c.SpanID[:], parent[36:52]) &&
		unhex(flags[:], parent[53:length])
	if !ok || version[0] == 0xff || c.TraceID == [16]byte{} || c.SpanID == [8]byte{} {
		return nil
	}
	c.Sampled = flags[0]&1 != 0
	if len(state) <= maxTraceState && !strings.ContainsFunc(state, func(r rune) bool { return r < ' ' || r > '~' }) {
		c.State = strings.Clone(state) // without the clone, state could keep a longer string in memory
	}
	return &c
}

// unhex decodes lower-case hexadecimal digits.
func unhex(to []byte, from string) bool {
	if strings.ToLower(from) != from {
		return false
	}
	_, err := hex.Decode(to, []byte(from))
	return err == nil
}

// Traceparent returns the header traceparent; "" for a nil context.
func (c *TraceContext) Traceparent() string {
	if c == nil {
		return ""
	}
	flags := "-00"
	if c.Sampled {
		flags = "-01"
	}
	return "00-" + hex.EncodeToString(c.TraceID[:]) + "-" + hex.EncodeToString(c.SpanID[:]) + flags
}
