package dns

import (
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
)

// outcome is what became of a query.
type outcome int

const (
	toldNode      outcome = iota // the addresses of a node
	toldNoData                   // a node has nothing of that type
	toldNXDomain                 // no such name
	toldForwarded                // an upstream has answered
	toldUnknown                  // held, and not known whether it may appear
	toldRefused                  // not a question that we answer
	toldFailed                   // no upstream has answered
	outcomes                     // how many there are
)

// String returns the outcome as metrics show it.
func (o outcome) String() string {
	return [outcomes]string{"node", "nodata", "nxdomain", "forwarded", "unknown", "refused", "failed"}[o]
}

// responderStats counts queries. The zero value is ready.
type responderStats struct {
	answers    [outcomes]atomic.Uint64
	overloaded atomic.Uint64
}

func (s *responderStats) count(o outcome) { s.answers[o].Add(1) }

// responderCollector reads the stats when it is asked. No label holds anything that an asker
// can choose.
type responderCollector struct {
	stats               *responderStats
	queries, overloaded *prometheus.Desc
}

// Collector shows how many queries were answered how.
func (r *Responder) Collector() prometheus.Collector {
	return &responderCollector{
		stats: &r.stats,
		queries: prometheus.NewDesc("tunnel_dns_queries_total",
			"DNS queries, by what the answer was: a node's addresses; no address of that kind (nodata); no such name (nxdomain); "+
				"the upstream's (forwarded); none before Kubernetes has said which nodes there are (unknown); "+
				"not a question for this server (refused); no upstream answered (failed).", []string{"answer"}, nil),
		overloaded: prometheus.NewDesc("tunnel_dns_overloaded_total",
			"DNS queries that failed at once because too many waited for an upstream, and TCP connections that were one too many.", nil, nil),
	}
}

// Describe implements prometheus.Collector.
func (c *responderCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- c.queries
	ch <- c.overloaded
}

// Collect implements prometheus.Collector.
func (c *responderCollector) Collect(ch chan<- prometheus.Metric) {
	// All of them, those that never happened too: an alert on a rate needs the zero.
	for o := range outcomes {
		ch <- prometheus.MustNewConstMetric(c.queries, prometheus.CounterValue, float64(c.stats.answers[o].Load()), o.String())
	}
	ch <- prometheus.MustNewConstMetric(c.overloaded, prometheus.CounterValue, float64(c.stats.overloaded.Load()))
}
