package dns

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"tunnel.example/tunnel/pkg/tunnel"
)

var replicas = []netip.Addr{addr("10.0.0.1"), addr("10.0.0.2"), addr("10.0.0.3"), addr("fd00::1")}

func neverAlive(netip.Addr) bool  { return false }
func alwaysAlive(netip.Addr) bool { return true }

// merge returns the file after one decision of a new ledger.
func merge(text string, records []Record) string {
	f := facts{truth: fixed{records, replicas}, alive: neverAlive, now: time.Unix(1000, 0)}
	return new(ledger).decide(ParseHosts(text), 0, f).hosts.String()
}

// Merging is idempotent. The order in which the replicas' records arrive, and the order of the
// lines in the file, make no difference.
func TestMergeProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text, a, b := drawFile.Draw(t, "file"), drawRecords.Draw(t, "a"), drawRecords.Draw(t, "b")
		both := union(a, b)
		once := merge(text, both)
		if twice := merge(once, both); twice != once {
			t.Fatalf("not idempotent: %q, then %q", once, twice)
		}
		if ab, ba := merge(merge(text, a), both), merge(merge(text, b), both); ab != ba || ab != once {
			// After a move, the file has no line for the node's previous replica.
			t.Fatalf("not commutative: a first %q, b first %q, at once %q", ab, ba, once)
		}
		got, want := ParseHosts(once).Foreign, ParseHosts(text).Foreign
		if strings.TrimSuffix(got, "\n") != strings.TrimSuffix(want, "\n") {
			t.Fatalf("foreign lines %q became %q", want, got)
		}
		lines := ParseHosts(once).Own
		if !slices.IsSortedFunc(lines, Entry.compare) {
			t.Fatalf("not sorted: %v", lines)
		}
		foreign := readNames(ParseHosts(text).Foreign)
		for _, r := range both {
			_, taken := foreign[string(r.Node)]
			if has := slices.Contains(lines, Entry{r.Addrs[0], r.Node}); has == taken {
				t.Fatalf("%v: has a line: %v, has one by somebody else: %v", r, has, taken)
			}
		}
	})
}

func union(a, b []Record) []Record {
	held := make(map[tunnel.NodeName]netip.Addr)
	for _, r := range append(slices.Clone(a), b...) {
		if old, ok := held[r.Node]; !ok || r.Addrs[0].Less(old) {
			held[r.Node] = r.Addrs[0]
		}
	}
	return recordsOf(held)
}

// After any sequence of changes, and goneGrace later, the file has exactly one line of ours for each
// connected node without a foreign line.
func TestLedgerConverges(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l, now := new(ledger), time.Unix(1000, 0)
		text := drawFile.Draw(t, "file")
		var records []Record
		for range rapid.IntRange(1, 8).Draw(t, "steps") {
			records = drawRecords.Draw(t, "records")
			now = now.Add(time.Duration(rapid.IntRange(0, 40).Draw(t, "seconds")) * time.Second)
			d := l.decide(ParseHosts(text), 0, facts{truth: fixed{records, replicas}, alive: neverAlive, now: now})
			text = d.hosts.String()
		}
		now = now.Add(goneGrace)
		f := facts{truth: fixed{records, replicas}, alive: neverAlive, now: now}
		text = l.decide(ParseHosts(text), 0, f).hosts.String()
		foreign := readNames(ParseHosts(text).Foreign)
		var want []Entry
		for _, r := range records {
			if _, taken := foreign[string(r.Node)]; !taken {
				want = append(want, Entry{r.Addrs[0], r.Node})
			}
		}
		if got := ParseHosts(text).Own; !slices.Equal(got, want) {
			t.Fatalf("got %v, want %v", got, want)
		}
	})
}

