package dns

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/kube"
	"tunnel.example/tunnel/pkg/tunnel"
)

// memStore is an in-memory Store with the rules of an API server.
type memStore struct {
	mu       sync.Mutex // guards the following
	file     kube.Content
	version  int                   // the last resource version
	fail     error                 // the error of every request; nil: none
	race     func(f *kube.Content) // a write by another writer before every Save; nil: none
	loads    int                   // calls of Load
	saves    []time.Time           // the times of the calls of Save
	bytes    int                   // bytes that Save has written
	follower func(version string)  // gets every new version; nil: nobody follows
}

var configMapResource = schema.GroupResource{Resource: "configmaps"}

func (c *memStore) String() string { return "configmap test/nodes" }

func (c *memStore) Load(context.Context) (kube.Content, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.loads++
	return c.file, c.fail
}

func (c *memStore) Save(_ context.Context, old kube.Content, text string) (kube.Content, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.saves = append(c.saves, time.Now())
	if c.fail != nil {
		return kube.Content{}, c.fail
	}
	if c.race != nil {
		c.race(&c.file)
		c.changeLocked()
	}
	if old.Version != c.file.Version {
		return kube.Content{}, apierrors.NewConflict(configMapResource, "nodes", nil)
	}
	c.bytes += len(text)
	c.file.Text = text
	c.changeLocked()
	return c.file, nil
}

func (c *memStore) Follow(ctx context.Context, changed func(version string), _ func(error)) {
	versions := make(chan string, 1000)
	c.mu.Lock()
	c.follower = func(v string) { versions <- v }
	c.mu.Unlock()
	for {
		select {
		case v := <-versions:
			changed(v)
		case <-ctx.Done():
			return
		}
	}
}

// changeLocked gives the file a new version. The caller holds mu.
func (c *memStore) changeLocked() {
	c.version++
	c.file.Version = fmt.Sprint(c.version)
	if c.follower != nil {
		c.follower(c.file.Version)
	}
}

// writeForeign changes the file as another writer does.
func (c *memStore) writeForeign(text string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.file.Text = text
	c.changeLocked()
}

func (c *memStore) failWith(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fail = err
}

func (c *memStore) text() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.file.Text
}

func (c *memStore) requests() (loads, saves int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.loads, len(c.saves)
}

// fleet is a set of connected nodes.
type fleet struct {
	Local
	directory tunnel.Directory
}

func newFleet(addrs ...netip.Addr) *fleet {
	f := new(fleet)
	f.Local = Local{Nodes: &f.directory, Addrs: addrs}
	return f
}

func (f *fleet) join(names ...tunnel.NodeName) {
	for _, n := range names {
		f.directory.Attach(&tunnel.Session{Node: n})
	}
}

func (f *fleet) leave(n tunnel.NodeName) { f.directory.Detach(f.directory.Lookup(n)) }

// elected is an Election that this replica wins: at once, or when later becomes true.
type elected struct{ later *atomic.Bool }

func (e elected) Run(ctx context.Context, lead func(context.Context)) {
	for e.later != nil && !e.later.Load() {
		time.Sleep(time.Second)
	}
	lead(ctx)
}

func (elected) Err() error { return nil }

// runWriter runs a test with a Writer in a bubble of synctest.
func runWriter(t *testing.T, cfg WriterConfig, test func(t *testing.T, w *Writer)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		if cfg.Log == nil {
			cfg.Log, _ = testkit.NewLog()
		}
		if cfg.Election == nil {
			cfg.Election = elected{}
		}
		w := NewWriter(cfg)
		writer := testkit.Run(t, w.Run)
		synctest.Wait()
		test(t, w)
		writer.Stop()
	})
}

