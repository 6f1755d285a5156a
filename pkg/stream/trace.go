package stream

import "tunnel.example/tunnel/pkg/tunnel"

// eventOf describes a request and its result for its span. If refusal is nil, the request has led to a conn.
func (s *session) eventOf(r tunnel.Request, refusal *tunnel.Refusal) tunnel.Event {
	e := tunnel.Event{
		Kind: tunnel.EventKind(r.Category), Result: tunnel.ResultOK, Node: r.Node, Caller: r.Caller, Target: r.Addr,
		Session: s.pub.ID,
	}
	if refusal != nil {
		e.Result, e.Err = refusal.Code.String(), refusal.Text
	}
	return e
}

// endSpan ends the span of an open that was served. span may be nil. err is why the target was not reached; nil after
// success.
func (s *session) endSpan(span *tunnel.Span, r tunnel.Request, err error) {
	if span == nil {
		return
	}
	e := s.eventOf(r, nil)
	e.Result, e.Err = tunnel.ResultOf(err), tunnel.TextOf(err)
	span.End(e)
}
