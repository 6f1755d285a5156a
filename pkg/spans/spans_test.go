package spans

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	trace "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/internal/testkit/leaks"
	"tunnel.example/tunnel/pkg/tunnel"
)

func TestMain(m *testing.M) { leaks.Main(m) }

// collector answers requests. It is an http.RoundTripper, so that time can be replaced.
type collector struct {
	t      *testing.T
	answer func(ctx context.Context) (status int, err error)
	says   string              // the body of its answers
	bodies []*trace.TracesData // of all requests
}

func (c *collector) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Method != http.MethodPost || r.URL.String() != "http://collector:4318/v1/traces" ||
		r.Header.Get("Content-Type") != "application/x-protobuf" {
		c.t.Errorf("the request is %s %s, %v", r.Method, r.URL, r.Header)
	}
	body, err := io.ReadAll(r.Body)
	data := new(trace.TracesData)
	if err = errors.Join(err, proto.Unmarshal(body, data)); err != nil {
		c.t.Error(err)
	}
	c.bodies = append(c.bodies, data)
	status, err := c.answer(r.Context())
	if err != nil {
		return nil, err
	}
	says := io.NopCloser(strings.NewReader(c.says))
	return &http.Response{StatusCode: status, Status: http.StatusText(status), Body: says}, nil
}

// spansIn returns the spans of a request.
func spansIn(d *trace.TracesData) []*trace.Span {
	return d.GetResourceSpans()[0].GetScopeSpans()[0].GetSpans()
}

// newExporter returns a started exporter, its collector, and a tracer that feeds it.
func newExporter(t *testing.T) (*Exporter, *collector, *tunnel.Tracer, *testkit.Log) {
	log, lines := testkit.NewLog()
	e := New(Config{
		Endpoint: "http://collector:4318/v1/traces",
		Service:  "tunnel-cloud", Version: "tunnel 1", Instance: "cloud-0", Log: log,
	})
	c := &collector{t: t, answer: func(context.Context) (int, error) { return http.StatusOK, nil }}
	e.client.Transport = c
	e.Start()
	return e, c, &tunnel.Tracer{PerMillion: 1_000_000, Take: e.Take}, lines
}

// A span arrives with what the audit would say of the conn. Its texts are short, and printable.
func TestSpan(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, c, tracer, _ := newExporter(t)
		parent := tunnel.ParseTraceContext("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "a=1")
		s := tracer.Begin(parent)
		time.Sleep(3 * time.Second)
		s.End(tunnel.Event{
			Kind: tunnel.EventExec, Result: "refused", Node: "edge1", Caller: "kube\x1b[31m\xff", Remote: "10.0.0.7:1",
			Door: "10.0.0.5:10250", Target: "127.0.0.1:10250", Method: "POST", Path: strings.Repeat("/", 600), Status: 502,
			Sent: 3, Received: 4, Err: "nothing listens",
		})
		time.Sleep(gatherTime)
		synctest.Wait()
		if len(c.bodies) != 1 || len(spansIn(c.bodies[0])) != 1 {
			t.Fatalf("the collector has %v", c.bodies)
		}
		from := make(map[string]string)
		for _, a := range c.bodies[0].GetResourceSpans()[0].GetResource().GetAttributes() {
			from[a.GetKey()] = a.GetValue().GetStringValue()
		}
		if from["service.name"] != "tunnel-cloud" || from["service.version"] != "tunnel 1" ||
			from["service.instance.id"] != "cloud-0" {
			t.Errorf("the resource is %v", from)
		}
		got := spansIn(c.bodies[0])[0]
		if !bytes.Equal(got.GetTraceId(), parent.TraceID[:]) || !bytes.Equal(got.GetParentSpanId(), parent.SpanID[:]) ||
			!bytes.Equal(got.GetSpanId(), s.SpanID[:]) || got.GetTraceState() != "a=1" || got.GetName() != "tunnel.conn" ||
			got.GetEndTimeUnixNano()-got.GetStartTimeUnixNano() != 3e9 ||
			got.GetStatus().GetCode() != trace.Status_STATUS_CODE_ERROR ||
			got.GetStatus().GetMessage() != "refused: nothing listens" {
			t.Errorf("the span is %v", got)
		}
		texts, numbers := make(map[string]string), make(map[string]int64)
		for _, a := range got.GetAttributes() {
			texts[a.GetKey()], numbers[a.GetKey()] = a.GetValue().GetStringValue(), a.GetValue().GetIntValue()
		}
		for name, want := range map[string]string{
			"event": "exec", "result": "refused", "node": "edge1", "caller": "kube?[31m?", "remote": "10.0.0.7:1",
			"frontend": "10.0.0.5:10250", "target": "127.0.0.1:10250", "method": "POST",
			"path": strings.Repeat("/", 512) + "…", "err": "nothing listens",
		} {
			if texts["tunnel."+name] != want {
				t.Errorf("%s is %q", name, texts["tunnel."+name])
			}
		}
		if numbers["tunnel.status"] != 502 || numbers["tunnel.sent_bytes"] != 3 || numbers["tunnel.received_bytes"] != 4 {
			t.Errorf("the numbers are %v", numbers)
		}
		if err := e.Close(); err != nil || e.sent.Load() != 1 || e.lost.Load() != 0 {
			t.Errorf("%v, %d sent, %d lost", err, e.sent.Load(), e.lost.Load())
		}
	})
}