// after lets time pass in the bubble.
func after(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func wantFile(t *testing.T, c *memStore, want string) {
	t.Helper()
	if got := c.text(); got != want {
		t.Errorf("the file is %q, want %q", got, want)
	}
}

const (
	line1 = "10.0.0.1    edge1 # tunnel\n"
	line2 = "10.0.0.1    edge2 # tunnel\n"
)

func TestWriterFollowsTheTruth(t *testing.T) {
	f, c := newFleet(addr("10.0.0.1")), new(memStore)
	runWriter(t, WriterConfig{Truth: f, Store: c}, func(t *testing.T, w *Writer) {
		wantFile(t, c, "")
		if _, saves := c.requests(); saves != 1 {
			t.Errorf("%d writes before any node, want 1: pods that mount the ConfigMap wait for it", saves)
		}
		after(minWriteInterval)
		f.join("edge1")
		after(minReconcileInterval)
		wantFile(t, c, line1) // at once
		f.join("edge2")
		after(minWriteInterval)
		wantFile(t, c, line1+line2)
		f.leave("edge1")
		after(goneGrace - time.Second)
		wantFile(t, c, line1+line2)
		after(time.Second + minWriteInterval) // the Writer noticed the end of edge1 after its pause
		wantFile(t, c, line2)
		loads, saves := c.requests()
		after(24 * time.Hour)
		if l, s := c.requests(); l != loads || s != saves {
			t.Errorf("a day without changes took %d reads and %d writes", l-loads, s-saves)
		}
		if w.Note() != "" || !strings.HasPrefix(w.Status(), "this replica writes: 1 lines") {
			t.Errorf("note %q, status %q", w.Note(), w.Status())
		}
	})
}

func TestWriterCoalesces(t *testing.T) {
	f, c := newFleet(addr("10.0.0.1")), new(memStore)
	runWriter(t, WriterConfig{Truth: f, Store: c}, func(t *testing.T, w *Writer) {
		const nodes = 600
		for i := range nodes {
			f.join(tunnel.NodeName(fmt.Sprintf("edge-%05d", i)))
			after(100 * time.Millisecond)
		}
		after(minWriteInterval)
		if got := len(ParseHosts(c.text()).Own); got != nodes {
			t.Fatalf("%d nodes have a line, want %d", got, nodes)
		}
		_, saves := c.requests()
		if saves > 62 {
			t.Errorf("a minute of joins took %d writes", saves)
		}
		for i := 1; i < saves; i++ {
			if gap := c.saves[i].Sub(c.saves[i-1]); gap < minWriteInterval {
				t.Fatalf("two writes within %v", gap)
			}
		}
	})
}

func TestWriterKeepsForeignLines(t *testing.T) {
	f, c := newFleet(addr("10.0.0.1")), new(memStore)
	c.writeForeign("# by hand\n10.9.9.9 db\n")
	runWriter(t, WriterConfig{Truth: f, Store: c}, func(t *testing.T, w *Writer) {
		f.join("edge1")
		after(minWriteInterval)
		wantFile(t, c, "# by hand\n10.9.9.9 db\n"+line1)
		c.writeForeign("10.9.9.9 db\n10.9.9.8 cache\n") // another writer has removed our line
		after(minWriteInterval)
		wantFile(t, c, "10.9.9.9 db\n10.9.9.8 cache\n"+line1)
		c.writeForeign("10.9.9.9 edge1\n") // a foreign line for our node wins
		after(minWriteInterval)
		wantFile(t, c, "10.9.9.9 edge1\n")
		if !strings.Contains(w.Status(), "1 shadowed by foreign lines") {
			t.Errorf("status %q", w.Status())
		}
	})
}

// Without a watch, as without the right to it, the Writer reads the file again every few minutes.
func TestWriterReadsAgain(t *testing.T) {
	f, c := newFleet(addr("10.0.0.1")), new(memStore)
	runWriter(t, WriterConfig{Truth: f, Store: c}, func(t *testing.T, w *Writer) {
		f.join("edge1")
		after(minWriteInterval)
		wantFile(t, c, line1)
		c.mu.Lock()
		c.follower = nil
		c.mu.Unlock()
		w.update(func(s *writerState) { s.watchErr = errors.New("no right to watch") })
		c.writeForeign("")
		after(resyncInterval + minWriteInterval)
		wantFile(t, c, line1)
	})
}

// After a conflict the Writer reads the file and tries again soon. The pauses grow with each further
// conflict.
func TestWriterConflicts(t *testing.T) {
	f, c := newFleet(addr("10.0.0.1")), new(memStore)
	runWriter(t, WriterConfig{Truth: f, Store: c}, func(t *testing.T, w *Writer) {
		n := 0
		c.mu.Lock()
		c.race = func(file *kube.Content) { n++; file.Text = fmt.Sprintf("10.9.9.9 v%d\n", n) }
		c.mu.Unlock()
		f.join("edge1")
		after(time.Minute)
		_, saves := c.requests()
		if saves < 5 || saves > 20 {
			t.Errorf("%d attempts in a minute that all lost a race", saves)
		}
		if !strings.Contains(w.Note(), "cannot be written") {
			t.Errorf("note %q", w.Note())
		}
		c.mu.Lock()
		c.race = nil
		c.mu.Unlock()
		after(maxRetry + minWriteInterval)
		wantFile(t, c, fmt.Sprintf("10.9.9.9 v%d\n", n)+line1)
		if w.Note() != "" {
			t.Errorf("note %q", w.Note())
		}
	})
}

func TestWriterWaitsOutFailures(t *testing.T) {
	forbidden := apierrors.NewForbidden(configMapResource, "nodes", fmt.Errorf("no rights"))
	throttled := apierrors.NewTooManyRequests("slow down", 40)
	for _, c := range []struct {
		name     string
		err      error
		max      int           // requests in a minute
		recovers time.Duration // how long after the failure the file is written at the latest
		says     string        // in the note
	}{
		{"rights withdrawn", forbidden, 8, maxRetry, "deployment/cloud-rbac.yaml"},
		{"429", throttled, 3, 40 * time.Second, "overloaded"},
		{"no answer", context.DeadlineExceeded, 8, maxRetry, "no answer from the API server"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f, store := newFleet(addr("10.0.0.1")), new(memStore)
			runWriter(t, WriterConfig{Truth: f, Store: store}, func(t *testing.T, w *Writer) {
				f.join("edge1")
				after(minWriteInterval)
				store.failWith(c.err)
				loads, saves := store.requests()
				for i := range 60 { // new nodes must not shorten the pauses
					f.join(tunnel.NodeName(fmt.Sprint("late", i)))
					after(time.Second)
				}
				l, s := store.requests()
				if n := l - loads + s - saves; n == 0 || n > c.max {
					t.Errorf("%d requests in a minute, want at most %d", n, c.max)
				}
				if !strings.Contains(w.Note(), c.says) {
					t.Errorf("note %q, want %q", w.Note(), c.says)
				}
				store.failWith(nil)
				after(c.recovers + minWriteInterval)
				if got := len(ParseHosts(store.text()).Own); got != 61 {
					t.Errorf("%d lines, want 61", got)
				}
				if w.Note() != "" {
					t.Errorf("note %q", w.Note())
				}
			})
		})
	}
}

