package inventory

import (
	"cmp"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"tunnel.example/tunnel/pkg/tunnel"
)

const (
	// defaultLifetime is the default lifetime of nodes' certificates.
	defaultLifetime = 30 * 24 * time.Hour
	// An edge renews its certificate when a third of the life is left. If only a sixth is left, renewals have failed.
	expiringPart = 6
)

// tally is how many nodes are in each state. A flapping node is also connected or missing.
type tally struct {
	connected, missing, flapping int
	expiring, expired            int // certificates
}

// tally counts the nodes. expected are the nodes of Kubernetes. lifetime is the lifetime of certificates whose begin is
// not known. Only replicas that hold a node count its certificate: the node renews it there, and the other replicas may
// know an old one.
func (i *Inventory) tally(expected []tunnel.NodeName, lifetime time.Duration) (t tally) {
	var elsewhere []tunnel.NodeName // connected to any replica; sorted
	if i.Others != nil {
		elsewhere = i.Others.Connected() // before mu, since it takes the lock of the Directory
	}
	now := i.now()
	away := func(n tunnel.NodeName) bool {
		_, found := slices.BinarySearch(elsewhere, n)
		return !found
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	for n, r := range i.nodes {
		isAway := away(n)
		if !r.Connected && isAway {
			t.missing++
		} else {
			t.connected++
		}
		if r.flaps(now) {
			t.flapping++
		}
		switch left := r.CertEnds.Sub(now); {
		case r.CertEnds.IsZero(), !r.Connected && (!isAway || r.CertOld):
		case left <= 0:
			t.expired++
		case left < r.lifetime(lifetime)/expiringPart:
			t.expiring++
		}
	}
	for _, n := range elsewhere { // also count connected nodes that the inventory has not noted yet
		if i.nodes[n] == nil {
			t.connected++
		}
	}
	for _, n := range expected {
		if i.nodes[n] == nil && away(n) {
			t.missing++
		}
	}
	return t
}

// lifetime returns the lifetime of the node's certificate, or other if its begin is not known.
func (r *Record) lifetime(other time.Duration) time.Duration {
	if r.CertFrom.IsZero() {
		return other
	}
	return r.CertEnds.Sub(r.CertFrom)
}

// Collector returns the metrics of the nodes. It counts the nodes at each scrape. expected returns the nodes of
// Kubernetes; nil: nobody knows them. lifetime is the lifetime of certificates whose begin is not known; 0: the
// default.
func (i *Inventory) Collector(expected func() ([]tunnel.NodeName, bool), lifetime time.Duration) prometheus.Collector {
	return &collector{
		inventory: i, expected: expected, lifetime: cmp.Or(lifetime, defaultLifetime),
		nodes: prometheus.NewDesc("tunnel_nodes",
			"Nodes of all replicas, as this replica knows them, by state: connected to any replica, missing, or flapping. "+
				"A flapping node has begun 4 sessions with this replica within 10 minutes, and counts in another state, too.",
			[]string{"state"}, nil),
		certificates: prometheus.NewDesc("tunnel_node_certificates",
			"Certificates that end soon, of nodes that this replica holds or held last, by state: "+
				"expiring, with less than a sixth of their life left, or expired.", []string{"state"}, nil),
	}
}

type collector struct { // set once
	inventory           *Inventory
	expected            func() ([]tunnel.NodeName, bool)
	lifetime            time.Duration
	nodes, certificates *prometheus.Desc
}

// Describe implements prometheus.Collector.
func (c *collector) Describe(ch chan<- *prometheus.Desc) {
	ch <- c.nodes
	ch <- c.certificates
}

// Collect implements prometheus.Collector.
func (c *collector) Collect(ch chan<- prometheus.Metric) {
	var expected []tunnel.NodeName
	if c.expected != nil {
		expected, _ = c.expected()
	}
	t := c.inventory.tally(expected, c.lifetime)
	gauge := func(desc *prometheus.Desc, n int, state string) {
		ch <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, float64(n), state)
	}
	gauge(c.nodes, t.connected, "connected")
	gauge(c.nodes, t.missing, "missing")
	gauge(c.nodes, t.flapping, "flapping")
	gauge(c.certificates, t.expiring, "expiring")
	gauge(c.certificates, t.expired, "expired")
}
