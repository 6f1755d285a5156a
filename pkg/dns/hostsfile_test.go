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

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/tunnel"
)

// fakeTruth is a Truth and the state of a Names that a test sets.
type fakeTruth struct {
	mu           sync.Mutex // guards the following
	records      []Record
	replicas     []netip.Addr    // for which Hears returns true; set once
	known        bool            // Names knows which names may be published
	banned       tunnel.NodeName // the only name that may not be published
	changed      chan struct{}   // closed when records changes
	recordsCalls int             // calls of Records
	namesChanged chan struct{}   // closed when known changes
}

func newFakeTruth(records ...Record) *fakeTruth {
	return &fakeTruth{
		records: records, replicas: []netip.Addr{here4, here6}, known: true,
		changed: make(chan struct{}), namesChanged: make(chan struct{}),
	}
}

func (s *fakeTruth) set(records ...Record) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.records = records
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *fakeTruth) setKnown(known bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.known = known
	close(s.namesChanged)
	s.namesChanged = make(chan struct{})
}

func (s *fakeTruth) Lookup(tunnel.NodeName) []netip.Addr { panic("not used here") }

func (s *fakeTruth) Records() []Record {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.recordsCalls++
	return s.records
}

func (s *fakeTruth) Hears(a netip.Addr) bool { return slices.Contains(s.replicas, a) }

func (s *fakeTruth) Changed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed
}

// fakeNames is a fakeTruth as Names.
type fakeNames struct{ *fakeTruth }

func (s fakeNames) May(n tunnel.NodeName) (may, known bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.known && n != s.banned, s.known
}

func (s fakeNames) Changed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.namesChanged
}

var (
	here4, here6 = netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1")
	edge1        = Record{"edge1", []netip.Addr{here4}}
	edge2        = Record{"edge2", []netip.Addr{here4, here6}}
)

const (
	hosts1 = "10.0.0.1    edge1 # tunnel\n"
	hosts2 = "10.0.0.1    edge2 # tunnel\nfd00::1    edge2 # tunnel\n"
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
		{name: "as it should be", file: hosts1 + hosts2, records: []Record{edge1, edge2}},
		{
			name: "white space and order",
			file: "fd00::1 edge2 # tunnel\r\n\t10.0.0.1\tedge2\t# tunnel", records: []Record{edge2},
		},
		{name: "missing", file: hosts1, records: []Record{edge1, edge2}, want: since{"edge2": now}},
		{name: "half missing", file: "10.0.0.1 edge2 # tunnel\n", records: []Record{edge2}, want: since{"edge2": now}},
		{name: "moved here", file: "10.0.0.9 edge1 # tunnel\n", records: []Record{edge1}, want: since{"edge1": now}},
		{
			name: "one address too many",
			file: hosts1 + "10.0.0.9 edge1 # tunnel\n", records: []Record{edge1}, want: since{"edge1": now},
		},
		{name: "gone", file: hosts1, want: since{"edge1": soon}},
		{name: "held by a replica that the truth does not cover", file: "10.0.0.9 edge1 # tunnel\n"},
		{name: "may not be published, and is not", records: []Record{{"banned", edge1.Addrs}}},
		{
			name: "may not be published",
			file: "10.0.0.1 banned # tunnel\n", records: []Record{{"banned", edge1.Addrs}}, want: since{"banned": now},
		},
		{
			name: "may not be published, by whichever replica",
			file: "10.0.0.9 banned # tunnel\n", want: since{"banned": now},
		},
		{
			name: "foreign lines",
			file: "10.0.0.1 tunnel-cloud.example\n10.0.0.9 EDGE1. x\n" + hosts2, records: []Record{edge1, edge2},
		},
		{
			name:    "still missing",
			records: []Record{edge1}, before: since{"edge1": ago, "edge2": ago}, want: since{"edge1": ago},
		},
		{
			name: "still gone",
			file: hosts1, before: since{"edge1": now.Add(time.Second)}, want: since{"edge1": now.Add(time.Second)},
		},
		{
			name: "gone, and then at another address",
			file: hosts1, records: []Record{{"edge1", []netip.Addr{here6}}}, before: since{"edge1": soon},
			want: since{"edge1": now},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newFakeTruth(tt.records...)
			s.banned = "banned"
			got := differences(ParseHosts(tt.file), facts{truth: s, names: fakeNames{s}, now: now}, tt.before)
			if !maps.Equal(got, tt.want) {
				t.Errorf("got %v, want %v", got, tt.want)
			}
		})
	}
}

// A file that the Writer has written has no differences from the truth. Every difference before
// that is one that the Writer has changed.
func TestWriterLeavesNoDifference(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := facts{truth: fixed{drawRecords.Draw(t, "records"), replicas}, alive: alwaysAlive, now: time.Unix(1000, 0)}
		l, file := new(ledger), ParseHosts(drawFile.Draw(t, "file"))
		l.decide(file, 0, f) // so that the ledger notes which nodes are gone
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
				t.Fatalf("%s differs in\n%s\nand the Writer does not change it (foreign: %v)",
					n, file.String(), foreign[string(n)])
			}
		}
	})
}