// When the file can be written again, the log reports what has changed meanwhile.
func TestWriterLogsChangesAfterFailure(t *testing.T) {
	f, c := newFleet(addr("10.0.0.1")), new(memStore)
	c.failWith(fmt.Errorf("no route to host"))
	log, logged := testkit.NewLog()
	runWriter(t, WriterConfig{Truth: f, Store: c, Log: log}, func(t *testing.T, _ *Writer) {
		f.join("edge1", "edge2")
		after(time.Minute)
		c.failWith(nil)
		c.file.Others = sizeLimit
		c.writeForeign("10.9.9.9 edge2\n")
		after(maxRetry)
		for _, want := range []string{"can be written again", "full: new nodes get no line", "foreign lines have the names"} {
			if strings.Count(logged.String(), want) != 1 {
				t.Errorf("%q is not exactly once in\n%s", want, logged)
			}
		}
	})
}

// If the API server asks for a pause of a year, the Writer tries again after maxRetryAfter.
func TestWriterCapsRetryAfter(t *testing.T) {
	f, c := newFleet(addr("10.0.0.1")), new(memStore)
	c.failWith(apierrors.NewTooManyRequests("go away", 365*24*3600))
	runWriter(t, WriterConfig{Truth: f, Store: c}, func(t *testing.T, _ *Writer) {
		f.join("edge1")
		after(time.Second)
		c.failWith(nil)
		after(maxRetryAfter)
		wantFile(t, c, line1)
	})
}

