package audit

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/internal/testkit/leaks"
	"tunnel.example/tunnel/pkg/tunnel"
)

func TestMain(m *testing.M) { leaks.Main(m) }

// events reads a file, and fails unless each line is an object.
func events(t *testing.T, path string) (all []map[string]any) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for line := range bytes.Lines(text) {
		e := make(map[string]any)
		if err := json.Unmarshal(line, &e); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		all = append(all, e)
	}
	return all
}

func newLog(t *testing.T, path string) (*Log, *testkit.Log) {
	t.Helper()
	log, text := testkit.NewLog()
	l := New(Config{Path: path, Log: log})
	t.Cleanup(func() { l.Close() })
	return l, text
}

// written closes l, so that all its events are in the file.
func written(t *testing.T, l *Log) {
	t.Helper()
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}

// What callers choose cannot break a line, or make it long; what is empty is left out.
func TestLines(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "audit.json")
	l, _ := newLog(t, path)
	if err := l.Open(); err != nil {
		t.Fatal(err)
	}
	l.Record(tunnel.Event{Kind: tunnel.EventExec, Result: "ok", Node: "edge1", Path: "/exec/\n\"\xff\x00", Seconds: 1.5})
	l.Record(tunnel.Event{Kind: tunnel.EventTCP, Result: "denied", Caller: strings.Repeat("ü", 1<<20)})
	written(t, l)
	got := events(t, path)
	if len(got) != 2 {
		t.Fatalf("%d events", len(got))
	}
	if e := got[0]; e["event"] != "exec" || e["node"] != "edge1" || e["duration_seconds"] != 1.5 || e["caller"] != nil {
		t.Errorf("the first event is %v", e)
	}
	if at, err := time.Parse(time.RFC3339, got[0]["time"].(string)); err != nil || time.Since(at) > time.Minute {
		t.Errorf("the time is %v, %v", got[0]["time"], err)
	}
	if n := len(got[1]["caller"].(string)); n > maxText+8 {
		t.Errorf("a text has %d bytes", n)
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
}

// Two processes, and many goroutines of each, write whole lines into one file.
func TestTogether(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "audit.json")
	var writing sync.WaitGroup
	var logs []*Log
	for range 2 {
		l, _ := newLog(t, path)
		logs = append(logs, l)
		for range 8 {
			writing.Go(func() {
				for range 100 {
					l.Record(tunnel.Event{Kind: tunnel.EventTCP, Result: "ok", Target: strings.Repeat("x", 900)})
				}
			})
		}
	}
	writing.Wait()
	for _, l := range logs {
		written(t, l)
	}
	if n := len(events(t, path)); n != 1600 {
		t.Errorf("%d events, want 1600", n)
	}
}

// newOutput returns an output whose method record checks before each line whether its file was renamed.
func newOutput(t *testing.T, cfg Config) (*output, *testkit.Log) {
	t.Helper()
	log, text := testkit.NewLog()
	cfg.Log = log
	o := &output{cfg: cfg, failing: new(tunnel.Repeats)}
	t.Cleanup(func() { o.close() })
	return o, text
}

// record writes an event of a node. An output checks once a second whether its file was renamed, and here each time.
func (o *output) record(node tunnel.NodeName) error {
	o.looked = time.Time{}
	return o.write([]byte(`{"node":"` + string(node) + "\"}\n"))
}

// wantNodes fails unless the file has one event of each of the nodes, in this order.
func wantNodes(t *testing.T, path string, nodes ...string) {
	t.Helper()
	got := events(t, path)
	for i, n := range nodes {
		if len(got) != len(nodes) || got[i]["node"] != n {
			t.Errorf("%s has %v, want %v", filepath.Base(path), got, nodes)
			return
		}
	}
}

// A file that was renamed, or removed, is left; the next events go to the file that has its name.
func TestRotated(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "audit.json")
	o, text := newOutput(t, Config{Path: path})
	must(t, o.record("edge1"))
	must(t, os.Rename(path, path+".1"))
	must(t, o.record("edge2"))
	wantNodes(t, path+".1", "edge1")
	wantNodes(t, path, "edge2")
	must(t, os.Remove(path))
	must(t, o.record("edge3"))
	wantNodes(t, path, "edge3")
	if s := text.String(); s != "" {
		t.Errorf("the log says %s", s)
	}
}

