package dns

import (
	"fmt"
	"strings"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"

	"tunnel/pkg/kube"
)

// manyConflicts is how many attempts in a row others may come before us until it is
// worth a word.
const manyConflicts = 8

// writerStats counts what the writer did.
type writerStats struct {
	attempts map[kube.Reason]*atomic.Uint64 // the map is set once
	bytes    *atomic.Uint64
}

func newWriterStats() writerStats {
	s := writerStats{attempts: make(map[kube.Reason]*atomic.Uint64), bytes: new(atomic.Uint64)}
	for _, r := range kube.Reasons() {
		s.attempts[r] = new(atomic.Uint64)
	}
	return s
}

func (w *Writer) note(change func(*writerState)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	change(&w.state)
}

// wrote counts a write.
func (w *Writer) wrote(bytes int) {
	w.stats.attempts[kube.OK].Add(1)
	w.stats.bytes.Add(uint64(bytes)) //nolint:gosec // a length
	w.log.Debug("written", "target", w.cfg.Store.String(), "bytes", bytes)
}

// failed notes an attempt that failed, and says so once.
func (w *Writer) failed(err error) {
	reason := kube.ReasonFor(err)
	w.stats.attempts[reason].Add(1)
	say := false
	w.note(func(s *writerState) {
		if reason == kube.Conflict {
			if s.conflicts++; s.conflicts < manyConflicts {
				return
			}
		}
		say = s.err == nil || kube.ReasonFor(s.err) != reason
		s.err = err
	})
	if say {
		w.log.Warn("the nodes' names cannot be written; what is there stays, and it is tried again", "target", w.cfg.Store.String(), "err", kube.Explain(err))
	}
}

// kept notes that the file is as it should be.
func (w *Writer) kept(d decision, file kube.Content) {
	var before writerState
	w.note(func(s *writerState) {
		before = *s
		s.err, s.conflicts = nil, 0
		s.entries, s.size = len(d.hosts.Own), file.Others+len(file.Text)
		s.decision = d
		s.hosts = Hosts{} // it may be large, and nobody asks for it
	})
	target := w.cfg.Store.String()
	if before.err != nil {
		w.log.Info("the nodes' names can be written again", "target", target)
	}
	switch {
	case d.omitted > 0 && before.omitted == 0:
		w.log.Error("full: new nodes get no line there; use the responder (listen in [mode.cloud.stream.dns]), which has no such limit",
			"target", target, "bytes", file.Others+len(file.Text), "limit", sizeLimit, "omitted", d.omitted)
	case d.omitted == 0 && before.omitted > 0:
		w.log.Info("there is room again for all nodes", "target", target)
	}
	if d.shadowed > before.shadowed {
		w.log.Warn("somebody else's lines name nodes that are connected; they are left as they are, and ours are left out", "target", target, "nodes", d.shadowed)
	}
}

// Note says what keeps the file from being what it should be; "" if nothing does.
func (w *Writer) Note() string {
	var notes []string
	add := func(format string, args ...any) { notes = append(notes, fmt.Sprintf(format, args...)) }
	if err := w.cfg.Election.Err(); err != nil {
		add("which replica writes cannot be settled: %v", kube.Explain(err))
	}
	if !w.leading.Load() {
		return strings.Join(notes, "; ")
	}
	w.mu.Lock()
	s := w.state
	w.mu.Unlock()
	if !w.namesKnown() {
		add("nothing is written before Kubernetes has said which nodes there are")
	}
	if s.err != nil {
		add("cannot be written: %v", kube.Explain(s.err))
	}
	if s.omitted > 0 {
		add("full (%d of %d bytes): %d nodes have no line; use the responder (listen), which has no such limit", s.size, sizeLimit, s.omitted)
	}
	if s.watchErr != nil {
		add("changes by others are seen late: %v", kube.Explain(s.watchErr))
	}
	if s.replicasErr != nil {
		add("lines of other replicas stay, since the pods of the Service are not known: %v", kube.Explain(s.replicasErr))
	}
	return strings.Join(notes, "; ")
}

// Status says in a few words how things are.
func (w *Writer) Status() string {
	if !w.leading.Load() {
		return "this replica does not write"
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return fmt.Sprintf("this replica writes: %d lines, %d of %d bytes, %d nodes withheld, %d left to lines of others",
		w.state.entries, w.state.size, sizeLimit, w.state.withheld, w.state.shadowed)
}

// Collector returns the writer's metrics. All replicas have them; those of the file are
// 0 on the ones that do not write.
func (w *Writer) Collector() prometheus.Collector { return writerCollector{w} }

type writerCollector struct{ w *Writer }

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
	writes := desc("tunnel_dns_configmap_writes_total", "Attempts to write the ConfigMap, by what came of them; reading it first is part of the attempt.", "result")
	for _, r := range kube.Reasons() {
		ch <- prometheus.MustNewConstMetric(writes, prometheus.CounterValue, float64(w.stats.attempts[r].Load()), string(r))
	}
	ch <- prometheus.MustNewConstMetric(desc("tunnel_dns_configmap_written_bytes_total", "Bytes of the key that were written, whole each time."),
		prometheus.CounterValue, float64(w.stats.bytes.Load()))
	gauge("tunnel_dns_configmap_leader", "1 on the replica that writes the ConfigMap.", leader)
	gauge("tunnel_dns_configmap_entries", "Lines of ours in the ConfigMap.", s.entries)
	gauge("tunnel_dns_configmap_size_bytes", "Bytes of all values of the ConfigMap; from 921600 on no node is added.", s.size)
	gauge("tunnel_dns_configmap_omitted_nodes", "Nodes without a line because the ConfigMap is full.", s.omitted)
	gauge("tunnel_dns_configmap_shadowed_nodes", "Nodes without a line of ours because somebody else wrote one.", s.shadowed)
	gauge("tunnel_dns_withheld_nodes", "Connected nodes that may not appear: no such Node, of the control plane, or not selected.", s.withheld)
}