func TestLedgerGone(t *testing.T) {
	e1, e2, other := Entry{addr("10.0.0.1"), "edge1"}, Entry{addr("10.0.0.1"), "edge2"}, Entry{addr("10.0.0.2"), "edge3"}
	full := Hosts{Own: []Entry{e1, e2, other}}
	file := full // the result of the previous step
	start := time.Unix(1000, 0)
	us := []netip.Addr{addr("10.0.0.1")}
	one := fixed{[]Record{{"edge1", us}}, us}
	step := func(l *ledger, after time.Duration, truth Truth, alive func(netip.Addr) bool, want ...Entry) decision {
		t.Helper()
		d := l.decide(file, 0, facts{truth: truth, alive: alive, now: start.Add(after)})
		if !slices.Equal(d.hosts.Own, want) {
			t.Errorf("after %v: got %v, want %v", after, d.hosts.Own, want)
		}
		file = d.hosts
		return d
	}

	l := new(ledger)
	d := step(l, 0, one, alwaysAlive, e1, e2, other)
	if want := start.Add(goneGrace); !d.again.Equal(want) {
		t.Errorf("edge2's line is due at %v, not %v", want, d.again)
	}
	step(l, goneGrace-1, one, alwaysAlive, e1, e2, other)
	step(l, goneGrace, one, alwaysAlive, e1, other)
	// The truth does not cover the other replica: its lines stay as long as its pod exists.
	step(l, time.Hour, one, alwaysAlive, e1, other)
	step(l, time.Hour, one, neverAlive, e1, other) // its pod is gone, so goneGrace starts
	step(l, time.Hour+goneGrace, one, neverAlive, e1)

	t.Run("for a node that comes back, goneGrace starts again", func(t *testing.T) {
		l := new(ledger)
		file = full
		both := fixed{[]Record{{"edge1", us}, {"edge2", us}}, us}
		step(l, 0, one, alwaysAlive, e1, e2, other)
		step(l, goneGrace-1, both, alwaysAlive, e1, e2, other)
		step(l, goneGrace, one, alwaysAlive, e1, e2, other)
		step(l, 2*goneGrace-1, one, alwaysAlive, e1, e2, other)
		step(l, 2*goneGrace, one, alwaysAlive, e1, other)
	})
	t.Run("a node that has moved has one line", func(t *testing.T) {
		file = full
		moved := fixed{[]Record{{"edge1", us}, {"edge2", us}, {"edge3", us}}, us}
		step(new(ledger), 0, moved, alwaysAlive, e1, e2, Entry{addr("10.0.0.1"), "edge3"})
	})
}

// only is a Names that lets only these names be published.
type only []tunnel.NodeName

func (o only) May(n tunnel.NodeName) (may, known bool) { return slices.Contains(o, n), true }
func (only) Changed() <-chan struct{}                  { return nil }

func TestLedgerWithholds(t *testing.T) {
	us := []netip.Addr{addr("10.0.0.1"), addr("fd00::1")}
	truth := fixed{[]Record{{"edge1", us}, {"kubernetes.default.svc", us}, {"metrics-server", us}}, us}
	file := Hosts{Own: []Entry{{us[0], "metrics-server"}}}
	f := facts{truth: truth, names: only{"edge1"}, alive: alwaysAlive, now: time.Unix(1000, 0)}
	d := new(ledger).decide(file, 0, f)
	if got, want := d.hosts.String(), "10.0.0.1    edge1 # tunnel\nfd00::1    edge1 # tunnel\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if d.withheld != 2 {
		t.Errorf("withheld %d names, want 2", d.withheld)
	}
}

