package dns

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"tunnel/pkg/tunnel"
)

// hostsLate is how old a difference must be to be worth a word: kubelet's sync and
// CoreDNS's reload together take most of it.
const hostsLate = 2 * time.Minute

// differences returns the nodes of which the file says something else than the truth,
// and since when that counts. Whoever was missed before is counted since then.
//
// It agrees with the Writer about what is right: a name that somebody else wrote a line
// for is theirs, what a replica holds that the truth does not hear nobody knows, and the
// line of a node that is gone may stay for goneGrace.
func differences(file Hosts, f facts, before map[tunnel.NodeName]time.Time) map[tunnel.NodeName]time.Time {
	foreign := readNames(file.Foreign)
	there := make(map[tunnel.NodeName][]netip.Addr)
	for _, e := range file.Own {
		if _, taken := foreign[string(e.Node)]; !taken {
			there[e.Node] = append(there[e.Node], e.Addr) // IPv4 first, as in a Record
		}
	}
	differs := make(map[tunnel.NodeName]time.Time)
	note := func(n tunnel.NodeName, since time.Time) {
		if b, ok := before[n]; ok && b.Before(since) {
			since = b
		}
		differs[n] = since
	}
	for _, r := range f.truth.Records() {
		if _, taken := foreign[string(r.Node)]; taken || !f.may(r.Node) {
			continue
		}
		if !slices.Equal(r.Addrs, there[r.Node]) {
			note(r.Node, f.now)
		}
		delete(there, r.Node)
	}
	for n, addrs := range there {
		switch {
		case !f.may(n):
			note(n, f.now)
		case slices.ContainsFunc(addrs, f.truth.Hears):
			note(n, f.now.Add(goneGrace))
		}
	}
	return differs
}

// compare looks where the file and the truth differ.
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
	h.state.differs, h.state.waiting = differs, !known
}

// warn says in the log when the file is late, and when it no longer is. The log may name
// nodes; Note, which everybody can read, does not.
func (h *HostsFile) warn(now time.Time) {
	lag, nodes := h.look().lag(now)
	switch late := lag >= hostsLate; {
	case late && !h.said:
		slices.Sort(nodes)
		h.log.Warn("the hosts file that CoreDNS mounts is late", "target", h.path, "dur", lag.Round(time.Second),
			"nodes", len(nodes), "first", nodes[:min(len(nodes), 3)])
	case !late && h.said:
		h.log.Info("the hosts file that CoreDNS mounts is not late any more", "target", h.path)
	}
	h.said = lag >= hostsLate
}

func (h *HostsFile) look() hostsState {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.state
}

// lag returns for how long the file has not said the truth, and about which nodes.
func (s hostsState) lag(now time.Time) (lag time.Duration, nodes []tunnel.NodeName) {
	for n, since := range s.differs {
		if age := now.Sub(since); age >= 0 {
			nodes = append(nodes, n)
			lag = max(lag, age)
		}
	}
	return lag, nodes
}

// Note says what is wrong with the file or with its way to here; "" when nothing is.
func (h *HostsFile) Note() string {
	s := h.look()
	if s.err != nil {
		return fmt.Sprintf("%s cannot be read: %v; mount the ConfigMap there as CoreDNS mounts it, or correct hosts in [mode.cloud.stream.dns]", h.path, s.err)
	}
	lag, nodes := s.lag(time.Now())
	if lag < hostsLate {
		return ""
	}
	return fmt.Sprintf("%s has been late for %v about %d nodes (the log names some): see whether the ConfigMap is right (dns-configmap), then whether kubelet updates the volume",
		h.path, lag.Round(time.Second), len(nodes))
}

// Status says how late the file is.
func (h *HostsFile) Status() string {
	s := h.look()
	lag, nodes := s.lag(time.Now())
	switch {
	case !s.looked:
		return "not read yet"
	case s.waiting:
		return "nothing to compare with before Kubernetes has said which nodes there are"
	default:
		return fmt.Sprintf("lag %v, %d nodes differ", lag.Round(time.Second), len(nodes))
	}
}

// Collector returns the metrics of the file.
func (h *HostsFile) Collector() prometheus.Collector {
	return hostsCollector{
		h: h,
		lag: prometheus.NewDesc("tunnel_dns_hosts_lag_seconds",
			"For how long the hosts file that CoreDNS mounts has not said which nodes are connected; 0 when it does.", nil, nil),
		differs:  prometheus.NewDesc("tunnel_dns_hosts_differences", "Nodes of which that file says something else than what is true.", nil, nil),
		readable: prometheus.NewDesc("tunnel_dns_hosts_readable", "1 when that file can be read; else the two others are about what was read last.", nil, nil),
	}
}

// hostsCollector reads the state when it is asked.
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
	s := c.h.look()
	lag, nodes := s.lag(time.Now())
	readable := 0.0
	if s.looked && s.err == nil {
		readable = 1
	}
	ch <- prometheus.MustNewConstMetric(c.lag, prometheus.GaugeValue, lag.Seconds())
	ch <- prometheus.MustNewConstMetric(c.differs, prometheus.GaugeValue, float64(len(nodes)))
	ch <- prometheus.MustNewConstMetric(c.readable, prometheus.GaugeValue, readable)
}
