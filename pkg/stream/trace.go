package stream

import "tunnel.example/tunnel/pkg/tunnel"

// eventOf says what became of a request, for its span. A nil refusal: there is a conn.
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

// endSpan ends the span of an open that was served; nil: there is none. err is why the target was not reached.
func (s *session) endSpan(span *tunnel.Span, r tunnel.Request, err error) {
	if span == nil {
		return
	}
	e := s.eventOf(r, nil)
	e.Result, e.Err = tunnel.ResultOf(err), tunnel.TextOf(err)
	span.End(e)
}
