package hub

import "github.com/prometheus/client_golang/prometheus"

// Collector returns the metrics of the hub.
func (h *Hub) Collector() prometheus.Collector {
	return collector{
		h,
		prometheus.NewDesc("tunnel_services_items",
			"Services, endpoints and Nodes that edges are told. An edge is told no endpoints that its node does not use.",
			nil, nil),
		prometheus.NewDesc("tunnel_services_watchers",
			"Edges that watch Services at this replica.", nil, nil),
		prometheus.NewDesc("tunnel_services_sent_bytes_total",
			"Bytes of Services, endpoints and Nodes that were sent to edges, compressed.", nil, nil),
	}
}

type collector struct {
	h                     *Hub
	items, watchers, sent *prometheus.Desc
}

// Describe implements prometheus.Collector.
func (c collector) Describe(ch chan<- *prometheus.Desc) {
	ch <- c.items
	ch <- c.watchers
	ch <- c.sent
}

// Collect implements prometheus.Collector.
func (c collector) Collect(ch chan<- prometheus.Metric) {
	c.h.mu.Lock()
	items, watchers := c.h.items, len(c.h.watchers)
	c.h.mu.Unlock()
	ch <- prometheus.MustNewConstMetric(c.items, prometheus.GaugeValue, float64(items))
	ch <- prometheus.MustNewConstMetric(c.watchers, prometheus.GaugeValue, float64(watchers))
	ch <- prometheus.MustNewConstMetric(c.sent, prometheus.CounterValue, float64(c.h.sent.Load()))
}
