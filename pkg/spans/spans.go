// Package spans sends the spans of conns to an OpenTelemetry collector, by OTLP over HTTP.
//
//	exporter := spans.New(spans.Config{Endpoint: "http://collector:4318/v1/traces", Service: "tunnel-cloud", Log: log})
//	exporter.Start()
//	defer exporter.Close()
//	door.Sink.Tracer = &tunnel.Tracer{PerMillion: 10_000, Take: exporter.Take}
//
// Take never waits for the network: one goroutine, the sender, takes the spans from a queue and sends them in
// batches. While the collector cannot be reached, the sender tries again, and the queue fills. Spans that find the
// queue full are lost, and so are spans that the collector refuses. The log says so, and tunnel_spans_lost_total
// counts them.
//
// The messages of OTLP are those of go.opentelemetry.io/proto/otlp. OpenTelemetry's SDK is not used: with its
// exporter it makes the program 1.6 MB larger, reads a dozen environment variables, and does not count the spans that
// it drops.
package spans

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptrace"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"tunnel.example/tunnel/pkg/tunnel"
)

const (
	// queueLen is how many spans may wait for the sender. A usual span has half a kilobyte.
	queueLen = 4096
	// maxBatch is how many spans one request has at most, and gatherTime how long the sender waits for more.
	maxBatch   = 512
	gatherTime = time.Second
	// postTime bounds one request.
	postTime = 10 * time.Second
	// The sender waits for minPause after a failed request, and twice as long after each further one.
	minPause, maxPause = time.Second, 30 * time.Second
	// drainTime is how long Close waits for the sender. A pod has 30 s to stop, and conns may use most of it.
	drainTime = 2 * time.Second
	// maxText bounds each text of a span, in bytes: a caller chooses paths and names.
	maxText = 512
)

// Config configures an Exporter.
type Config struct {
	Endpoint string // URL to which spans are posted
	// Service, Version and Instance are the attributes service.name, service.version and service.instance.id.
	Service, Version, Instance string
	Log                        *slog.Logger
}

// Exporter sends spans. Its methods are safe for concurrent use.
type Exporter struct {
	// Set once.
	cfg    Config
	client *http.Client
	queue  chan *tunnel.Span  // Take sends, the sender receives; never closed
	stop   chan struct{}      // closed by Close
	ended  chan struct{}      // closed by the sender when it ends
	close  func()             // closes stop, once
	cancel context.CancelFunc // ends the request under way; set by Start

	sent, lost atomic.Uint64
	failing    tunnel.Repeats // lines about requests; a request that succeeds begins anew
	losing     tunnel.Repeats // lines about lost spans; a slow collector loses spans between requests that succeed
}

