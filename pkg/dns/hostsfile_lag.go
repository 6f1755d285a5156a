package dns

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"tunnel.example/tunnel/pkg/tunnel"
)

// maxLag is the age from which on a difference is reported. The sync of kubelet and the reload
// of CoreDNS together normally take most of this time.
const maxLag = 2 * time.Minute

// differences returns the nodes for which the file differs from the truth, and the time from which
// on each difference counts. A node that is also in before keeps its time there, if that is
// earlier.
//
// differences uses the same rules as the Writer. If another writer has written a line for a name,
// that line wins. If the truth does not cover a replica, it is unknown which nodes the replica
// holds, so its lines are no difference. The line of a node that is gone may stay for goneGrace.
func differences(file Hosts, f facts, before map[tunnel.NodeName]time.Time) map[tunnel.NodeName]time.Time {
	foreign := readNames(file.Foreign)
	inFile := make(map[tunnel.NodeName][]netip.Addr)
	for _, e := range file.Own {
		if _, taken := foreign[string(e.Node)]; !taken {
			inFile[e.Node] = append(inFile[e.Node], e.Addr) // IPv4 first, as in a Record
		}
	}
	differs := make(map[tunnel.NodeName]time.Time)
	add := func(n tunnel.NodeName, since time.Time) {
		if b, ok := before[n]; ok && b.Before(since) {
			since = b
		}
		differs[n] = since
	}
	for _, r := range f.truth.Records() {
		if _, taken := foreign[string(r.Node)]; taken || !f.may(r.Node) {
			continue
		}
		if !slices.Equal(r.Addrs, inFile[r.Node]) {
			add(r.Node, f.now)
		}
		delete(inFile, r.Node)
	}
	for n, addrs := range inFile {
		switch {
		case !f.may(n):
			add(n, f.now)
		case slices.ContainsFunc(addrs, f.truth.Hears):
			add(n, f.now.Add(goneGrace))
		}
	}
	return differs
}

// compare updates the state with the differences between the file and the truth.
func (h *HostsFile) compare(now time.Time) {
	var differs map[tunnel.NodeName]time.Time
	known := true
	if h.names != nil {
		_, known = h.names.May("")
	}
	if known {
		differs = differences(h.hosts, facts{truth: h.truth, names: h.names, now: now}, h.state.differs)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.state.differs, h.state.namesUnknown = differs, !known
}

// logLag logs when the file becomes late, and when it is no longer late. The log may contain the
// names of nodes. Note, which anyone can read, does not contain them.
func (h *HostsFile) logLag(now time.Time) {
	lag, nodes := h.snapshot().lag(now)
	switch late := lag >= maxLag; {
	case late && !h.lateLogged:
		slices.Sort(nodes)
		h.log.Warn("the hosts file that CoreDNS mounts is out of date", "target", h.path, "dur", lag.Round(time.Second),
			"nodes", len(nodes), "first", nodes[:min(len(nodes), 3)])
	case !late && h.lateLogged:
		h.log.Info("the hosts file that CoreDNS mounts is up to date again", "target", h.path)
	}
	h.lateLogged = lag >= maxLag
}

// snapshot returns a copy of the state.
func (h *HostsFile) snapshot() hostsState {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.state
}

// lag returns the age of the oldest difference, and the nodes that differ.
func (s hostsState) lag(now time.Time) (lag time.Duration, nodes []tunnel.NodeName) {
	for n, since := range s.differs {
		if age := now.Sub(since); age >= 0 {
			nodes = append(nodes, n)
			lag = max(lag, age)
		}
	}
	return lag, nodes
}

// Note returns what is wrong with the file, and what to do; "" if nothing is wrong.
func (h *HostsFile) Note() string {
	s := h.snapshot()
	if s.err != nil {
		return fmt.Sprintf("%s cannot be read: %v; mount the ConfigMap there as CoreDNS mounts it, "+
			"or correct hosts in [mode.cloud.stream.dns]", h.path, s.err)
	}
	lag, nodes := s.lag(time.Now())
	if lag < maxLag {
		return ""
	}
	return fmt.Sprintf("%s has been late for %v about %d nodes (the log names some): "+
		"see whether the ConfigMap is right (dns-configmap), then whether kubelet updates the volume",
		h.path, lag.Round(time.Second), len(nodes))
}

// Status returns the lag of the file, for operators.
func (h *HostsFile) Status() string {
	s := h.snapshot()
	lag, nodes := s.lag(time.Now())
	switch {
	case !s.readTried:
		return "not read yet"
	case s.namesUnknown:
		return "not compared yet: the Nodes have not been read"
	default:
		return fmt.Sprintf("lag %v, %d nodes differ", lag.Round(time.Second), len(nodes))
	}
}

// Collector returns the metrics of the file.
func (h *HostsFile) Collector() prometheus.Collector {
	return hostsCollector{
		h: h,
		lag: prometheus.NewDesc("tunnel_dns_hosts_lag_seconds",
			"Seconds that the hosts file that CoreDNS mounts has been out of date; 0 while it is up to date.", nil, nil),
		differs: prometheus.NewDesc("tunnel_dns_hosts_differences",
			"Nodes for which the hosts file that CoreDNS mounts is out of date.", nil, nil),
		readable: prometheus.NewDesc("tunnel_dns_hosts_readable",
			"1 while the hosts file that CoreDNS mounts can be read; else 0, and lag and differences are "+
				"those of its last content.", nil, nil),
	}
}

// hostsCollector reads the state at each scrape.
type hostsCollector struct {
	h                      *HostsFile
	lag, differs, readable *prometheus.Desc
}

// Describe implements prometheus.Collector.
func (c hostsCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- c.lag
	ch <- c.differs
	ch <- c.readable
}

// Collect implements prometheus.Collector.
func (c hostsCollector) Collect(ch chan<- prometheus.Metric) {
	s := c.h.snapshot()
	lag, nodes := s.lag(time.Now())
	readable := 0.0
	if s.readTried && s.err == nil {
		readable = 1
	}
	ch <- prometheus.MustNewConstMetric(c.lag, prometheus.GaugeValue, lag.Seconds())
	ch <- prometheus.MustNewConstMetric(c.differs, prometheus.GaugeValue, float64(len(nodes)))
	ch <- prometheus.MustNewConstMetric(c.readable, prometheus.GaugeValue, readable)
}
