package dns

import (
	"fmt"
	"strings"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"tunnel.example/tunnel/pkg/kube"
)

// conflictsToReport is the number of conflicts in a row from which on they are reported as a
// failure. Fewer are normal.
const conflictsToReport = 8

// writerStats counts the attempts to write, and the bytes written.
type writerStats struct {
	attempts map[kube.Reason]*atomic.Uint64 // by result; the map is set once
	bytes    *atomic.Uint64                 // of the key, whole at each write
}

func newWriterStats() writerStats {
	s := writerStats{attempts: make(map[kube.Reason]*atomic.Uint64), bytes: new(atomic.Uint64)}
	for _, r := range kube.Reasons() {
		s.attempts[r] = new(atomic.Uint64)
	}
	return s
}

// update changes the state under the lock.
func (w *Writer) update(change func(*writerState)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	change(&w.state)
}

// isBlind reports whether the watch of the file fails.
func (w *Writer) isBlind() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.state.watchErr != nil
}

// countWrite counts a successful write.
func (w *Writer) countWrite(bytes int) {
	w.stats.attempts[kube.OK].Add(1)
	w.stats.bytes.Add(uint64(bytes))
	w.log.Debug("written", "target", w.cfg.Store.String(), "bytes", bytes)
}

// noteFailure counts a failed attempt and stores its error. It stores a conflict only if it is at least
// the conflictsToReport-th in a row. It logs the error unless the last stored error has the same reason.
func (w *Writer) noteFailure(err error) {
	reason := kube.ReasonFor(err)
	w.stats.attempts[reason].Add(1)
	warn := false
	w.update(func(s *writerState) {
		if reason == kube.Conflict {
			if s.conflicts++; s.conflicts < conflictsToReport {
				return
			}
		}
		warn = s.err == nil || kube.ReasonFor(s.err) != reason
		s.err = err
	})
	if warn {
		w.log.Warn("the nodes' names cannot be written; the old lines stay, and the write is tried again",
			"target", w.cfg.Store.String(), "err", kube.Explain(err))
	}
}

// noteSynced stores that the file has the content of d, and logs what has changed since the last
// time.
func (w *Writer) noteSynced(d decision, file kube.Content) {
	var before writerState
	w.update(func(s *writerState) {
		before = *s
		s.err, s.conflicts = nil, 0
		s.entries, s.size = len(d.hosts.Own), file.Others+len(file.Text)
		s.decision = d
		s.hosts = Hosts{} // hosts may be large, and nobody reads it here
	})
	target := w.cfg.Store.String()
	if before.err != nil {
		w.log.Info("the nodes' names can be written again", "target", target)
	}
	switch {
	case d.omitted > 0 && before.omitted == 0:
		w.log.Error("full: new nodes get no line there; "+
			"use the responder (listen in [mode.cloud.stream.dns]), which has no such limit",
			"target", target, "bytes", file.Others+len(file.Text), "limit", sizeLimit, "omitted", d.omitted)
	case d.omitted == 0 && before.omitted > 0:
		w.log.Info("there is room again for all nodes", "target", target)
	}
	if d.shadowed > before.shadowed {
		w.log.Warn("foreign lines have the names of connected nodes; "+
			"they stay, and these nodes get no line of this cloud", "target", target, "nodes", d.shadowed)
	}
}

// Note returns why the file lacks the content that it should have; "": the content is right.
func (w *Writer) Note() string {
	var notes []string
	add := func(format string, args ...any) { notes = append(notes, fmt.Sprintf(format, args...)) }
	if err := w.cfg.Election.Err(); err != nil {
		add("no writing replica can be elected: %v", kube.Explain(err))
	}
	if !w.leading.Load() {
		return strings.Join(notes, "; ")
	}
	w.mu.Lock()
	s := w.state
	w.mu.Unlock()
	if !w.namesKnown() {
		add("nothing is written yet: the Nodes have not been read")
	}
	if s.err != nil {
		add("cannot be written: %v", kube.Explain(s.err))
	}
	if s.omitted > 0 {
		add("full (%d of %d bytes): %d nodes have no line; use the responder (listen), which has no such limit",
			s.size, sizeLimit, s.omitted)
	}
	if s.watchErr != nil {
		add("changes of the ConfigMap by others are noticed late: %v", kube.Explain(s.watchErr))
	}
	if s.replicasErr != nil {
		add("lines of other replicas stay, since the pods of the Service are not known: %v",
			kube.Explain(s.replicasErr))
	}
	return strings.Join(notes, "; ")
}

// Status returns a summary of the writer's state, for operators.
func (w *Writer) Status() string {
	if !w.leading.Load() {
		return "this replica does not write"
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return fmt.Sprintf("this replica writes: %d lines, %d of %d bytes, %d nodes withheld, %d shadowed by foreign lines",
		w.state.entries, w.state.size, sizeLimit, w.state.withheld, w.state.shadowed)
}

// Collector returns the writer's metrics. All replicas have them. On replicas that do not write,
// the metrics of the file are 0.
func (w *Writer) Collector() prometheus.Collector { return writerCollector{w} }

// writerCollector reads the state at each scrape.
type writerCollector struct{ w *Writer }

// desc describes a metric.
func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(name, help, labels, nil)
}

// Describe implements prometheus.Collector.
func (c writerCollector) Describe(ch chan<- *prometheus.Desc) { prometheus.DescribeByCollect(c, ch) }

// Collect implements prometheus.Collector.
func (c writerCollector) Collect(ch chan<- prometheus.Metric) {
	w := c.w
	w.mu.Lock()
	s := w.state
	w.mu.Unlock()
	leader := 0
	if w.leading.Load() {
		leader = 1
	} else {
		s = writerState{}
	}
	gauge := func(name, help string, value int) {
		ch <- prometheus.MustNewConstMetric(desc(name, help), prometheus.GaugeValue, float64(value))
	}
	writes := desc("tunnel_dns_configmap_writes_total",
		"Attempts to read and write the ConfigMap, by result.", "result")
	for _, r := range kube.Reasons() {
		n := float64(w.stats.attempts[r].Load())
		ch <- prometheus.MustNewConstMetric(writes, prometheus.CounterValue, n, string(r))
	}
	written := desc("tunnel_dns_configmap_written_bytes_total",
		"Bytes written to the ConfigMap's key; each write replaces the whole key.")
	ch <- prometheus.MustNewConstMetric(written, prometheus.CounterValue, float64(w.stats.bytes.Load()))
	gauge("tunnel_dns_configmap_leader", "1 on the replica that writes the ConfigMap, else 0.", leader)
	gauge("tunnel_dns_configmap_entries", "Lines of this cloud in the ConfigMap.", s.entries)
	gauge("tunnel_dns_configmap_size_bytes",
		"Bytes of all values of the ConfigMap; from 921600 on no node is added.", s.size)
	gauge("tunnel_dns_configmap_omitted_nodes", "Nodes without a line because the ConfigMap is full.", s.omitted)
	gauge("tunnel_dns_configmap_shadowed_nodes",
		"Nodes without a line of this cloud because a foreign line has their name.", s.shadowed)
	gauge("tunnel_dns_withheld_nodes",
		"Connected nodes withheld from DNS: without a Node object, of the control plane, or not selected.", s.withheld)
}
