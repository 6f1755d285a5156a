package egress

import (
	"cmp"
	"context"
	"net"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"tunnel.example/tunnel/pkg/konnectivity"
	"tunnel.example/tunnel/pkg/tunnel"
)

// A door is a protocol of the egress front door, and a value of the label door.
const (
	doorGRPC    = "grpc"
	doorConnect = "httpconnect"
	doorSOCKS   = "socks5" // at the listeners of HTTP CONNECT
)

// metrics counts dials and conns of the front door. No label has a value that callers choose.
type metrics struct {
	dials        *prometheus.CounterVec   // ended dials, by door and result
	duration     *prometheus.HistogramVec // durations of successful dials in seconds, by door
	inFlight     map[string]*inFlight     // by door; set once
	gauges       []prometheus.Collector   // compute their values from inFlight; set once
	konnectivity *konnectivityMetrics     // nil: not configured
}

// inFlight counts the dials and conns of a door that are under way.
type inFlight struct{ dials, conns atomic.Int64 }

// buckets returns the histogram buckets of dial durations, in seconds: from a node nearby to DialTimeout.
func buckets() []float64 { return []float64{0.002, 0.005, 0.025, 0.1, 0.5, 2.5, 10, 20} }

func newMetrics() *metrics {
	m := &metrics{
		inFlight: map[string]*inFlight{doorGRPC: {}, doorConnect: {}, doorSOCKS: {}, doorMirror: {}},
		dials: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "tunnel_egress_dials_total",
			Help: "Dials by callers of the egress front door, by result: " +
				"ok, or the code of the refusal.",
		}, []string{"door", "result"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "tunnel_egress_dial_duration_seconds",
			Help: "Duration of successful dials, in seconds.", Buckets: buckets(),
		}, []string{"door"}),
	}
	for door, now := range m.inFlight {
		// Every series exists from the start, because an alert on a rate needs a first value of 0.
		m.dials.WithLabelValues(door, tunnel.ResultOK)
		m.duration.WithLabelValues(door)
		for _, code := range tunnel.Codes() {
			m.dials.WithLabelValues(door, code.String())
		}
		label := prometheus.Labels{"door": door}
		m.gauges = append(m.gauges,
			gauge("tunnel_egress_dials_pending", "Dials in progress.", label,
				func() float64 { return float64(now.dials.Load()) }),
			gauge("tunnel_egress_conns", "Open conns.", label,
				func() float64 { return float64(now.conns.Load()) }))
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
	if m.konnectivity != nil {
		m.konnectivity.collect(ch)
	}
}

// Collector returns the metrics of the egress front door, to be registered with Prometheus.
func (f *FrontDoor) Collector() prometheus.Collector { return f.metrics }

// opening is one caller's conn, from the dial to the end of the conn. One goroutine at a time owns it.
type opening struct {
	door, addr, caller string
	endpoint           string          // host:port of the endpoint dialled last, if addr belongs to a Service
	node               tunnel.NodeName // the node asked last; empty: none
	visit              tunnel.Visit
}

// dial calls the chooser's dial, counts it, and logs a dial that has failed.
func (f *FrontDoor) dial(ctx context.Context, door, addr, caller string) (net.Conn, *opening, error) {
	visit := f.cfg.Sink.Arrived(&f.cfg.Counters.Doors[tunnel.DoorEgress])
	o := &opening{door: door, addr: addr, caller: caller, visit: visit}
	m := f.metrics
	m.inFlight[door].dials.Add(1)
	defer m.inFlight[door].dials.Add(-1)
	c, err := f.chooser.connect(ctx, o)
	took := o.visit.Since().Seconds()
	if err == nil {
		m.duration.WithLabelValues(door).Observe(took)
	}
	m.dials.WithLabelValues(door, tunnel.ResultOf(err)).Inc()
	if m.konnectivity != nil {
		m.konnectivity.dialled(ctx, took, err)
	}
	if err != nil {
		f.log.Debug("dial refused", "frontend", door, "target", cmp.Or(o.endpoint, addr), "caller", caller,
			"node", o.node, "err", err)
		o.visit.Refused(err, o.event)
	} else {
		o.visit.Opened(o.event)
	}
	return c, o, err
}