// While the new file cannot be opened, no event is lost: the old file takes them, and the log says so once.
func TestRotationFails(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "audit.json")
	o, text := newOutput(t, Config{Path: path})
	must(t, o.record("edge1"))
	must(t, os.Rename(path, path+".1"))
	must(t, os.Mkdir(path, 0o700)) // cannot be opened to write, whoever runs the test
	must(t, o.record("edge2"))
	must(t, o.record("edge3"))
	wantNodes(t, path+".1", "edge1", "edge2", "edge3")
	if n := len(text.Lines("level=ERROR", "cannot be opened again")); n != 1 {
		t.Errorf("%d lines", n)
	}
	must(t, os.Remove(path))
	must(t, o.record("edge4"))
	wantNodes(t, path, "edge4")
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// short writes the first bytes of the first line, and fails.
type short struct{ bytes.Buffer }

func (s *short) Write(p []byte) (int, error) {
	if s.Len() == 0 {
		s.Buffer.Write(p[:5])
		return 5, errors.New("no space left on device")
	}
	return s.Buffer.Write(p)
}

// An event that is written in part does not spoil the line of the next one.
func TestTorn(t *testing.T) {
	t.Parallel()
	out := new(short)
	o, _ := newOutput(t, Config{Path: Stdout, Stdout: out})
	if o.record("edge1") == nil {
		t.Error("the first event is not lost")
	}
	must(t, o.record("edge2"))
	must(t, o.record("edge3"))
	if got, want := out.String(), "{\"nod\n{\"node\":\"edge2\"}\n{\"node\":\"edge3\"}\n"; got != want {
		t.Errorf("the output is %q, want %q", got, want)
	}
}

// An event that cannot be written is counted, and logged once for many.
func TestLost(t *testing.T) {
	t.Parallel()
	l, text := newLog(t, filepath.Join(t.TempDir(), "no-such-folder", "audit.json"))
	if err := l.Open(); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Open: %v", err)
	}
	for range 10 {
		l.Record(tunnel.Event{Kind: tunnel.EventJoin})
	}
	written(t, l)
	l.Record(tunnel.Event{Kind: tunnel.EventJoin})
	n := len(text.Lines("level=ERROR", "an event of the audit is lost", "no such file"))
	if n != 1 || l.lost.Load() != 11 {
		t.Errorf("%d lines, %d lost", n, l.lost.Load())
	}
	if n := len(text.Lines("level=ERROR", "an event of the audit is lost", "the audit is closed")); n != 1 {
		t.Errorf("%d lines about an event after Close", n)
	}
}

// stuck is an output that takes nothing until it is released.
type stuck struct{ released chan struct{} }

func (s stuck) Write(p []byte) (int, error) {
	<-s.released
	return len(p), nil
}

// A stuck disk or pipe stops nobody: Record returns, events beyond the queue are lost, and Close gives up.
func TestStuck(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		log, text := testkit.NewLog()
		out := stuck{make(chan struct{})}
		l := New(Config{Path: Stdout, Stdout: out, Log: log})
		l.Record(tunnel.Event{Kind: tunnel.EventJoin})
		synctest.Wait() // the writer has it
		for range queueLen + 3 {
			l.Record(tunnel.Event{Kind: tunnel.EventJoin})
		}
		if n := len(text.Lines("level=ERROR", "an event of the audit is lost", "stuck")); n != 1 || l.lost.Load() != 3 {
			t.Errorf("%d lines, %d lost", n, l.lost.Load())
		}
		if err := l.Close(); err == nil || !strings.Contains(err.Error(), "4097 events of the audit are lost") {
			t.Errorf("Close: %v", err)
		}
		if l.lost.Load() != queueLen+4 {
			t.Errorf("%d lost", l.lost.Load())
		}
		close(out.released)
	})
}

func TestStdout(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	l := New(Config{Path: Stdout, Stdout: &out})
	l.Record(tunnel.Event{Kind: tunnel.EventRevoke, Result: "ok", Node: "edge1"})
	written(t, l)
	if !strings.HasSuffix(out.String(), `"event":"revoke","result":"ok","node":"edge1"}`+"\n") {
		t.Errorf("standard output has %q", out.String())
	}
}
