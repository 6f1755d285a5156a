package dns

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fsnotify/fsnotify"
	"github.com/prometheus/client_golang/prometheus"
	"pgregory.net/rapid"

	"tunnel/pkg/tunnel"
)

// stage is a truth that a test sets, and names that it allows.
type stage struct {
	mu      sync.Mutex // guards the following
	records []Record
	heard   []netip.Addr
	known   bool
	banned  tunnel.NodeName
	changed chan struct{}
	asked   int           // for Records
	told    chan struct{} // closed when known or banned change
}

func newStage(records ...Record) *stage {
	return &stage{records: records, heard: []netip.Addr{here4, here6}, known: true, changed: make(chan struct{}), told: make(chan struct{})}
}

func (s *stage) set(records ...Record) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.records = records
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *stage) know(known bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.known = known
	close(s.told)
	s.told = make(chan struct{})
}

func (s *stage) Lookup(tunnel.NodeName) []netip.Addr { panic("nobody asks") }

func (s *stage) Records() []Record {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked++
	return s.records
}

func (s *stage) Hears(a netip.Addr) bool { return slices.Contains(s.heard, a) }

func (s *stage) Changed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed
}

// stageNames is the stage as Names.
type stageNames struct{ *stage }

func (s stageNames) May(n tunnel.NodeName) (may, known bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.known && n != s.banned, s.known
}

func (s stageNames) Changed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.told
}

var (
	here4, here6 = netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1")
	edge1        = Record{"edge1", []netip.Addr{here4}}
	edge2        = Record{"edge2", []netip.Addr{here4, here6}}
)

const (
	says1 = "10.0.0.1    edge1 # tunnel\n"
	says2 = "10.0.0.1    edge2 # tunnel\nfd00::1    edge2 # tunnel\n"
)

func TestDifferences(t *testing.T) {
	now := time.Unix(1000, 0)
	soon, ago := now.Add(goneGrace), now.Add(-time.Hour)
	type since = map[tunnel.NodeName]time.Time
	for _, tt := range []struct {
		name    string
		file    string
		records []Record
		before  since
		want    since
	}{
		{name: "nothing"},
		{name: "as it should be", file: says1 + says2, records: []Record{edge1, edge2}},
		{name: "white space and order", file: "fd00::1 edge2 # tunnel\r\n\t10.0.0.1\tedge2\t# tunnel", records: []Record{edge2}},
		{name: "missing", file: says1, records: []Record{edge1, edge2}, want: since{"edge2": now}},
		{name: "half missing", file: "10.0.0.1 edge2 # tunnel\n", records: []Record{edge2}, want: since{"edge2": now}},
		{name: "moved here", file: "10.0.0.9 edge1 # tunnel\n", records: []Record{edge1}, want: since{"edge1": now}},
		{name: "one address too many", file: says1 + "10.0.0.9 edge1 # tunnel\n", records: []Record{edge1}, want: since{"edge1": now}},
		{name: "gone", file: says1, want: since{"edge1": soon}},
		{name: "held by one that is not heard", file: "10.0.0.9 edge1 # tunnel\n"},
		{name: "may not appear, and does not", records: []Record{{"banned", edge1.Addrs}}},
		{name: "may not appear", file: "10.0.0.1 banned # tunnel\n", records: []Record{{"banned", edge1.Addrs}}, want: since{"banned": now}},
		{name: "may not appear, wherever it is", file: "10.0.0.9 banned # tunnel\n", want: since{"banned": now}},
		{name: "somebody else's lines", file: "10.0.0.1 tunnel-cloud.example\n10.0.0.9 EDGE1. x\n" + says2, records: []Record{edge1, edge2}},
		{name: "still missing", records: []Record{edge1}, before: since{"edge1": ago, "edge2": ago}, want: since{"edge1": ago}},
		{name: "still gone", file: says1, before: since{"edge1": now.Add(time.Second)}, want: since{"edge1": now.Add(time.Second)}},
		{name: "gone, and then elsewhere", file: says1, records: []Record{{"edge1", []netip.Addr{here6}}}, before: since{"edge1": soon}, want: since{"edge1": now}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newStage(tt.records...)
			s.banned = "banned"
			got := differences(ParseHosts(tt.file), facts{truth: s, names: stageNames{s}, now: now}, tt.before)
			if !maps.Equal(got, tt.want) {
				t.Errorf("got %v, want %v", got, tt.want)
			}
		})
	}
}