func TestWriterWaitsForNames(t *testing.T) {
	f, c := newFleet(addr("10.0.0.1")), new(memStore)
	runWriter(t, WriterConfig{Truth: f, Names: everyone{known: false}, Store: c}, func(t *testing.T, w *Writer) {
		f.join("edge1")
		after(time.Hour)
		if loads, saves := c.requests(); loads+saves > 0 {
			t.Errorf("%d reads, %d writes while the names are unknown", loads, saves)
		}
		if w.Note() == "" {
			t.Error("the note does not say why")
		}
	})
}

// Lines of a replica that the truth does not cover stay while its pod exists.
func TestWriterAsksForReplicas(t *testing.T) {
	f, c := newFleet(addr("10.0.0.1")), new(memStore)
	const theirs = "10.0.0.2    edge7 # tunnel\n"
	c.writeForeign(theirs)
	var mu sync.Mutex
	alive, err, calls := []netip.Addr{addr("10.0.0.1"), addr("10.0.0.2")}, error(nil), 0
	list := func(context.Context) ([]netip.Addr, error) {
		mu.Lock()
		defer mu.Unlock()
		calls++
		return alive, err
	}
	set := func(a []netip.Addr, e error) {
		mu.Lock()
		defer mu.Unlock()
		alive, err = a, e
	}
	runWriter(t, WriterConfig{Truth: f, Store: c, Replicas: list}, func(t *testing.T, w *Writer) {
		f.join("edge1")
		after(10 * time.Minute)
		wantFile(t, c, line1+theirs)
		if calls > 21 {
			t.Errorf("the replicas were listed %d times in ten minutes", calls)
		}
		for _, unknown := range []struct {
			alive []netip.Addr
			err   error
		}{
			{nil, fmt.Errorf("forbidden")},
			// Both answers must be wrong, since this replica is missing: the Service is another one.
			{nil, nil},
			{[]netip.Addr{addr("10.8.8.8")}, nil},
		} {
			set(unknown.alive, unknown.err)
			after(10 * time.Minute)
			wantFile(t, c, line1+theirs)
			if !strings.Contains(w.Note(), "lines of other replicas stay") {
				t.Errorf("note %q", w.Note())
			}
		}
		f.join("edge7") // it moves to this replica, so no line depends on the list any more
		after(replicasMaxAge + minWriteInterval)
		if w.Note() != "" {
			t.Errorf("note %q about lines that do not exist", w.Note())
		}
		f.leave("edge7")
		after(goneGrace + minWriteInterval)
		c.writeForeign(line1 + theirs)
		after(minWriteInterval)
		wantFile(t, c, line1+theirs)
		set([]netip.Addr{addr("10.0.0.1")}, nil)
		after(replicasMaxAge + goneGrace)
		wantFile(t, c, line1)
		before := calls
		after(10 * time.Minute)
		if calls != before {
			t.Error("the replicas are listed although no line depends on them")
		}
	})
}

// Only the leader writes. The next leader takes over its lines, and changes none of them before
// their nodes have had time to come back.
func TestWriterTakesOver(t *testing.T) {
	f, c := newFleet(addr("10.0.0.1")), new(memStore)
	c.writeForeign(line1 + line2)
	later := new(atomic.Bool)
	runWriter(t, WriterConfig{Truth: f, Store: c, Election: elected{later}}, func(t *testing.T, w *Writer) {
		f.join("edge3")
		after(time.Hour)
		if loads, saves := c.requests(); loads+saves > 0 || w.Status() != "this replica does not write" {
			t.Errorf("%d reads and %d writes without leading; status %q", loads, saves, w.Status())
		}
		later.Store(true)
		f.join("edge1", "edge2")
		f.leave("edge3")
		after(time.Hour)
		wantFile(t, c, line1+line2)
		if _, saves := c.requests(); saves != 0 {
			t.Errorf("%d writes though nothing had changed", saves)
		}
	})
}
