package tap

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"tunnel.example/tunnel/internal/testkit/leaks"
	"tunnel.example/tunnel/pkg/tunnel"
)

func TestMain(m *testing.M) { leaks.Main(m) }

// next returns the next line, which must be there.
func next(t *testing.T, w *Watcher) Line {
	t.Helper()
	if !w.Waiting() {
		t.Fatal("no line waits")
	}
	line, ok := w.Next(t.Context())
	if !ok {
		t.Fatal("no line")
	}
	return line
}

// A watcher sees what happens while it watches: every node's conns, or those of one node.
func TestWatch(t *testing.T) {
	t.Parallel()
	h := New("cloud-0")
	if h.Watched() {
		t.Error("somebody watches a new hub")
	}
	h.Show(tunnel.PhaseOpen, tunnel.Event{Node: "before"})
	all, one := h.Watch(""), h.Watch("edge1")
	h.Show(tunnel.PhaseOpen, tunnel.Event{Node: "edge1", Kind: tunnel.EventTCP})
	h.Show(tunnel.PhaseRefused, tunnel.Event{Node: "edge2", Err: "no\x1b[2J\nway", Target: strings.Repeat("ü", 1000)})
	if l := next(t, one); l.Phase != tunnel.PhaseOpen || l.Node != "edge1" || l.Replica != "cloud-0" || one.Waiting() {
		t.Errorf("the watcher of edge1 sees %+v", l)
	}
	next(t, all)
	if l := next(t, all); l.Err != "no?[2J?way" || len(l.Target) > maxText+8 {
		t.Errorf("the texts are %q and %d bytes", l.Err, len(l.Target))
	}
	one.Close()
	if !h.Watched() {
		t.Error("the watch of another one has ended")
	}
	all.Close()
	all.Close()
	if h.Watched() {
		t.Error("somebody watches after the last Close")
	}
}

// A watcher that does not read loses lines, and is told how many. Nobody waits for it.
func TestSlowWatcher(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		h := New("cloud-0")
		w := h.Watch("")
		defer w.Close()
		for range queueLen + 3 {
			h.Show(tunnel.PhaseEnd, tunnel.Event{Node: "edge1"})
		}
		if l := next(t, w); l.Lost != 3 || l.Event != nil {
			t.Errorf("the first line is %+v", l)
		}
		for range queueLen {
			if l := next(t, w); l.Event == nil {
				t.Fatalf("a line is %+v", l)
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		if l, ok := w.Next(ctx); ok {
			t.Errorf("a line too many: %+v", l)
		}
	})
}

// A line is one object of JSON, and comes back as it was.
func TestLine(t *testing.T) {
	t.Parallel()
	for want, line := range map[string]Line{
		`{"replica":"cloud-0","lost":3}`: {Replica: "cloud-0", Lost: 3},
		`{"phase":"end","replica":"cloud-0","time":"0001-01-01T00:00:00Z","event":"tcp","result":"ok","node":"edge1"}`: {
			Phase: tunnel.PhaseEnd, Replica: "cloud-0",
			Event: &tunnel.Event{Kind: tunnel.EventTCP, Result: "ok", Node: "edge1"},
		},
	} {
		text, err := json.Marshal(line)
		if err != nil || string(text) != want {
			t.Errorf("%s, %v; want %s", text, err, want)
		}
		var back Line
		if err = json.Unmarshal(text, &back); err != nil || back.Phase != line.Phase || back.Lost != line.Lost ||
			(back.Event == nil) != (line.Event == nil) {
			t.Errorf("%s comes back as %+v, %v", text, back, err)
		}
	}
}
