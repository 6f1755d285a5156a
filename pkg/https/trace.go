package https

import (
	"context"
	"net/http"
	"net/http/httputil"
	"strings"

	"tunnel.example/tunnel/pkg/tunnel"
)

// The headers of W3C Trace Context, in canonical form.
const (
	traceParent = "Traceparent"
	traceState  = "Tracestate"
)

// traceOf returns the trace context in the headers of r; nil: r has none, or the cloud makes no traces.
func (f *FrontDoor) traceOf(r *http.Request) *tunnel.TraceContext {
	parent := r.Header[traceParent]
	if f.cfg.Sink.Tracer == nil || len(parent) != 1 { // a request with two traceparents is not valid
		return nil
	}
	return tunnel.ParseTraceContext(parent[0], strings.Join(r.Header[traceState], ","))
}

// passTrace sets the headers of the request to the target, so that the target's spans become children of trace. If
// trace is nil, the headers stay as the caller has sent them.
func passTrace(pr *httputil.ProxyRequest, trace *tunnel.TraceContext) {
	if trace == nil {
		return
	}
	pr.Out.Header.Set(traceParent, trace.Traceparent())
	if trace.State == "" {
		pr.Out.Header.Del(traceState) // the caller's tracestate, or the traceparent that it belongs to, is not valid
	}
}

// traceKey is the context key of the *tunnel.TraceContext of the request that a dial is for.
type traceKey struct{}

// withTrace returns ctx with trace. If trace is nil, it returns ctx.
func withTrace(ctx context.Context, trace *tunnel.TraceContext) context.Context {
	if trace == nil {
		return ctx
	}
	return context.WithValue(ctx, traceKey{}, trace)
}

// traceIn returns the trace in ctx; nil: there is none. A transport dials with the values of the request's context.
func traceIn(ctx context.Context) *tunnel.TraceContext {
	trace, _ := ctx.Value(traceKey{}).(*tunnel.TraceContext)
	return trace
}
