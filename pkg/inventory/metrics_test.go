package inventory

import (
	"crypto/x509"
	"fmt"
	"log/slog"
	"math/big"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"tunnel.example/tunnel/pkg/tunnel"
)

// gathered returns the values of a collector, by name and state.
func gathered(t *testing.T, c prometheus.Collector) map[string]float64 {
	t.Helper()
	reg := prometheus.NewRegistry()
	reg.MustRegister(c)
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	all := make(map[string]float64)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			all[strings.TrimPrefix(f.GetName(), "tunnel_")+" "+m.GetLabel()[0].GetValue()] = m.GetGauge().GetValue()
		}
	}
	return all
}

// Each node counts once as connected or missing, whichever replica holds it; a node whose sessions end again and again
// is flapping for some minutes. A certificate that should have been renewed long ago expires soon.
func TestCollector(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	i := New("", slog.New(slog.DiscardHandler))
	i.now = func() time.Time { return now }
	i.Others = &others{names: []tunnel.NodeName{"elsewhere", "there"}}
	expected := func() ([]tunnel.NodeName, bool) { return []tunnel.NodeName{"elsewhere", "here", "never"}, true }
	c := i.Collector(expected, 60*time.Hour) // expires soon: in less than 10 hours
	certificate := func(node tunnel.NodeName, left time.Duration) {
		i.Issued(node, &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: now.Add(left)})
	}
	i.Attached(session("here", ""))
	certificate("here", 20*time.Hour)
	i.Attached(session("there", ""))
	ends(i, session("there", ""), "it has moved")
	certificate("there", 9*time.Hour)
	i.Attached(session("late", ""))
	certificate("late", 9*time.Hour)
	ends(i, session("gone", ""), "connection lost")
	certificate("gone", -time.Hour)
	for range flapSessions {
		s := session("weak", "")
		i.Attached(s)
		ends(i, s, "connection lost")
		now = now.Add(time.Minute)
	}
	want := map[string]float64{
		"nodes connected": 4, "nodes missing": 3, "nodes flapping": 1,
		"node_certificates expiring": 1, "node_certificates expired": 1,
	}
	check := func(when string) {
		t.Helper()
		for name, value := range gathered(t, c) {
			if value != want[name] {
				t.Errorf("%s: %s is %v, want %v", when, name, value, want[name])
			}
		}
	}
	check("at once")
	now = now.Add(flapTime)
	want["nodes flapping"] = 0
	check("later")
}

// A certificate counts at the replica to which its node is connected, which sees it renewed. It expires soon by its own
// lifetime, whatever the configured one is.
func TestCollectorAfterAMove(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	replica := func(there ...tunnel.NodeName) *Inventory {
		i := New("", slog.New(slog.DiscardHandler))
		i.now = func() time.Time { return now }
		i.Others = &others{names: there}
		return i
	}
	issue := func(i *Inventory) {
		i.Issued("edge1", &x509.Certificate{
			SerialNumber: big.NewInt(1), NotBefore: now, NotAfter: now.Add(24 * time.Hour),
		})
	}
	first, second := replica("edge1"), replica()
	check := func(when string, i *Inventory, expiring, expired float64) {
		t.Helper()
		all := gathered(t, i.Collector(nil, 0))
		if all["node_certificates expiring"] != expiring || all["node_certificates expired"] != expired {
			t.Errorf("%s: %v", when, all)
		}
	}
	issue(first)
	second.Attached(session("edge1", ""))
	now = now.Add(10 * time.Hour)
	issue(second)
	check("renewed", second, 0, 0)
	now = now.Add(20 * time.Hour)
	check("expired, by what the first replica knows", first, 0, 0)
	check("4 of 24 hours are left", second, 0, 0)
	now = now.Add(time.Second)
	check("less than a sixth is left", second, 1, 0)
	now = now.Add(4 * time.Hour)
	check("expired", second, 0, 1)
	first.noteOthers()
	first.Others = new(others)
	check("it was renewed elsewhere, and the node is missing", first, 0, 0)
	second.Detached(session("edge1", ""))
	check("expired, and the node is missing", second, 0, 1)
}

// othersUntil are others of which a node's own session ends as soon as its name was read.
type othersUntil struct {
	*others
	read func()
}

func (o othersUntil) Connected() []tunnel.NodeName {
	defer o.read()
	return o.others.Connected()
}

// A node that leaves this replica while its name is read has not been at another replica: its certificate still counts.
// One that is still there at the next look has been.
func TestCertificateOfANodeThatLeaves(t *testing.T) {
	i := New("", slog.New(slog.DiscardHandler))
	s := session("edge1", "")
	i.Attached(s)
	i.Issued("edge1", &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(-time.Hour)})
	all := &others{names: []tunnel.NodeName{"edge1"}}
	check := func(when string, expired float64) {
		t.Helper()
		i.noteOthers()
		i.Others = new(others)
		if n := gathered(t, i.Collector(nil, 0))["node_certificates expired"]; n != expired {
			t.Errorf("%s: %v certificates have expired, want %v", when, n, expired)
		}
	}
	i.Others = othersUntil{all, func() { i.Detached(s) }}
	check("it has left", 1)
	i.Others = all
	check("another replica holds it", 0)
}

// BenchmarkCollector counts 10,000 nodes, half of them at other replicas.
func BenchmarkCollector(b *testing.B) {
	i := New("", slog.New(slog.DiscardHandler))
	there := new(others)
	for n := range 10_000 {
		name := fmt.Sprintf("edge-%05d.example.com", n)
		s := session(name, "v1")
		i.Attached(s)
		if n%2 == 0 {
			i.Detached(s)
			there.names = append(there.names, tunnel.NodeName(name))
		}
	}
	i.Others = there
	for b.Loop() {
		if got := i.tally(nil, time.Hour); got.connected != 10_000 {
			b.Fatal(got)
		}
	}
}