// A collector that is away for a minute misses nothing. The log warns at a limited rate.
func TestCollectorAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, c, tracer, log := newExporter(t)
		back := time.Now().Add(50 * time.Second)
		c.answer = func(context.Context) (int, error) {
			switch left := time.Until(back); {
			case left > 20*time.Second:
				return 0, errors.New("connection refused")
			case left > 0:
				return http.StatusServiceUnavailable, nil
			}
			return http.StatusOK, nil
		}
		const n = 2 * maxBatch
		for range n {
			tracer.Begin(nil).End(tunnel.Event{Result: tunnel.ResultOK})
		}
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		if e.sent.Load() != n || e.lost.Load() != 0 {
			t.Errorf("%d spans were sent, and %d are lost", e.sent.Load(), e.lost.Load())
		}
		if away := log.Lines("cannot be reached"); len(away) != 2 { // one for each kind of failure
			t.Errorf("%d warnings: %v", len(away), away)
		}
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
}

// A collector that takes batches, but more slowly than spans come, does not fill the log: spans are lost between
// requests that succeed.
func TestCollectorSlow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, c, tracer, log := newExporter(t)
		c.answer = func(context.Context) (int, error) {
			time.Sleep(time.Second)
			return http.StatusOK, nil
		}
		for range 60 {
			for range 2 * queueLen {
				tracer.Begin(nil).End(tunnel.Event{Result: tunnel.ResultOK})
			}
			time.Sleep(time.Second)
		}
		lines := log.Lines("spans are lost")
		e.Close() // the sender has ended
		if len(c.bodies) < 30 || len(lines) == 0 || len(lines) > 10 {
			t.Errorf("%d requests, %d warnings: %v", len(c.bodies), len(lines), lines)
		}
	})
}

// If the endpoint is the port for gRPC, the log says so. The spans wait for a mended endpoint.
func TestCollectorSpeaksGRPC(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	served := make(chan error, 1) // capacity 1: Serve need not wait for the test
	go func() { served <- server.Serve(ln) }()
	log, lines := testkit.NewLog()
	e := New(Config{Endpoint: "http://" + ln.Addr().String() + "/v1/traces", Service: "tunnel-cloud", Log: log})
	e.Start()
	(&tunnel.Tracer{PerMillion: 1_000_000, Take: e.Take}).Begin(nil).End(tunnel.Event{Result: tunnel.ResultOK})
	testkit.Within(t, 20*time.Second, "the log names the port for HTTP", func() error {
		if len(lines.Lines("trying again")) == 0 || len(lines.Lines("http://collector:4318?")) == 0 {
			return fmt.Errorf("%v", lines)
		}
		return nil
	})
	if err = e.Close(); err == nil {
		t.Error("the span was sent")
	}
	server.Stop()
	if err = <-served; err != nil {
		t.Error(err)
	}
}

// The log asks about the port after answers that the wrong port gives, and after no others.
func TestCollectorRefusesForOtherReasons(t *testing.T) {
	for status, want := range map[int]int{
		http.StatusNotFound: 1, http.StatusUnsupportedMediaType: 1,
		http.StatusUnauthorized: 0, http.StatusRequestEntityTooLarge: 0, http.StatusInternalServerError: 0,
	} {
		synctest.Test(t, func(t *testing.T) {
			e, c, tracer, log := newExporter(t)
			c.answer = func(context.Context) (int, error) { return status, nil }
			tracer.Begin(nil).End(tunnel.Event{Result: tunnel.ResultOK})
			time.Sleep(time.Minute)
			if len(log.Lines("spans are lost")) != 1 || len(log.Lines("the OTLP port for HTTP")) != want {
				t.Errorf("after %d: %v", status, log)
			}
			e.Close() // the span is lost already
		})
	}
}

// While the collector is stuck, spans wait up to a bound, and further ones are lost and counted. No conn waits. Close
// gives up after a while.
func TestCollectorStuck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, c, tracer, log := newExporter(t)
		c.answer = func(ctx context.Context) (int, error) {
			<-ctx.Done()
			return 0, ctx.Err()
		}
		began := time.Now()
		const n = 3 * queueLen
		for range n {
			tracer.Begin(nil).End(tunnel.Event{Result: tunnel.ResultOK})
		}
		if time.Since(began) != 0 {
			t.Error("a conn has waited for the collector")
		}
		lost := e.lost.Load()
		if lost < n-queueLen-maxBatch || len(log.Lines("spans are lost")) != 1 {
			t.Errorf("%d are lost; the log has %v", lost, log)
		}
		began = time.Now()
		if err := e.Close(); err == nil || time.Since(began) > drainTime {
			t.Errorf("%v after %v", err, time.Since(began))
		}
		if e.lost.Load() != n {
			t.Errorf("%d of %d spans are lost", e.lost.Load(), n)
		}
	})
}

// If the collector refuses a batch, the exporter does not send that batch again, and the log says what to do. Close
// sends the spans that are still in the queue.
func TestCollectorRefuses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e, c, tracer, log := newExporter(t)
		c.answer = func(context.Context) (int, error) { return http.StatusNotFound, nil }
		tracer.Begin(nil).End(tunnel.Event{Result: tunnel.ResultOK})
		time.Sleep(time.Minute)
		synctest.Wait()
		if e.lost.Load() != 1 || len(c.bodies) != 1 || len(log.Lines("the OTLP port for HTTP of a collector")) != 1 {
			t.Errorf("%d lost, %d requests: %v", e.lost.Load(), len(c.bodies), log)
		}
		c.answer = func(context.Context) (int, error) { return http.StatusOK, nil }
		tracer.Begin(nil).End(tunnel.Event{Result: tunnel.ResultOK})
		if err := e.Close(); err != nil || e.sent.Load() != 1 {
			t.Errorf("%v, %d sent", err, e.sent.Load())
		}
		tracer.Begin(nil).End(tunnel.Event{}) // a conn that ends late disturbs nobody
	})
}
