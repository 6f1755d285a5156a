package https

import (
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/tunnel"
)

// traced is what a front door and a kubelet have seen of traces.
type traced struct {
	mu      sync.Mutex
	spans   []*tunnel.Span
	headers []http.Header // of requests to the kubelet
}

func (all *traced) take(s *tunnel.Span) {
	all.mu.Lock()
	defer all.mu.Unlock()
	all.spans = append(all.spans, s)
}

func (all *traced) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	all.mu.Lock()
	defer all.mu.Unlock()
	all.headers = append(all.headers, r.Header.Clone())
	io.WriteString(w, "pong")
}

// next waits for n spans, and returns the last one and the headers of the last request.
func (all *traced) next(t *testing.T, n int) (s *tunnel.Span, h http.Header) {
	t.Helper()
	testkit.Eventually(t, "the span has ended", func() bool {
		all.mu.Lock()
		defer all.mu.Unlock()
		return len(all.spans) >= n && len(all.headers) > 0
	})
	all.mu.Lock()
	defer all.mu.Unlock()
	if len(all.spans) != n {
		t.Fatalf("%d spans, want %d", len(all.spans), n)
	}
	if n > 0 {
		s = all.spans[n-1]
	}
	return s, all.headers[len(all.headers)-1]
}

// A request's span is a child of its caller's, and the kubelet's is a child of the request's. A header that is not
// valid begins a new trace. The query is in no span.
func TestTraceContext(t *testing.T) {
	const id, valid = "4bf92f3577b34da6a3ce929d0e0e4736", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
	all := new(traced)
	r := newRig(t, all, func(_ *rig, c *Config) {
		c.Sink.Tracer = &tunnel.Tracer{PerMillion: 1_000_000, Take: all.take}
	}).start()
	client := r.client(r.caller("127.0.0.1"), true)
	for i, tt := range []struct {
		name           string
		parents, state []string
		child          bool   // of the caller's trace
		passed         string // tracestate
	}{
		{"a valid trace", []string{valid}, []string{"a=1", "b=2"}, true, "a=1,b=2"},
		{"no trace", nil, nil, false, ""},
		{"two parents", []string{valid, valid}, []string{"a=1"}, false, ""},
		{"a wrong parent", []string{strings.Repeat("f", 9000)}, []string{"a=1"}, false, ""},
		{"a state that is too long", []string{valid}, []string{strings.Repeat("x", 600)}, true, ""},
	} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost,
			"https://edge1/exec/ns/pod/c?command=echo+s3cret", nil)
		must(t, err)
		req.Header[traceParent], req.Header[traceState] = tt.parents, tt.state
		res, err := client.Do(req)
		must(t, err)
		io.Copy(io.Discard, res.Body)
		res.Body.Close()
		s, h := all.next(t, i+1)
		if got := h.Get(traceParent); got != s.Traceparent() || strings.Contains(got, id) != tt.child {
			t.Errorf("%s: the kubelet gets %q, and the span is %q", tt.name, got, s.Traceparent())
		}
		if (s.Parent != [8]byte{}) != tt.child {
			t.Errorf("%s: the parent of the span is %x", tt.name, s.Parent)
		}
		if got := strings.Join(h[traceState], ","); got != tt.passed {
			t.Errorf("%s: the kubelet gets the state %.40q", tt.name, got)
		}
		e := s.Event
		if e.Kind != tunnel.EventExec || e.Path != "/exec/ns/pod/c" || e.Node != "edge1" || e.Status != 200 ||
			e.Received == 0 {
			t.Errorf("%s: the span is %+v", tt.name, e)
		}
	}
	if n := len(r.tunnel.requests()); n == 0 || r.tunnel.requests()[0].Trace == nil {
		t.Error("the dial does not belong to the trace")
	}
}

// While traces are off, or the caller does not record its trace, its headers pass as they are.
func TestTraceContextUnchanged(t *testing.T) {
	for name, tracer := range map[string]*tunnel.Tracer{
		"off": nil, "not recorded": {PerMillion: 1_000_000, Take: func(*tunnel.Span) { t.Error("a span") }},
	} {
		all := new(traced)
		r := newRig(t, all, func(_ *rig, c *Config) { c.Sink.Tracer = tracer }).start()
		want := "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"
		if tracer == nil {
			want = "any text"
		}
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://edge1/", nil)
		must(t, err)
		req.Header[traceParent], req.Header[traceState] = []string{want}, []string{"a=1"}
		res, err := r.client(r.caller("127.0.0.1"), false).Do(req)
		must(t, err)
		io.Copy(io.Discard, res.Body)
		res.Body.Close()
		_, h := all.next(t, 0)
		if h.Get(traceParent) != want || h.Get(traceState) != "a=1" {
			t.Errorf("%s: the kubelet gets %v", name, h)
		}
	}
}
