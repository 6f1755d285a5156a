package inventory

import (
	"log/slog"
	"testing"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

// A node is flapping while four of its sessions began within ten minutes.
func TestFlapping(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 0, 0, 0, time.UTC)
	i := New("", slog.New(slog.DiscardHandler))
	i.now = func() time.Time { return now }
	again := func() bool {
		s := &tunnel.Session{Node: "edge1"}
		i.Attached(s)
		i.Detached(s)
		return i.All()["edge1"].Flapping
	}
	for n := range 3 {
		if again() {
			t.Errorf("flapping after %d sessions", n+1)
		}
		now = now.Add(time.Minute)
	}
	if !again() {
		t.Error("not flapping after four sessions in three minutes")
	}
	now = now.Add(flapTime - 4*time.Minute)
	if !i.All()["edge1"].Flapping {
		t.Error("no longer flapping within the ten minutes")
	}
	now = now.Add(2 * time.Minute)
	if i.All()["edge1"].Flapping {
		t.Error("still flapping after the ten minutes")
	}
	if again() {
		t.Error("flapping by three old sessions and a new one")
	}
}
