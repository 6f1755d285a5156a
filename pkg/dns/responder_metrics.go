package dns

import (
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
)

// outcome is the result of a query, for the metrics.
type outcome int

const (
	outcomeNode      outcome = iota // the answer has the addresses of a node
	outcomeService                  // the answer has the records of a Service
	outcomeNoData                   // the name has no record of that type
	outcomeNXDomain                 // no such name
	outcomeForwarded                // an upstream has answered
	outcomeUnknown                  // the node is connected, but it is unknown whether it may be published
	outcomeRefused                  // the responder does not answer such a query, or not for this client
	outcomeFailed                   // no upstream has answered, or too many queries wait for one
	numOutcomes                     // the number of outcomes
)

// String returns the value of the metric's label.
func (o outcome) String() string {
	return [numOutcomes]string{"node", "service", "nodata", "nxdomain", "forwarded", "unknown", "refused", "failed"}[o]
}

// responderStats counts queries. The zero value is ready.
type responderStats struct {
	answers    [numOutcomes]atomic.Uint64 // by outcome
	overloaded atomic.Uint64              // queries and TCP connections refused because of a limit
}

// count counts one query.
func (s *responderStats) count(o outcome) { s.answers[o].Add(1) }

// responderCollector reads the stats at each scrape. No label has a value that a client can
// choose.
type responderCollector struct {
	stats               *responderStats
	queries, overloaded *prometheus.Desc
}

// Collector returns the responder's metrics.
func (r *Responder) Collector() prometheus.Collector {
	return &responderCollector{
		stats: &r.stats,
		queries: prometheus.NewDesc("tunnel_dns_queries_total",
			"DNS queries, by answer. A node's addresses are node, the records of a Service are service, "+
				"no address of that kind is nodata, "+
				"no such name is nxdomain, and the upstream's answer is forwarded. "+
				"Without an answer, a query is unknown (the Nodes have not been read yet), "+
				"refused (not a question for this server) or failed (no upstream answered).", []string{"answer"}, nil),
		overloaded: prometheus.NewDesc("tunnel_dns_overloaded_total",
			"DNS queries that failed at once because too many waited for an upstream, "+
				"and TCP connections refused because too many were open.", nil, nil),
	}
}

// Describe implements prometheus.Collector.
func (c *responderCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- c.queries
	ch <- c.overloaded
}

// Collect implements prometheus.Collector.
func (c *responderCollector) Collect(ch chan<- prometheus.Metric) {
	// All outcomes, also those that never happened: an alert on a rate needs the zero.
	for o := range numOutcomes {
		n := float64(c.stats.answers[o].Load())
		ch <- prometheus.MustNewConstMetric(c.queries, prometheus.CounterValue, n, o.String())
	}
	overloaded := float64(c.stats.overloaded.Load())
	ch <- prometheus.MustNewConstMetric(c.overloaded, prometheus.CounterValue, overloaded)
}
