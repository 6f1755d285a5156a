package admin

import (
	"runtime"
	"runtime/debug"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"tunnel.example/tunnel/pkg/tunnel"
)

// NewRegistry returns a registry with the metrics of every process of the tunnel: the Go runtime,
// the process, tunnel_build_info, and the core's counters. sessions returns the live sessions; nil
// if the process has none.
func NewRegistry(version string, c *tunnel.Counters, sessions func() []*tunnel.Session) *prometheus.Registry {
	reg := prometheus.NewRegistry()
	reg.MustRegister(
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		buildInfo(version),
		NewCollector(c, sessions),
	)
	return reg
}

// buildInfo returns the gauge that is always 1. Its labels say which build is running.
func buildInfo(version string) prometheus.Collector {
	revision := "unknown"
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" {
				revision = s.Value
			}
		}
	}
	g := prometheus.NewGauge(prometheus.GaugeOpts{
		Name:        "tunnel_build_info",
		Help:        "Always 1; the labels name this build's version, revision and Go version.",
		ConstLabels: prometheus.Labels{"version": version, "revision": revision, "goversion": runtime.Version()},
	})
	g.Set(1)
	return g
}

// collector reads the core's counters at each scrape, so that the core does not depend on
// Prometheus. No label names a node: there may be 10,000.
type collector struct {
	// Set once.
	sessions func() []*tunnel.Session
	counts   []count
	c        *tunnel.Counters

	live, conns, data, refused, limited, waiting, multipath, paths *prometheus.Desc
}

// count is a counter without labels.
type count struct {
	desc *prometheus.Desc
	load func() uint64
}

// NewCollector returns a collector of c, and of the current numbers of sessions and conns.
func NewCollector(c *tunnel.Counters, sessions func() []*tunnel.Session) prometheus.Collector {
	return &collector{
		sessions: sessions,
		c:        c,
		counts: []count{
			{desc("tunnel_sessions_established_total", "Sessions established."), c.Sessions.Load},
			{desc("tunnel_sessions_replaced_total",
				"Sessions that ended because the same node opened a newer one."), c.Replaced.Load},
			{desc("tunnel_joins_refused_total", "Attempts to join that were refused."), c.JoinsRefused.Load},
			{desc("tunnel_conns_opened_total", "Conns opened."), c.ConnsOpened.Load},
			{desc("tunnel_conns_by_data_connection_total",
				"Conns opened on a data connection."), c.ConnsOverData.Load},
			{desc("tunnel_data_connections_opened_total",
				"Data connections opened: TCP connections that carry one conn at a time."), c.DataOpened.Load},
			{desc("tunnel_connections_switched_total",
				"TCP connections between edge and cloud switched to bbr, because they lost packets."), c.Switched.Load},
			{desc("tunnel_conns_reset_total", "Conns that ended by a reset."), c.Resets.Load},
			{desc("tunnel_sent_bytes_total", "Payload bytes of conns sent through the tunnel."), c.BytesSent.Load},
			{desc("tunnel_received_bytes_total",
				"Payload bytes of conns received through the tunnel."), c.BytesReceived.Load},
			{desc("tunnel_unknown_messages_total",
				"Control messages without a handler, from a newer or a hostile peer."), c.UnknownMessages.Load},
			{desc("tunnel_contested_pods_total",
				"Requests refused because two nodes claim the same pod."), c.ContestedPods.Load},
			{desc("tunnel_proxy_headers_unexpected_total",
				"Connections refused because they began with a PROXY header that was not due: "+
					"not from a balancer, or a second header."),
				c.HeadersUnexpected.Load},
			{desc("tunnel_proxy_headers_missing_total",
				"Connections of balancers closed because they did not begin with a PROXY header, or with a wrong one."),
				c.HeadersMissing.Load},
			{desc("tunnel_panics_total",
				"Panics that ended one session, connection or request. Each is a bug."), c.Panics.Load},
		},
		live:  desc("tunnel_sessions", "Open sessions."),
		conns: desc("tunnel_conns", "Open conns, including those being dialled."),
		data: desc("tunnel_data_connections",
			"Open data connections, in use or idle."),
		multipath: desc("tunnel_multipath_sessions", "Open sessions whose own connection has Multipath TCP."),
		paths:     desc("tunnel_multipath_paths", "Paths of the sessions' own connections that have Multipath TCP."),
		refused:   desc("tunnel_conns_refused_total", "Conns refused, by the code of the refusal.", "code"),
		limited:   desc("tunnel_limited_total", "Times that a limit of docs/limits.md was reached, by limit.", "limit"),
		waiting:   desc("tunnel_opens_waiting", "Opens that wait because the limit conns, opens or dials is reached."),
	}
}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(name, help, labels, nil)
}

