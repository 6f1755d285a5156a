package replicas

import (
	"slices"
	"sync"
	"testing"
	"time"
)

// TestKill kills a replica, as a crash or the kernel's OOM killer does. Requests to
// nodes that others hold do not fail, and its own nodes come back through others.
func TestKill(t *testing.T) {
	beside(t)
	// calm is how long sessions live before a kill. An edge whose session did not live
	// for 10 s waits longer and longer, since it may be in a crash loop.
	kills, edges, rate, calm := 1, 10, 50, time.Duration(0)
	if soak() {
		kills, edges, rate, calm = 12, 20, 100, 11*time.Second
	}
	f := newFleet(t, size{replicas: local(3), edges: edges})
	var back []time.Duration
	for k := range kills {
		time.Sleep(calm)
		took := f.killOne(f.fullest(), rate)
		t.Logf("kill %d: %d nodes were back after %s at the latest", k, len(took), slices.Max(took).Round(time.Millisecond))
		back = append(back, took...)
	}
	slices.Sort(back)
	p50, p99 := back[len(back)/2], back[len(back)*99/100]
	t.Logf("%d nodes of killed replicas were back: p50 %s, p99 %s", len(back), p50.Round(time.Millisecond),
		p99.Round(time.Millisecond))
	if soak() && (p50 > 2*time.Second || p99 > 10*time.Second) {
		t.Errorf("nodes were back with p50 %s and p99 %s, want 2 s and 10 s", p50, p99)
	}
}

// killOne kills a replica under load and starts it again. It returns how long each of
// its nodes was away.
func (f *fleet) killOne(victim, rate int) (back []time.Duration) {
	t := f.t
	t.Helper()
	lost := f.held(victim)
	if len(lost) == 0 {
		t.Fatal("the replica holds no node")
	}
	alive := f.but(victim)
	load := f.startLoad(rate, f.spread(alive))
	time.Sleep(500 * time.Millisecond)
	killed := time.Now()
	f.kill(&f.Replicas[victim].Member)

	var mu sync.Mutex // guards back
	var wg sync.WaitGroup
	for _, n := range lost {
		wg.Go(func() {
			for i := 0; time.Since(killed) < readyWithin; i++ {
				if f.do(t.Context(), request{node: n, replica: alive[i%len(alive)]}) == nil {
					mu.Lock()
					defer mu.Unlock()
					back = append(back, time.Since(killed))
					return
				}
				time.Sleep(poll)
			}
			t.Errorf("node %d was not back within %s", n, readyWithin)
		})
	}
	wg.Wait()
	f.reachable(atOnce) // through each of those that live
	load.want(func(r result) bool { return !slices.Contains(lost, r.node) })
	if len(back) == 0 {
		t.FailNow()
	}

	f.start(&f.Replicas[victim].Member)
	f.joined(len(f.Replicas) - 1)
	f.reachable(readyWithin)
	f.sessions(len(f.nodes))
	return back
}

// but returns all replicas except one.
func (f *fleet) but(victim int) (others []int) {
	for i := range f.Replicas {
		if i != victim {
			others = append(others, i)
		}
	}
	return others
}

// spread asks every node through each of some replicas.
func (f *fleet) spread(replicas []int) func(i int) request {
	return func(i int) request {
		return request{node: i % len(f.nodes), replica: replicas[i/len(f.nodes)%len(replicas)]}
	}
}