// TestWriterLeavesNoDifference: what the Writer has made of any file differs from the
// truth in nothing, and before that it was what the Writer changed.
func TestWriterLeavesNoDifference(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := facts{truth: fixed{drawRecords.Draw(t, "records"), replicas}, alive: anybody, now: time.Unix(1000, 0)}
		l, file := new(ledger), ParseHosts(drawFile.Draw(t, "file"))
		l.decide(file, 0, f) // since when what is gone is missed
		early := f
		f.now = f.now.Add(goneGrace)
		d := l.decide(file, 0, f)
		left := differences(d.hosts, f, nil)
		if len(left) > 0 {
			t.Fatalf("the Writer wrote\n%s\nand it still differs: %v", d.hosts.String(), left)
		}
		foreign := readNames(file.Foreign)
		for n := range differences(file, early, nil) {
			old := slices.DeleteFunc(slices.Clone(file.Own), func(e Entry) bool { return e.Node != n })
			own := slices.DeleteFunc(slices.Clone(d.hosts.Own), func(e Entry) bool { return e.Node != n })
			if slices.Equal(own, old) {
				t.Fatalf("%s differs in\n%s\nand the Writer is content (foreign: %v)", n, file.String(), foreign[string(n)])
			}
		}
	})
}

// plays runs a HostsFile that has no notifications, in a bubble. At first edge1 is held,
// and the file says so.
func plays(t *testing.T, test func(t *testing.T, s *stage, h *HostsFile, j *journal)) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "hosts")
	put(t, path, says1)
	synctest.Test(t, func(t *testing.T) {
		log, j := newLog()
		s := newStage(edge1)
		h := NewHostsFile(path, s, stageNames{s}, log)
		h.notify = func(string) (*fsnotify.Watcher, error) { return nil, errors.New("switched off") }
		done := make(chan error)
		go func() { done <- h.Run(t.Context()) }()
		t.Cleanup(func() {
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
		pass(5 * time.Second) // so that no tick coincides with what the test does
		test(t, s, h, j)
	})
}

func pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func put(t testing.TB, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// wantMetrics checks all metrics.
func wantMetrics(t *testing.T, h *HostsFile, lag, differences, readable float64) {
	t.Helper()
	want := map[string]float64{"tunnel_dns_hosts_lag_seconds": lag, "tunnel_dns_hosts_differences": differences, "tunnel_dns_hosts_readable": readable}
	if got := gauges(t, h); !maps.Equal(got, want) {
		t.Errorf("metrics %v, want %v", got, want)
	}
}

func gauges(t *testing.T, h *HostsFile) map[string]float64 {
	t.Helper()
	reg := prometheus.NewPedanticRegistry()
	reg.MustRegister(h.Collector())
	families, err := reg.Gather()
	if err != nil {
		t.Error(err)
	}
	values := make(map[string]float64)
	for _, f := range families {
		values[f.GetName()] = f.GetMetric()[0].GetGauge().GetValue()
	}
	return values
}

func wantSaid(t *testing.T, h *HostsFile, status, note string) {
	t.Helper()
	if got := h.Status(); got != status {
		t.Errorf("status %q, want %q", got, status)
	}
	if got := h.Note(); got != strings.ReplaceAll(note, "PATH", h.path) {
		t.Errorf("note %q, want %q", got, note)
	}
}

// TestLag: the lag is the age of the oldest difference, from the change on to the moment
// in which the file says so.
func TestLag(t *testing.T) {
	plays(t, func(t *testing.T, s *stage, h *HostsFile, j *journal) {
		wantSaid(t, h, "lag 0s, 0 nodes differ", "")
		wantMetrics(t, h, 0, 0, 1)

		pass(time.Minute)
		s.set(edge1, edge2)
		pass(50 * time.Second)
		wantSaid(t, h, "lag 50s, 1 nodes differ", "")
		wantMetrics(t, h, 50, 1, 1)
		s.set(edge2) // edge1 is gone: its line may stay for a while
		pass(20 * time.Second)
		wantMetrics(t, h, 70, 1, 1)
		pass(49 * time.Second)
		wantSaid(t, h, "lag 1m59s, 2 nodes differ", "")
		if strings.Contains(j.String(), "is late") {
			t.Errorf("it is logged already:\n%s", j)
		}
		pass(11 * time.Second)
		wantSaid(t, h, "lag 2m10s, 2 nodes differ",
			"PATH has been late for 2m10s about 2 nodes (the log names some): see whether the ConfigMap is right (dns-configmap), then whether kubelet updates the volume")
		pass(time.Hour)
		if got := strings.Count(j.String(), "is late"); got != 1 || !strings.Contains(j.String(), "first=\"[edge1 edge2]\"") {
			t.Errorf("it is logged %d times that it is late, want once, with names:\n%s", got, j)
		}

		put(t, h.path, says1+says2) // the older of the two is over
		pass(hostsPoll)
		wantSaid(t, h, "lag 1h1m0s, 1 nodes differ", h.Note())
		put(t, h.path, says2)
		pass(hostsPoll)
		wantSaid(t, h, "lag 0s, 0 nodes differ", "")
		wantMetrics(t, h, 0, 0, 1)
		if !strings.Contains(j.String(), "not late any more") {
			t.Errorf("nobody says that it is over:\n%s", j)
		}
	})
}

// TestFlapping: a node that comes back in time is no difference.
func TestFlapping(t *testing.T) {
	plays(t, func(t *testing.T, s *stage, h *HostsFile, _ *journal) {
		for range 20 {
			s.set()
			pass(goneGrace - 2*time.Second)
			wantMetrics(t, h, 0, 0, 1)
			s.set(edge1)
			pass(10 * time.Second)
			wantMetrics(t, h, 0, 0, 1)
		}
	})
}

// TestHostsUnreadable: it is said once, in all places, what is the matter with the file.
func TestHostsUnreadable(t *testing.T) {
	const fix = "; mount the ConfigMap there as CoreDNS mounts it, or correct hosts in [mode.cloud.stream.dns]"
	for what, c := range map[string]struct {
		spoil func(path string) error
		why   string
	}{
		"missing": {os.Remove, "no such file or directory"},
		"a directory": {func(path string) error {
			return errors.Join(os.Remove(path), os.Mkdir(path, 0o700))
		}, "it is not a regular file"},
		"a pipe": {func(path string) error {
			return errors.Join(os.Remove(path), syscall.Mkfifo(path, 0o600))
		}, "it is not a regular file"},
		"too large": {func(path string) error {
			return os.WriteFile(path, make([]byte, hostsLimit+1), 0o600)
		}, "it is longer than 2097152 bytes, and a ConfigMap is not"},
	} {
		t.Run(what, func(t *testing.T) {
			plays(t, func(t *testing.T, s *stage, h *HostsFile, j *journal) {
				wantMetrics(t, h, 0, 0, 1)
				if err := c.spoil(h.path); err != nil {
					t.Fatal(err)
				}
				pass(5 * hostsPoll)
				wantSaid(t, h, "lag 0s, 0 nodes differ", "PATH cannot be read: "+c.why+fix)
				s.set(edge1, edge2) // what was read last is behind
				pass(time.Minute)
				wantMetrics(t, h, 60, 1, 0)
				if got := strings.Count(j.String(), "cannot be read"); got != 1 {
					t.Errorf("it is logged %d times, want once:\n%s", got, j)
				}
				if err := os.Remove(h.path); err != nil && what != "missing" {
					t.Fatal(err)
				}
				put(t, h.path, says1+says2)
				pass(hostsPoll)
				wantSaid(t, h, "lag 0s, 0 nodes differ", "")
				wantMetrics(t, h, 0, 0, 1)
				if got := strings.Count(j.String(), "can be read again"); got != 1 {
					t.Errorf("it is logged %d times that it is over, want once:\n%s", got, j)
				}
			})
		})
	}
}

// TestNamesUnknown: before anybody knows what may appear, nothing differs.
func TestNamesUnknown(t *testing.T) {
	plays(t, func(t *testing.T, s *stage, h *HostsFile, _ *journal) {
		s.know(false)
		put(t, h.path, says2)
		pass(time.Hour)
		wantSaid(t, h, "nothing to compare with before Kubernetes has said which nodes there are", "")
		wantMetrics(t, h, 0, 0, 1)
		s.know(true)
		pass(2 * time.Second) // edge2 is gone, and was when nobody counted
		wantMetrics(t, h, 2, 1, 1)
	})
}

// TestLooksOnceASecond: however much happens, there is one look a second, and none
// while nothing happens.
func TestLooksOnceASecond(t *testing.T) {
	plays(t, func(t *testing.T, s *stage, h *HostsFile, _ *journal) {
		before := s.asked
		for range 1000 {
			s.set(edge1)
			pass(10 * time.Millisecond)
		}
		if looks := s.asked - before; looks < 9 || looks > 11 {
			t.Errorf("%d looks in 10 s, want 10", looks)
		}
		pass(2 * hostsPause)
		before = s.asked
		pass(time.Hour)
		if looks := s.asked - before; looks != 0 {
			t.Errorf("%d looks while nothing has changed", looks)
		}
	})
}

// TestSymlinkSwap: the file as kubelet mounts it. Were the notifications not heard, it
// would take hostsPoll, and the test's patience is half of it.
func TestSymlinkSwap(t *testing.T) {
	dir := t.TempDir()
	mount := func(version, text string) {
		t.Helper()
		if err := os.Mkdir(filepath.Join(dir, version), 0o700); err != nil {
			t.Fatal(err)
		}
		put(t, filepath.Join(dir, version, "hosts"), text)
		if err := os.Symlink(version, filepath.Join(dir, "..data_tmp")); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")); err != nil {
			t.Fatal(err)
		}
	}
	mount("..v1", says1)
	path := filepath.Join(dir, "hosts")
	if err := os.Symlink("..data/hosts", path); err != nil {
		t.Fatal(err)
	}
	s := newStage(edge1)
	log, j := newLog()
	h := NewHostsFile(path, s, nil, log)
	run(t, h)
	eventually(t, "the file is read", func() bool { return h.Status() == "lag 0s, 0 nodes differ" })
	s.set(edge1, edge2)
	differ := func(n int) func() bool {
		return func() bool {
			return strings.HasSuffix(h.Status(), fmt.Sprintf(" %d nodes differ", n)) && h.Note() == ""
		}
	}
	eventually(t, "the new node is missed", differ(1))
	mount("..v2", says1+says2)
	if err := os.RemoveAll(filepath.Join(dir, "..v1")); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the new file is read", differ(0))
	if j.String() != "" {
		t.Errorf("logged:\n%s", j)
	}
}

// run runs h until the test ends.
func run(t *testing.T, h *HostsFile) {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- h.Run(t.Context()) }()
	t.Cleanup(func() {
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// TestHostsAsked: whoever asks, asks at any time.
func TestHostsAsked(t *testing.T) {
	s := newStage()
	log, _ := newLog()
	h := NewHostsFile(filepath.Join(t.TempDir(), "hosts"), s, stageNames{s}, log)
	wantSaid(t, h, "not read yet", "")
	wantMetrics(t, h, 0, 0, 0)
	run(t, h)
	var askers sync.WaitGroup
	for range 4 {
		askers.Go(func() {
			for range 200 {
				h.Note()
				h.Status()
				gauges(t, h)
			}
		})
	}
	for i := range 200 {
		s.set([]Record{edge1, edge2}[:i%3]...)
	}
	askers.Wait()
}

// A look at 10,000 nodes of which half differ.
func BenchmarkDifferences(b *testing.B) {
	var records []Record
	var file strings.Builder
	for i := range 10_000 {
		r := Record{tunnel.NodeName(fmt.Sprintf("edge%05d.example", i)), []netip.Addr{here4, here6}}
		records = append(records, r)
		for _, a := range r.Addrs[:1+i%2] {
			file.WriteString(Entry{a, r.Node}.line())
		}
	}
	s := newStage(records...)
	hosts, now := ParseHosts(file.String()), time.Now()
	var before map[tunnel.NodeName]time.Time
	b.ReportAllocs()
	for b.Loop() {
		before = differences(hosts, facts{truth: s, names: stageNames{s}, now: now}, before)
	}
	if len(before) != 5_000 {
		b.Fatal(len(before))
	}
}