// NewRelayCollector returns a collector of what is relayed between this replica and others.
// replicas returns how many others have joined. The replica that holds a node also counts each
// relayed conn as one of its own.
func NewRelayCollector(c *tunnel.Counters, replicas func() int) prometheus.Collector {
	return &relayCollector{c: c, replicas: replicas, counts: []count{
		{desc("tunnel_relay_conns_opened_total", "Conns relayed to or for another replica."), c.ConnsOpened.Load},
		{desc("tunnel_relay_conns_reset_total", "Relayed conns that ended by a reset."), c.Resets.Load},
		{desc("tunnel_relay_sent_bytes_total", "Payload bytes sent to other replicas."), c.BytesSent.Load},
		{desc("tunnel_relay_received_bytes_total",
			"Payload bytes received from other replicas."), c.BytesReceived.Load},
		{desc("tunnel_relay_panics_total",
			"Panics that ended a session with another replica, or a conn of it. Each is a bug."), c.Panics.Load},
	}}
}

type relayCollector struct {
	c        *tunnel.Counters
	replicas func() int
	counts   []count
}

// Describe implements prometheus.Collector.
func (c *relayCollector) Describe(ch chan<- *prometheus.Desc) { prometheus.DescribeByCollect(c, ch) }

// Collect implements prometheus.Collector.
func (c *relayCollector) Collect(ch chan<- prometheus.Metric) {
	for _, n := range c.counts {
		ch <- prometheus.MustNewConstMetric(n.desc, prometheus.CounterValue, float64(n.load()))
	}
	refused := desc("tunnel_relay_conns_refused_total",
		"Relayed conns that this replica or the other one refused, by the code of the refusal.", "code")
	for _, code := range tunnel.Codes() {
		ch <- prometheus.MustNewConstMetric(refused, prometheus.CounterValue,
			float64(c.c.Refusals(code)), code.String())
	}
	limited := desc("tunnel_relay_limited_total",
		"Times that a session with another replica reached a limit of docs/limits.md, by limit.", "limit")
	// Sessions with replicas have no other limits.
	for _, l := range []tunnel.Limit{tunnel.LimitConns, tunnel.LimitMessage, tunnel.LimitOutbox} {
		ch <- prometheus.MustNewConstMetric(limited, prometheus.CounterValue, float64(c.c.LimitedBy(l)), l.String())
	}
	joined := desc("tunnel_replicas", "Other replicas that have joined this one.")
	ch <- prometheus.MustNewConstMetric(joined, prometheus.GaugeValue, float64(c.replicas()))
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, n := range c.counts {
		ch <- n.desc
	}
	ch <- c.refused
	ch <- c.limited
	ch <- c.waiting
	ch <- c.live
	ch <- c.conns
	ch <- c.multipath
	ch <- c.paths
	ch <- c.data
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	for _, n := range c.counts {
		ch <- prometheus.MustNewConstMetric(n.desc, prometheus.CounterValue, float64(n.load()))
	}
	// Show all codes, also those that never occurred: an alert on a rate needs a first value of 0.
	for _, code := range tunnel.Codes() {
		ch <- prometheus.MustNewConstMetric(c.refused, prometheus.CounterValue,
			float64(c.c.Refusals(code)), code.String())
	}
	for _, l := range tunnel.Limits() {
		ch <- prometheus.MustNewConstMetric(c.limited, prometheus.CounterValue, float64(c.c.LimitedBy(l)), l.String())
	}
	ch <- prometheus.MustNewConstMetric(c.waiting, prometheus.GaugeValue, float64(c.c.Waiting.Load()))
	if c.sessions == nil {
		return
	}
	live := c.sessions()
	var conns int64
	for _, s := range live {
		conns += s.Conns.Load()
	}
	multipath, paths := tunnel.CountPaths(live)
	ch <- prometheus.MustNewConstMetric(c.multipath, prometheus.GaugeValue, float64(multipath))
	ch <- prometheus.MustNewConstMetric(c.paths, prometheus.GaugeValue, float64(paths))
	ch <- prometheus.MustNewConstMetric(c.live, prometheus.GaugeValue, float64(len(live)))
	ch <- prometheus.MustNewConstMetric(c.conns, prometheus.GaugeValue, float64(conns))
	ch <- prometheus.MustNewConstMetric(c.data, prometheus.GaugeValue, float64(c.c.DataLive.Load()))
}