// splice copies between a caller and its target until both have ended, and counts the conn.
func (f *FrontDoor) splice(ctx context.Context, o *opening, caller, target net.Conn) {
	conns := &f.metrics.inFlight[o.door].conns
	conns.Add(1)
	defer conns.Add(-1)
	sent, received, err := tunnel.Splice(ctx, caller, target)
	f.log.Debug("conn ended", "frontend", o.door, "target", cmp.Or(o.endpoint, o.addr), "caller", o.caller, "node", o.node,
		"bytes", sent+received, "dur", o.visit.Since(), "err", err)
	o.visit.Ended(sent, received, err, o.event)
}

// event describes the caller for its visit.
func (o *opening) event() tunnel.Event {
	e := tunnel.Event{Kind: tunnel.EventEgress, Node: o.node, Caller: o.caller, Door: o.door, Target: o.addr}
	if o.endpoint != "" {
		e.Target, e.Path = o.endpoint, o.addr
	}
	return e
}

// konnectivityMetrics repeat some of these metrics under the names of Konnectivity's server
// (apiserver-network-proxy, pkg/server/metrics), so that an operator's existing alerts still work.
type konnectivityMetrics struct {
	duration prometheus.Histogram   // durations of successful dials, in seconds
	failures *prometheus.CounterVec // failed dials, by reason
	gauges   []prometheus.Collector // compute their values from the counts in metrics
	backends func(chan<- prometheus.Metric)
}

// Reasons why dials fail, from Konnectivity's server. Konnectivity's server has two more reasons, for
// faults of its own protocol.
const (
	reasonError   = "error_response"
	reasonCaller  = "frontend_close"
	reasonNoNode  = "no_agent"
	reasonLost    = "backend_close"
	reasonTimeout = "backend_dial_timeout"
)

func newKonnectivityMetrics(m *metrics, c *chooser) *konnectivityMetrics {
	const prefix = "konnectivity_network_proxy_server_"
	overGRPC, overHTTP, overSOCKS := m.inFlight[doorGRPC], m.inFlight[doorConnect], m.inFlight[doorSOCKS]
	nodes := func() float64 { return float64(len(c.nodes.Connected())) }
	open := func(in ...*inFlight) func() float64 {
		return func() (sum float64) {
			for _, n := range in {
				sum += float64(n.conns.Load())
			}
			return sum
		}
	}
	pending := func() float64 { return float64(overGRPC.dials.Load() + overHTTP.dials.Load() + overSOCKS.dials.Load()) }
	proxy := prometheus.Labels{"service_method": "Proxy"}
	k := &konnectivityMetrics{
		duration: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: prefix + "dial_duration_seconds",
			Help: "Duration of successful dials, in seconds; as tunnel_egress_dial_duration_seconds.", Buckets: buckets(),
		}),
		failures: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: prefix + "dial_failure_count", Help: "Dials that failed, by Konnectivity's reasons.",
		}, []string{"reason"}),
		gauges: []prometheus.Collector{
			gauge(prefix+"established_connections", "Open conns.", nil, open(overGRPC, overHTTP, overSOCKS)),
			gauge(prefix+"pending_backend_dials", "Dials in progress.", nil, pending),
			gauge(prefix+"grpc_connections", "Open conns over gRPC.", proxy, open(overGRPC)),
			gauge(prefix+"http_connections", "Open conns over HTTP CONNECT.", nil, open(overHTTP)),
			gauge(prefix+"ready_backend_connections", "Connected nodes.", nil, nodes),
		},
	}
	for _, reason := range []string{reasonError, reasonCaller, reasonNoNode, reasonLost, reasonTimeout} {
		k.failures.WithLabelValues(reason)
	}
	// The label is variable, because SetStrategies may change the strategies.
	backends := prometheus.NewDesc(prefix+"ready_backends", "Connected nodes.", []string{"proxy_strategy"}, nil)
	k.backends = func(ch chan<- prometheus.Metric) {
		for _, s := range c.rules.Load().strategies {
			ch <- prometheus.MustNewConstMetric(backends, prometheus.GaugeValue, nodes(), string(s))
		}
	}
	return k
}

func (k *konnectivityMetrics) collect(ch chan<- prometheus.Metric) {
	k.duration.Collect(ch)
	k.failures.Collect(ch)
	for _, g := range k.gauges {
		g.Collect(ch)
	}
	k.backends(ch)
}

// dialled counts a dial that took the given number of seconds. ctx is the context of the caller.
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
		reason = reasonTimeout // DialTimeout of the front door has passed; an earlier timeout is the node's own answer
	}
	k.failures.WithLabelValues(reason).Inc()
}
