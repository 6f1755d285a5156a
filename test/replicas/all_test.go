package replicas

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
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

// TestRestartAll replaces the process of an edge that has a session with every replica. A stream through each replica
// goes on.
func TestRestartAll(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "all") // t.TempDir's path is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	f := newFleet(t, size{replicas: local(2), edges: 1, all: true, sockets: dir})
	f.sessions(2)
	echoed := make(chan error, 2) // a send for each replica
	for i := range f.Replicas {
		var running atomic.Int64
		go func() {
			echoed <- f.echo(request{replica: i}, order{Bytes: 512 << 10, BytesPerSecond: 64 << 10}, running.Store)
		}()
		testkit.Within(t, atOnce, "a stream runs", func() error {
			if running.Load() == 0 {
				return errors.New("no byte has come")
			}
			return nil
		})
	}
	// A replica refuses: the others would not know its successor.
	refused, err := exec.CommandContext(t.Context(), program,
		"restart", "--socket", filepath.Join(dir, f.Replicas[0].Name)).CombinedOutput()
	if err == nil || !strings.Contains(string(refused), "it is one of several replicas") {
		t.Errorf("tunnel restart of a replica: %v\n%s", err, refused)
	}
	var done struct{ PID int }
	output, err := exec.CommandContext(t.Context(), program,
		"restart", "-o", "json", "--socket", filepath.Join(dir, f.nodes[0])).Output()
	if err = errors.Join(err, json.Unmarshal(output, &done)); err != nil {
		t.Fatalf("tunnel restart: %v\n%s", err, output)
	}
	f.forget(f.edges[0])
	t.Cleanup(func() { syscall.Kill(done.PID, syscall.SIGKILL) })
	for range f.Replicas {
		if err := <-echoed; err != nil {
			t.Errorf("a stream: %v", err)
		}
	}
	for _, r := range f.Replicas {
		if n, err := metric(r, "tunnel_sessions_replaced_total"); err != nil || n != 0 {
			t.Errorf("%s: %v sessions were replaced, %v", r.Name, n, err)
		}
	}
	f.sessions(2)
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
