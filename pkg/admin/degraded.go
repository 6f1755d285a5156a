package admin

import "github.com/prometheus/client_golang/prometheus"

// NewDegradedCollector returns a gauge for each check that has a Note func: 1 while there is a
// note. Operators can then alert on what /readyz?verbose says in words.
func NewDegradedCollector(checks []Check) prometheus.Collector {
	return degraded{checks, prometheus.NewDesc("tunnel_degraded",
		"1 while the module is degraded, else 0; its line [~] on /readyz?verbose says why.",
		[]string{"module"}, nil)}
}

type degraded struct {
	checks []Check
	desc   *prometheus.Desc
}

// Describe implements prometheus.Collector.
func (d degraded) Describe(ch chan<- *prometheus.Desc) { ch <- d.desc }

// Collect implements prometheus.Collector.
func (d degraded) Collect(ch chan<- prometheus.Metric) {
	for _, c := range d.checks {
		if c.Note == nil {
			continue
		}
		v := 0.0
		if c.Note() != "" {
			v = 1
		}
		ch <- prometheus.MustNewConstMetric(d.desc, prometheus.GaugeValue, v, c.Name)
	}
}