// In a full file, nodes that have a line keep it, also when they move. New nodes get no line until
// there is room.
func TestLedgerFull(t *testing.T) {
	us, them := []netip.Addr{addr("10.0.0.1")}, []netip.Addr{addr("10.0.0.2")}
	var old, all []Record
	for i := range 30000 {
		r := Record{tunnel.NodeName(fmt.Sprintf("edge-%05d", i)), us}
		all = append(all, r)
		if i%2 == 1 {
			old = append(old, r)
		}
	}
	f := facts{alive: neverAlive, now: time.Unix(1000, 0)}
	f.truth = fixed{old, replicas}
	before := new(ledger).decide(Hosts{}, 0, f)
	if before.omitted != 0 || len(before.hosts.Own) != len(old) {
		t.Fatalf("%d nodes fit: %d lines, %d omitted", len(old), len(before.hosts.Own), before.omitted)
	}
	f.truth = fixed{all, replicas}
	d := new(ledger).decide(before.hosts, 0, f)
	if size := len(d.hosts.String()); size > sizeLimit || size < sizeLimit-100 {
		t.Errorf("%d bytes, the limit is %d", size, sizeLimit)
	}
	if d.omitted != len(all)-len(d.hosts.Own) || d.omitted == 0 {
		t.Errorf("%d omitted, %d of %d have a line", d.omitted, len(d.hosts.Own), len(all))
	}
	has := make(map[Entry]bool)
	for _, e := range d.hosts.Own {
		has[e] = true
	}
	for _, e := range before.hosts.Own {
		if !has[e] {
			t.Fatalf("%v lost its line to a new node", e)
		}
	}

	moved := slices.Clone(all)
	for i := range moved {
		moved[i].Addrs = them
	}
	f.truth = fixed{moved, replicas}
	after := new(ledger).decide(d.hosts, 0, f)
	names := func(h Hosts) []tunnel.NodeName {
		set := make(map[tunnel.NodeName]bool)
		for _, e := range h.Own {
			set[e.Node] = true
		}
		return slices.Sorted(maps.Keys(set))
	}
	if !slices.Equal(names(after.hosts), names(d.hosts)) {
		t.Errorf("after all nodes moved, other nodes have a line than before: %d, then %d",
			len(names(d.hosts)), len(names(after.hosts)))
	}
	// Other writers have filled the ConfigMap beyond our limit. Nodes that move keep their lines.
	after = new(ledger).decide(d.hosts, fullSize-sizeLimit-100, f)
	if !slices.Equal(names(after.hosts), names(d.hosts)) {
		t.Errorf("after all nodes moved in a ConfigMap past the limit, %d of %d still have a line",
			len(names(after.hosts)), len(names(d.hosts)))
	}
	if big := new(ledger).decide(Hosts{}, sizeLimit, f); len(big.hosts.Own) != 0 || big.omitted != len(all) {
		t.Errorf("the other keys of the ConfigMap count, too: %d lines", len(big.hosts.Own))
	}
}

// BenchmarkDecide measures a decision about the hosts file at 10,000 nodes. full measures it at
// 100,000 nodes, more than the file can hold; its metric lines is how many it holds.
func BenchmarkDecide(b *testing.B) {
	f := factsOf(10_000)
	text := new(ledger).decide(Hosts{}, 0, f).hosts.String()
	b.Run("records", func(b *testing.B) {
		truth := Merged{mappedOf(f.truth.Records())}
		b.ReportAllocs()
		for b.Loop() {
			truth.Records()
		}
	})
	b.Run("parse", func(b *testing.B) {
		b.SetBytes(int64(len(text)))
		b.ReportAllocs()
		for b.Loop() {
			ParseHosts(text)
		}
	})
	hosts := ParseHosts(text)
	b.Run("decide", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			new(ledger).decide(hosts, 0, f)
		}
	})
	b.Run("print", func(b *testing.B) {
		b.SetBytes(int64(len(text)))
		b.ReportAllocs()
		for b.Loop() {
			_ = hosts.String()
		}
		b.ReportMetric(float64(len(text))/float64(len(hosts.Own)), "B/line")
	})
	b.Run("full", func(b *testing.B) {
		f := factsOf(100_000)
		file := new(ledger).decide(Hosts{}, 0, f).hosts
		b.ReportAllocs()
		for b.Loop() {
			new(ledger).decide(file, 0, f)
		}
		b.ReportMetric(float64(len(file.Own)), "lines")
	})
}

// factsOf returns facts about n nodes that one replica holds.
func factsOf(n int) facts {
	us := []netip.Addr{addr("10.0.0.1")}
	var records []Record
	for i := range n {
		records = append(records, Record{tunnel.NodeName(fmt.Sprintf("edge-%05d", i)), us})
	}
	return facts{truth: fixed{records, us}, alive: neverAlive, now: time.Unix(1000, 0)}
}

// mapped holds the addresses for each node, as peers.Peers returns them.
type mapped map[tunnel.NodeName][]netip.Addr

func mappedOf(records []Record) mapped {
	all := make(mapped, len(records))
	for _, r := range records {
		all[r.Node] = r.Addrs
	}
	return all
}

func (m mapped) Addrs(n tunnel.NodeName) []netip.Addr  { return m[n] }
func (m mapped) All() map[tunnel.NodeName][]netip.Addr { return m }
func (mapped) Hears(netip.Addr) bool                   { return true }
func (mapped) Changed() <-chan struct{}                { return nil }
