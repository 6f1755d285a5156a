package spans

import (
	common "go.opentelemetry.io/proto/otlp/common/v1"
	resource "go.opentelemetry.io/proto/otlp/resource/v1"
	trace "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"

	"tunnel.example/tunnel/pkg/tunnel"
)

// encode returns the body of a request. TracesData has the same bytes as OTLP's ExportTraceServiceRequest.
func (e *Exporter) encode(batch []*tunnel.Span) ([]byte, error) {
	all := make([]*trace.Span, 0, len(batch))
	for _, s := range batch {
		all = append(all, spanOf(s))
	}
	return proto.Marshal(&trace.TracesData{ResourceSpans: []*trace.ResourceSpans{{
		Resource: &resource.Resource{Attributes: []*common.KeyValue{
			text("service.name", e.cfg.Service),
			text("service.version", e.cfg.Version),
			text("service.instance.id", e.cfg.Instance),
		}},
		ScopeSpans: []*trace.ScopeSpans{{
			Scope: &common.InstrumentationScope{Name: "tunnel.example/tunnel"}, Spans: all,
		}},
	}}})
}

// spanOf returns a span as OTLP has it.
func spanOf(s *tunnel.Span) *trace.Span {
	t := &trace.Span{
		TraceId: s.TraceID[:], SpanId: s.SpanID[:], TraceState: s.State, Name: string(s.Name),
		Kind:              trace.Span_SPAN_KIND_SERVER, // it serves a caller, an open, or the open of another replica
		StartTimeUnixNano: uint64(s.Start.UnixNano()),  //nolint:gosec // the time is after 1970
		EndTimeUnixNano:   uint64(s.Ended.UnixNano()),  //nolint:gosec // the time is after 1970
		Attributes:        attributesOf(&s.Event),
	}
	if s.Name == tunnel.SpanOpen {
		t.Kind = trace.Span_SPAN_KIND_CLIENT
	}
	if s.Parent != [8]byte{} {
		t.ParentSpanId = s.Parent[:]
	}
	if s.Sampled {
		t.Flags = 1
	}
	if s.Event.Result != tunnel.ResultOK {
		t.Status = &trace.Status{
			Code: trace.Status_STATUS_CODE_ERROR, Message: s.Event.Result,
		}
		if s.Event.Err != "" {
			t.Status.Message += ": " + tunnel.Printable(s.Event.Err)
		}
	}
	return t
}

// attributesOf returns what an event says. The names are those of the audit, behind a prefix.
func attributesOf(e *tunnel.Event) []*common.KeyValue {
	var all []*common.KeyValue
	for _, a := range []struct{ name, value string }{
		{"event", string(e.Kind)},
		{"result", e.Result},
		{"node", string(e.Node)},
		{"caller", e.Caller},
		{"remote", e.Remote},
		{"frontend", e.Door},
		{"target", e.Target},
		{"method", e.Method},
		{"path", e.Path},
		{"session", e.Session},
		{"err", e.Err},
	} {
		if a.value != "" {
			all = append(all, text(prefix+a.name, tunnel.Printable(a.value)))
		}
	}
	for _, a := range []struct {
		name  string
		value int64
	}{{"status", int64(e.Status)}, {"sent_bytes", e.Sent}, {"received_bytes", e.Received}} {
		if a.value != 0 {
			value := &common.AnyValue{Value: &common.AnyValue_IntValue{IntValue: a.value}}
			all = append(all, &common.KeyValue{Key: prefix + a.name, Value: value})
		}
	}
	return all
}

// prefix begins the name of each attribute of ours.
const prefix = "tunnel."

// texts returns the texts of an event that callers and peers choose.
func texts(e *tunnel.Event) []*string {
	return []*string{&e.Caller, &e.Remote, &e.Target, &e.Method, &e.Path, &e.Err}
}

func text(key, value string) *common.KeyValue {
	return &common.KeyValue{Key: key, Value: &common.AnyValue{Value: &common.AnyValue_StringValue{StringValue: value}}}
}
