package admin

import (
	"github.com/prometheus/client_golang/prometheus"

	"tunnel.example/tunnel/pkg/tunnel"
)

// NewDoorCollector returns a collector of what became of the callers of each front door.
func NewDoorCollector(c *tunnel.Counters) prometheus.Collector {
	return &doorCollector{
		c: c,
		callers: desc("tunnel_door_callers_total",
			"Callers of a front door, by result: ok, the code of the refusal, or bad-request for one that is wrong by itself. "+
				"A caller is a connection, a terminated HTTPS request, the conn of a UDP port, or an edge's "+
				"conn to an endpoint of a Service.", "door", "result"),
		took: desc("tunnel_door_open_duration_seconds",
			"Time until a caller with the result ok had its conn, or the head of its HTTP response, in seconds.", "door"),
	}
}

type doorCollector struct {
	c             *tunnel.Counters
	callers, took *prometheus.Desc
}

// Describe implements prometheus.Collector.
func (d *doorCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- d.callers
	ch <- d.took
}

// Collect implements prometheus.Collector.
func (d *doorCollector) Collect(ch chan<- prometheus.Metric) {
	for _, door := range tunnel.Doors() {
		c := &d.c.Doors[door]
		count, sum, buckets := c.Durations()
		ch <- prometheus.MustNewConstHistogram(d.took, count, sum, buckets, door.String())
		result := func(n uint64, name string) {
			ch <- prometheus.MustNewConstMetric(d.callers, prometheus.CounterValue, float64(n), door.String(), name)
		}
		result(count, tunnel.ResultOK)
		result(c.Results(0), tunnel.ResultInvalid)
		for _, code := range tunnel.Codes() {
			result(c.Results(code), code.String())
		}
	}
}
