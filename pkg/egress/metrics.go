package egress

import (
	"context"
	"net"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"tunnel/pkg/konnectivity"
	"tunnel/pkg/tunnel"
)

// resultOK is what metrics call a dial that led to a conn; the others have the code of the
// refusal.
const resultOK = "ok"

// The protocols of the front door, as metrics show them.
const (
	doorGRPC    = "grpc"
	doorConnect = "httpconnect"
)

// metrics counts what comes in. Its labels hold nothing that a caller can choose.
type metrics struct {
	dials    *prometheus.CounterVec
	duration *prometheus.HistogramVec
	now      map[string]*inFlight // by door; set once
	gauges   []prometheus.Collector
	old      *konnectivityMetrics // nil: not wanted
}

// inFlight is what a door has to do with now.
type inFlight struct{ dials, conns atomic.Int64 }

// buckets are for dials, in seconds: from a node next door to kube-apiserver's patience.
func buckets() []float64 { return []float64{0.002, 0.005, 0.025, 0.1, 0.5, 2.5, 10, 20} }

func newMetrics() *metrics {
	m := &metrics{
		now: map[string]*inFlight{doorGRPC: {}, doorConnect: {}},
		dials: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "tunnel_egress_dials_total", Help: "Dials that callers of the egress front door have asked for, by what came of them: ok, or the code of the refusal.",
		}, []string{"door", "result"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "tunnel_egress_dial_duration_seconds", Help: "How long dials took that led to a conn.", Buckets: buckets(),
		}, []string{"door"}),
	}
	for door, now := range m.now {
		// All results, those that never happened too: an alert on a rate needs the zero.
		m.dials.WithLabelValues(door, resultOK)
		for _, code := range tunnel.Codes() {
			m.dials.WithLabelValues(door, code.String())
		}
		label := prometheus.Labels{"door": door}
		m.gauges = append(m.gauges,
			gauge("tunnel_egress_dials_pending", "Dials under way.", label, func() float64 { return float64(now.dials.Load()) }),
			gauge("tunnel_egress_conns", "Conns that are open.", label, func() float64 { return float64(now.conns.Load()) }))
	}
	return m
}

func gauge(name, help string, labels prometheus.Labels, f func() float64) prometheus.Collector {
	return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help, ConstLabels: labels}, f)
}

// Describe implements prometheus.Collector.
func (m *metrics) Describe(ch chan<- *prometheus.Desc) { prometheus.DescribeByCollect(m, ch) }

// Collect implements prometheus.Collector.
func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	m.dials.Collect(ch)
	m.duration.Collect(ch)
	for _, g := range m.gauges {
		g.Collect(ch)
	}
	if m.old != nil {
		m.old.collect(ch)
	}
}

// Collector shows what comes in.
func (f *FrontDoor) Collector() prometheus.Collector { return f.metrics }

// dial is the chooser's, counted.
func (f *FrontDoor) dial(ctx context.Context, door, addr, caller string) (net.Conn, error) {
	m := f.metrics
	m.now[door].dials.Add(1)
	defer m.now[door].dials.Add(-1)
	start := time.Now()
	c, err := f.chooser.dial(ctx, addr, caller)
	took := time.Since(start).Seconds()
	result := resultOK
	if err == nil {
		m.duration.WithLabelValues(door).Observe(took)
	} else {
		result = tunnel.CodeOf(err).String()
	}
	m.dials.WithLabelValues(door, result).Inc()
	if m.old != nil {
		m.old.dialled(ctx, took, err)
	}
	return c, err
}

// splice joins a caller with its target until both have ended.
func (f *FrontDoor) splice(ctx context.Context, door, addr string, caller, target net.Conn) {
	conns := &f.metrics.now[door].conns
	conns.Add(1)
	defer conns.Add(-1)
	in, out, err := tunnel.Splice(ctx, caller, target)
	f.log.Debug("conn ended", "frontend", door, "target", addr, "bytes", in+out, "err", err)
}

// konnectivityMetrics are some of the same under the names that Konnectivity's server has
// (apiserver-network-proxy, pkg/server/metrics), for the alerts that there are.
type konnectivityMetrics struct {
	duration prometheus.Histogram
	failures *prometheus.CounterVec
	gauges   []prometheus.Collector // read from the others
}

// Why dials fail, as Konnectivity's server says it. It has two more reasons, which are faults
// of its own protocol.
const (
	reasonError   = "error_response"
	reasonCaller  = "frontend_close"
	reasonNoNode  = "no_agent"
	reasonLost    = "backend_close"
	reasonTimeout = "backend_dial_timeout"
)

func newKonnectivityMetrics(m *metrics, c *chooser) *konnectivityMetrics {
	const prefix = "konnectivity_network_proxy_server_"
	overGRPC, overHTTP := m.now[doorGRPC], m.now[doorConnect]
	nodes := func() float64 { return float64(len(c.nodes.Connected())) }
	k := &konnectivityMetrics{
		duration: prometheus.NewHistogram(prometheus.HistogramOpts{Name: prefix + "dial_duration_seconds", Help: "As tunnel_egress_dial_duration_seconds.", Buckets: buckets()}),
		failures: prometheus.NewCounterVec(prometheus.CounterOpts{Name: prefix + "dial_failure_count", Help: "Dials that failed, by Konnectivity's reasons."}, []string{"reason"}),
		gauges: []prometheus.Collector{
			gauge(prefix+"established_connections", "Conns that are open.", nil, func() float64 { return float64(overGRPC.conns.Load() + overHTTP.conns.Load()) }),
			gauge(prefix+"pending_backend_dials", "Dials under way.", nil, func() float64 { return float64(overGRPC.dials.Load() + overHTTP.dials.Load()) }),
			gauge(prefix+"grpc_connections", "Conns over gRPC.", prometheus.Labels{"service_method": "Proxy"}, func() float64 { return float64(overGRPC.conns.Load()) }),
			gauge(prefix+"http_connections", "Conns over HTTP CONNECT.", nil, func() float64 { return float64(overHTTP.conns.Load()) }),
			gauge(prefix+"ready_backend_connections", "Nodes that are connected.", nil, nodes),
		},
	}
	for _, reason := range []string{reasonError, reasonCaller, reasonNoNode, reasonLost, reasonTimeout} {
		k.failures.WithLabelValues(reason)
	}
	for _, s := range c.strategies {
		k.gauges = append(k.gauges, gauge(prefix+"ready_backends", "Nodes that are connected.", prometheus.Labels{"proxy_strategy": string(s)}, nodes))
	}
	return k
}

func (k *konnectivityMetrics) collect(ch chan<- prometheus.Metric) {
	k.duration.Collect(ch)
	k.failures.Collect(ch)
	for _, g := range k.gauges {
		g.Collect(ch)
	}
}

// dialled counts a dial. ctx is the caller's.
func (k *konnectivityMetrics) dialled(ctx context.Context, seconds float64, err error) {
	if err == nil {
		k.duration.Observe(seconds)
		return
	}
	reason := reasonError
	switch code := tunnel.CodeOf(err); {
	case ctx.Err() != nil:
		reason = reasonCaller
	case code == tunnel.NoSuchNode:
		reason = reasonNoNode
	case code == tunnel.Gone:
		reason = reasonLost
	case code == tunnel.Timeout && seconds >= konnectivity.DialTimeout.Seconds():
		reason = reasonTimeout // we have given up; sooner it is the node's own answer
	}
	k.failures.WithLabelValues(reason).Inc()
}
