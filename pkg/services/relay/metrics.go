package relay

import (
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"tunnel.example/tunnel/pkg/tunnel"
)

// counters counts connections to Services since the process started.
type counters struct {
	live           atomic.Int64 // a gauge: connections that are open, or wait for an endpoint
	opened         atomic.Uint64
	refused        byCode
	sent, received atomic.Int64     // bytes sent to endpoints, and received from endpoints
	ways           [3]atomic.Uint64 // conns to endpoints, by via
}

// via says which way a conn takes to its endpoint.
type via int

const (
	viaNode  via = iota // this node reaches the endpoint by itself
	viaNear             // over the local network, to the edge of the endpoint's node
	viaCloud            // through the cloud
)

// byCode counts refusals by tunnel.Code. An unknown code counts as Internal.
type byCode [16]atomic.Uint64

func (c *byCode) add(code tunnel.Code) {
	if int(code) >= len(c) {
		code = tunnel.Internal
	}
	c[code].Add(1)
}

// Collector returns the relay's metrics.
func (r *Relay) Collector() prometheus.Collector {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(name, help, labels, nil)
	}
	return &collector{
		relay: r, datagrams: r.udp.ServicesCollector(),
		items: desc("tunnel_services_known_items", "Services, endpoints and nodes of the cluster that this edge knows."),
		redirected: desc("tunnel_services_redirected_addresses",
			"Addresses and ports of Services that this edge serves: by rules of the kernel, or through the tunnel."),
		stale: desc("tunnel_services_stale_seconds",
			"Seconds since the state of Services was last equal to the cloud's. 0: it is. -1: never."),
		live: desc("tunnel_services_conns",
			"Connections to Services that this edge relays now, or for which it looks for an endpoint."),
		results: desc("tunnel_services_conns_total",
			"Connections to Services that this edge has been asked to relay, by result: opened, or why not.", "result"),
		bytes: desc("tunnel_services_bytes_total", "Bytes relayed, sent to endpoints or received from them.", "direction"),
		ways: desc("tunnel_services_way_conns_total",
			"Connections to endpoints that this edge has opened for callers here, by way; all datagrams to an endpoint are "+
				"one. node: it reaches the endpoint by itself; near: over the local network, to the edge of the endpoint's "+
				"node; cloud: through the cloud.", "way"),
		nearFailed: desc("tunnel_services_near_failed_total",
			"Attempts to reach an edge of this site over the local network that have failed. The cloud was asked instead."),
		nearLive: desc("tunnel_services_near_conns", "Connections of edges of this site to endpoints here, now."),
		nearResults: desc("tunnel_services_near_conns_total",
			"Connections of edges of this site to endpoints here, by result: opened, why not, or unproven "+
				"(the peer did not prove to be a node).", "result"),
	}
}

type collector struct {
	relay                                                *Relay
	datagrams                                            prometheus.Collector
	items, redirected, stale, live, results, bytes, ways *prometheus.Desc
	nearFailed, nearLive, nearResults                    *prometheus.Desc // collected only with Near
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{c.items, c.redirected, c.stale, c.live, c.results, c.bytes, c.ways,
		c.nearFailed, c.nearLive, c.nearResults} {
		ch <- d
	}
	c.datagrams.Describe(ch)
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	r := c.relay
	gauge := func(d *prometheus.Desc, v float64) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v)
	}
	count := func(d *prometheus.Desc, v float64, label string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, v, label)
	}
	r.mu.RLock()
	items, serves, stale := r.state.Len(), r.serves, r.staleSecondsLocked()
	r.mu.RUnlock()
	gauge(c.items, float64(items))
	gauge(c.redirected, float64(serves))
	gauge(c.stale, stale)
	gauge(c.live, float64(r.counts.live.Load()))
	count(c.results, float64(r.counts.opened.Load()), "opened")
	for _, code := range tunnel.Codes() {
		count(c.results, float64(r.counts.refused[code].Load()), code.String())
	}
	count(c.bytes, float64(r.counts.sent.Load()), "sent")
	count(c.bytes, float64(r.counts.received.Load()), "received")
	for way, text := range []string{viaNode: "node", viaNear: "near", viaCloud: "cloud"} {
		count(c.ways, float64(r.counts.ways[way].Load()), text)
	}
	if n := r.near; n != nil {
		ch <- prometheus.MustNewConstMetric(c.nearFailed, prometheus.CounterValue, float64(n.counts.failed.Load()))
		gauge(c.nearLive, float64(n.callers.live()))
		count(c.nearResults, float64(n.counts.opened.Load()), "opened")
		count(c.nearResults, float64(n.counts.strangers.Load()), "unproven")
		for _, code := range tunnel.Codes() {
			count(c.nearResults, float64(n.counts.refused[code].Load()), code.String())
		}
	}
	c.datagrams.Collect(ch)
}

// staleSecondsLocked returns the value of the metric tunnel_services_stale_seconds. The caller holds mu.
func (r *Relay) staleSecondsLocked() float64 {
	switch {
	case r.current:
		return 0
	case r.since.IsZero():
		return -1
	}
	// 0 would mean that the state is current. If the clock is behind the time of the state, the difference is negative.
	return max(1, time.Since(r.since).Seconds())
}