// New returns an Exporter. It starts nothing: Start does.
func New(cfg Config) *Exporter {
	e := &Exporter{
		cfg: cfg, queue: make(chan *tunnel.Span, queueLen), stop: make(chan struct{}), ended: make(chan struct{}),
		client: &http.Client{
			// No proxy of the environment: the configuration alone says where spans go.
			Transport:     &http.Transport{MaxIdleConns: 1, IdleConnTimeout: time.Minute, TLSHandshakeTimeout: postTime},
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
	}
	e.close = sync.OnceFunc(func() { close(e.stop) })
	return e
}

// Start starts the sender. The caller calls it once, and then Close.
func (e *Exporter) Start() {
	ctx, cancel := context.WithCancel(context.Background())
	e.cancel = cancel
	go e.run(ctx)
}

// Close sends the spans that wait, for two seconds at most. The error says how many it has given up.
func (e *Exporter) Close() error {
	lost := e.lost.Load()
	e.close()
	late := time.AfterFunc(drainTime, e.cancel)
	defer late.Stop()
	<-e.ended
	e.cancel()
	e.client.CloseIdleConnections()
	if lost = e.lost.Load() - lost; lost > 0 {
		return fmt.Errorf("%d spans are lost: the collector did not take them", lost)
	}
	return nil
}

// Take queues a span that has ended. It never blocks. A [tunnel.Tracer] calls it.
func (e *Exporter) Take(s *tunnel.Span) {
	for _, text := range texts(&s.Event) {
		if len(*text) > maxText {
			*text = (*text)[:maxText] + "…" // a copy: the queue does not keep the long text
		}
	}
	select {
	case e.queue <- s:
	default:
		e.lose(1, errFull)
	}
}

var (
	errFull    = fmt.Errorf("%d spans wait already", queueLen)
	errPartial = errors.New("the collector has rejected some spans of a batch: its log may say why")
)

// lose counts lost spans, and logs them at a limited rate.
func (e *Exporter) lose(n int, err error) {
	e.lost.Add(uint64(n)) //nolint:gosec // a count
	if skipped, ok := e.losing.Allow(err.Error()); ok {
		e.cfg.Log.Warn("spans are lost", "err", err, "skipped", skipped)
	}
}

// run sends the queued spans, batch by batch. It returns once Close has been called and the queue is empty.
func (e *Exporter) run(ctx context.Context) {
	defer close(e.ended)
	for more := true; more; {
		var batch []*tunnel.Span
		if batch, more = e.gather(); len(batch) > 0 {
			e.send(ctx, batch)
		}
	}
}

// gather waits for a span, and returns it with those that come soon after it. more is false when Close was called and
// the queue is empty.
func (e *Exporter) gather() (batch []*tunnel.Span, more bool) {
	var late <-chan time.Time // nil: there is no span yet
	for len(batch) < maxBatch {
		select {
		case s := <-e.queue:
			if batch = append(batch, s); late == nil {
				late = time.After(gatherTime)
			}
		case <-late:
			return batch, true
		case <-e.stop:
			select {
			case s := <-e.queue:
				batch = append(batch, s)
			default:
				return batch, false
			}
		}
	}
	return batch, true
}

// send posts a batch until the collector takes or refuses it. After Close it posts once.
func (e *Exporter) send(ctx context.Context, batch []*tunnel.Span) {
	body, err := e.encode(batch)
	if err != nil {
		e.lose(len(batch), err)
		return
	}
	for pause := minPause; ; pause = min(2*pause, maxPause) {
		answer, err := e.post(ctx, body)
		if err == nil {
			rejected := rejectedBy(answer, len(batch))
			e.sent.Add(uint64(len(batch) - rejected)) //nolint:gosec // a count
			e.failing.Reset()
			if rejected > 0 {
				e.lose(rejected, errPartial)
			}
			return
		}
		if _, refused := errors.AsType[*refusedError](err); refused || tunnel.IsClosed(e.stop) {
			e.lose(len(batch), err)
			return
		}
		if skipped, ok := e.failing.Allow(err.Error()); ok {
			e.cfg.Log.Warn("the collector of spans cannot be reached; trying again", "err", err, "skipped", skipped)
		}
		select {
		case <-time.After(pause):
		case <-e.stop:
		}
	}
}

// isThePort asks about the most usual mistake: 4317 is the port for gRPC.
const isThePort = "is that the OTLP port for HTTP of a collector, such as http://collector:4318?"

// refusedError is the error of a batch that the collector does not want, so that another try has no use.
type refusedError struct {
	endpoint string
	answer   *http.Response
}

func (e *refusedError) Error() string {
	text := fmt.Sprintf("%s answered %s", e.endpoint, e.answer.Status)
	switch e.answer.StatusCode {
	// A server of HTTP that does not know OTLP, or a server of gRPC behind TLS.
	case http.StatusNotFound, http.StatusMethodNotAllowed, http.StatusUnsupportedMediaType:
		text += ": " + isThePort
	}
	return text
}

// post posts a batch once. It returns the answer of a collector that has taken the batch.
func (e *Exporter) post(ctx context.Context, body []byte) (answer []byte, err error) {
	ctx, cancel := context.WithTimeout(ctx, postTime)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, e.cfg.Endpoint, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	r.Header.Set("Content-Type", "application/x-protobuf")
	r.Header.Set("User-Agent", strings.ReplaceAll(e.cfg.Version, " ", "/"))
	var answered atomic.Bool // the transport's goroutine may outlive Do
	res, err := e.client.Do(r.WithContext(httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		GotFirstResponseByte: func() { answered.Store(true) },
	})))
	switch {
	case err != nil && answered.Load(): // it is not HTTP, but the frames of gRPC, for example
		return nil, fmt.Errorf("%w: %s", err, isThePort)
	case err != nil:
		return nil, err
	}
	defer res.Body.Close()
	// To the end, so that the connection is used again. An answer that breaks off says nothing about spans.
	answer, _ = io.ReadAll(io.LimitReader(res.Body, 64<<10))
	switch res.StatusCode {
	case http.StatusOK, http.StatusAccepted, http.StatusNoContent:
		return answer, nil
	// OTLP's list of answers after which the sender tries again.
	case http.StatusTooManyRequests, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return nil, fmt.Errorf("%s answered %s", e.cfg.Endpoint, res.Status)
	}
	return nil, &refusedError{e.cfg.Endpoint, res}
}

// Collector returns the metrics of the exporter.
func (e *Exporter) Collector() prometheus.Collector {
	count := func(name, help string, n *atomic.Uint64) prometheus.Collector {
		return prometheus.NewCounterFunc(prometheus.CounterOpts{Name: name, Help: help},
			func() float64 { return float64(n.Load()) })
	}
	return collectors{
		count("tunnel_spans_sent_total", "Spans that the collector has taken.", &e.sent),
		count("tunnel_spans_lost_total", "Spans that could not be sent to the collector.", &e.lost),
	}
}

// collectors are several collectors as one.
type collectors []prometheus.Collector

// Describe implements prometheus.Collector.
func (all collectors) Describe(ch chan<- *prometheus.Desc) {
	for _, c := range all {
		c.Describe(ch)
	}
}

// Collect implements prometheus.Collector.
func (all collectors) Collect(ch chan<- prometheus.Metric) {
	for _, c := range all {
		c.Collect(ch)
	}
}
