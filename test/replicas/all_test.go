package replicas

import (
	"testing"
	"time"
)

// TestKillAll kills a replica whose edges have a session with every replica: there is
// no gap.
func TestKillAll(t *testing.T) {
	beside(t)
	// The short form may run on a busy machine, where an answer alone can take seconds.
	replicas, edges, kills, gap := 2, 10, 1, 10*time.Second
	if soak() {
		replicas, edges, kills, gap = 3, 20, 4, time.Second
	}
	f := newFleet(t, size{replicas: local(replicas), edges: edges, all: true})
	complete := f.sessions(edges * replicas)
	for k := range kills {
		victim := k % replicas
		// Each node is asked ten times a second.
		load := f.startLoad(10*edges, f.spread(f.but(victim)))
		time.Sleep(time.Second)
		f.kill(&f.Replicas[victim].Member)
		time.Sleep(2 * time.Second)
		load.want(every)
		worst := longestGap(load.end(), edges)
		t.Logf("kill %d: the longest time between two answers of a node was %s; sessions with all were there after %s", k,
			worst.Round(time.Millisecond), complete.Round(time.Millisecond))
		if worst > gap {
			t.Errorf("a node has not answered for %s, want %s at most", worst, gap)
		}
		if k < kills-1 {
			f.start(&f.Replicas[victim].Member)
			f.joined(replicas - 1)
			complete = f.sessions(edges * replicas)
		}
	}
}

// longestGap returns the longest time without an answer of some node.
func longestGap(results []result, nodes int) (longest time.Duration) {
	last := make([]time.Time, nodes)
	for _, r := range results {
		if r.err != nil {
			continue
		}
		at := r.started.Add(r.took)
		if !last[r.node].IsZero() {
			longest = max(longest, at.Sub(last[r.node]))
		}
		last[r.node] = at
	}
	return longest
}