// runHostsFile runs a test with a HostsFile without notifications, in a bubble of synctest. At the
// start edge1 is connected, and the file has its line.
func runHostsFile(t *testing.T, test func(t *testing.T, s *fakeTruth, h *HostsFile, j *testkit.Log)) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "hosts")
	put(t, path, hosts1)
	synctest.Test(t, func(t *testing.T) {
		log, j := testkit.NewLog()
		s := newFakeTruth(edge1)
		h := NewHostsFile(path, s, fakeNames{s}, log)
		h.notify = func(string) (*fsnotify.Watcher, error) { return nil, errors.New("switched off") }
		testkit.Run(t, h.Run)
		advance(5 * time.Second) // so that no tick coincides with an action of the test
		test(t, s, h, j)
	})
}

// advance lets time pass in the bubble.
func advance(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func put(t testing.TB, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

// wantMetrics checks the values of all metrics.
func wantMetrics(t *testing.T, h *HostsFile, lag, differences, readable float64) {
	t.Helper()
	want := map[string]float64{
		"tunnel_dns_hosts_lag_seconds": lag, "tunnel_dns_hosts_differences": differences,
		"tunnel_dns_hosts_readable": readable,
	}
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

// wantStatus checks Status and Note. In note, PATH stands for the path of the file.
func wantStatus(t *testing.T, h *HostsFile, status, note string) {
	t.Helper()
	if got := h.Status(); got != status {
		t.Errorf("status %q, want %q", got, status)
	}
	if got := h.Note(); got != strings.ReplaceAll(note, "PATH", h.path) {
		t.Errorf("note %q, want %q", got, note)
	}
}

// The lag is the age of the oldest difference: from the change until the file has it.
func TestLag(t *testing.T) {
	runHostsFile(t, func(t *testing.T, s *fakeTruth, h *HostsFile, j *testkit.Log) {
		wantStatus(t, h, "lag 0s, 0 nodes differ", "")
		wantMetrics(t, h, 0, 0, 1)

		advance(time.Minute)
		s.set(edge1, edge2)
		advance(50 * time.Second)
		wantStatus(t, h, "lag 50s, 1 nodes differ", "")
		wantMetrics(t, h, 50, 1, 1)
		s.set(edge2) // edge1 is gone, and its line may stay for goneGrace
		advance(20 * time.Second)
		wantMetrics(t, h, 70, 1, 1)
		advance(49 * time.Second)
		wantStatus(t, h, "lag 1m59s, 2 nodes differ", "")
		if strings.Contains(j.String(), "is out of date") {
			t.Errorf("the lag is logged too early:\n%s", j)
		}
		advance(11 * time.Second)
		wantStatus(t, h, "lag 2m10s, 2 nodes differ",
			"PATH has been late for 2m10s about 2 nodes (the log names some): "+
				"see whether the ConfigMap is right (dns-configmap), then whether kubelet updates the volume")
		advance(time.Hour)
		if got := strings.Count(j.String(), "is out of date"); got != 1 ||
			!strings.Contains(j.String(), "first=\"[edge1 edge2]\"") {
			t.Errorf("the lag is logged %d times, want once, with names:\n%s", got, j)
		}

		put(t, h.path, hosts1+hosts2) // the older of the two differences has ended
		advance(hostsPoll)
		wantStatus(t, h, "lag 1h1m0s, 1 nodes differ", h.Note())
		put(t, h.path, hosts2)
		advance(hostsPoll)
		wantStatus(t, h, "lag 0s, 0 nodes differ", "")
		wantMetrics(t, h, 0, 0, 1)
		if !strings.Contains(j.String(), "is up to date again") {
			t.Errorf("the end of the lag is not logged:\n%s", j)
		}
	})
}

// A node that comes back within goneGrace is no difference.
func TestFlapping(t *testing.T) {
	runHostsFile(t, func(t *testing.T, s *fakeTruth, h *HostsFile, _ *testkit.Log) {
		for range 20 {
			s.set()
			advance(goneGrace - 2*time.Second)
			wantMetrics(t, h, 0, 0, 1)
			s.set(edge1)
			advance(10 * time.Second)
			wantMetrics(t, h, 0, 0, 1)
		}
	})
}

// If the file cannot be read, the log (once), Note and the metrics report why.
func TestHostsUnreadable(t *testing.T) {
	const fix = "; mount the ConfigMap there as CoreDNS mounts it, or correct hosts in [mode.cloud.stream.dns]"
	for what, c := range map[string]struct {
		spoil func(path string) error // makes the file unreadable
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
			return os.WriteFile(path, make([]byte, maxHostsSize+1), 0o600)
		}, "it is longer than 2097152 bytes, the most that a ConfigMap may hold"},
	} {
		t.Run(what, func(t *testing.T) {
			runHostsFile(t, func(t *testing.T, s *fakeTruth, h *HostsFile, j *testkit.Log) {
				wantMetrics(t, h, 0, 0, 1)
				if err := c.spoil(h.path); err != nil {
					t.Fatal(err)
				}
				advance(5 * hostsPoll)
				wantStatus(t, h, "lag 0s, 0 nodes differ", "PATH cannot be read: "+c.why+fix)
				s.set(edge1, edge2) // the content that was read last now lags behind
				advance(time.Minute)
				wantMetrics(t, h, 60, 1, 0)
				if got := strings.Count(j.String(), "cannot be read"); got != 1 {
					t.Errorf("the failure is logged %d times, want once:\n%s", got, j)
				}
				if err := os.Remove(h.path); err != nil && what != "missing" {
					t.Fatal(err)
				}
				put(t, h.path, hosts1+hosts2)
				advance(hostsPoll)
				wantStatus(t, h, "lag 0s, 0 nodes differ", "")
				wantMetrics(t, h, 0, 0, 1)
				if got := strings.Count(j.String(), "can be read again"); got != 1 {
					t.Errorf("the end of the failure is logged %d times, want once:\n%s", got, j)
				}
			})
		})
	}
}

// While it is unknown which names may be published, there is no difference.
func TestNamesUnknown(t *testing.T) {
	runHostsFile(t, func(t *testing.T, s *fakeTruth, h *HostsFile, _ *testkit.Log) {
		s.setKnown(false)
		put(t, h.path, hosts2)
		advance(time.Hour)
		wantStatus(t, h, "not compared yet: the Nodes have not been read", "")
		wantMetrics(t, h, 0, 0, 1)
		s.setKnown(true)
		// The lag of edge1, whose line is missing, starts now. The line of edge2 may stay for goneGrace.
		advance(2 * time.Second)
		wantMetrics(t, h, 2, 1, 1)
	})
}

// However often the truth changes, the file is compared once a second. Without changes it is not
// compared.
func TestComparesOnceASecond(t *testing.T) {
	runHostsFile(t, func(t *testing.T, s *fakeTruth, h *HostsFile, _ *testkit.Log) {
		before := s.recordsCalls
		for range 1000 {
			s.set(edge1)
			advance(10 * time.Millisecond)
		}
		if n := s.recordsCalls - before; n < 9 || n > 11 {
			t.Errorf("%d comparisons in 10 s, want 10", n)
		}
		advance(2 * hostsMinInterval)
		before = s.recordsCalls
		advance(time.Hour)
		if n := s.recordsCalls - before; n != 0 {
			t.Errorf("%d comparisons while nothing has changed", n)
		}
	})
}

// HostsFile notices an update of the file as kubelet does it, by notifications.
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
	mount("..v1", hosts1)
	path := filepath.Join(dir, "hosts")
	if err := os.Symlink("..data/hosts", path); err != nil {
		t.Fatal(err)
	}
	s := newFakeTruth(edge1)
	log, j := testkit.NewLog()
	h := NewHostsFile(path, s, nil, log)
	h.poll = time.Hour
	testkit.Run(t, h.Run)
	testkit.Eventually(t, "the file is read", func() bool { return h.Status() == "lag 0s, 0 nodes differ" })
	s.set(edge1, edge2)
	differ := func(n int) func() bool {
		return func() bool {
			return strings.HasSuffix(h.Status(), fmt.Sprintf(" %d nodes differ", n)) && h.Note() == ""
		}
	}
	testkit.Eventually(t, "the new node is missing in the file", differ(1))
	mount("..v2", hosts1+hosts2)
	if err := os.RemoveAll(filepath.Join(dir, "..v1")); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the new file is read", differ(0))
	if j.String() != "" {
		t.Errorf("logged:\n%s", j)
	}
}

// Any goroutine may call the methods at any time. The race detector checks this.
func TestHostsFileConcurrentUse(t *testing.T) {
	s := newFakeTruth()
	log, _ := testkit.NewLog()
	h := NewHostsFile(filepath.Join(t.TempDir(), "hosts"), s, fakeNames{s}, log)
	wantStatus(t, h, "not read yet", "")
	wantMetrics(t, h, 0, 0, 0)
	testkit.Run(t, h.Run)
	var readers sync.WaitGroup
	for range 4 {
		readers.Go(func() {
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
	readers.Wait()
}

// BenchmarkDifferences measures a comparison of 10,000 nodes, half of which differ.
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
	s := newFakeTruth(records...)
	hosts, now := ParseHosts(file.String()), time.Now()
	var before map[tunnel.NodeName]time.Time
	b.ReportAllocs()
	for b.Loop() {
		before = differences(hosts, facts{truth: s, names: fakeNames{s}, now: now}, before)
	}
	if len(before) != 5_000 {
		b.Fatal(len(before))
	}
}
