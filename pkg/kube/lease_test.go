package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"path"
	"regexp"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"tunnel.example/tunnel/internal/testkit"
)

// memory is an in-memory API server for any kind of object. Each client has its own view of
// it, which can be disconnected.
type memory struct {
	mu      sync.Mutex                // guards the following
	objects map[string]map[string]any // by path
	version int                       // the last resource version
	patches int                       // how many patches were applied

	gone atomic.Bool // there is no such namespace
	log  testkit.Log // of all clients
}

// view is one client's connection to memory.
type view struct {
	*memory
	down *atomic.Bool // disconnected
}

func newMemory() *memory { return &memory{objects: make(map[string]map[string]any)} }

func (m *memory) view() view { return view{m, new(atomic.Bool)} }

var resource = schema.GroupResource{Resource: "leases"}

var errDown = errors.New("connection refused")

// reach returns an error if the view is disconnected, or ctx is done.
func (v view) reach(ctx context.Context) error {
	if v.down.Load() && ctx.Err() == nil {
		return errDown
	}
	return ctx.Err()
}

func (v view) get(ctx context.Context, p string, out any) error {
	if err := v.reach(ctx); err != nil {
		return err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	o, ok := v.objects[p]
	if !ok {
		return apierrors.NewNotFound(resource, path.Base(p))
	}
	return convert(o, out)
}

func (v view) list(context.Context, string, string, any) error { return errors.New("no lists here") }

func (v view) create(ctx context.Context, p string, in, out any) error {
	if err := v.reach(ctx); err != nil {
		return err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	var o map[string]any
	if err := convert(in, &o); err != nil {
		return err
	}
	if v.gone.Load() {
		return apierrors.NewNotFound(schema.GroupResource{Resource: "namespaces"}, "ns")
	}
	p = path.Join(p, o["metadata"].(map[string]any)["name"].(string))
	if _, ok := v.objects[p]; ok {
		return apierrors.NewAlreadyExists(resource, path.Base(p))
	}
	v.putLocked(p, o)
	return convert(o, out)
}

func (v view) patch(ctx context.Context, p string, in, out any) error {
	if err := v.reach(ctx); err != nil {
		return err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	o, ok := v.objects[p]
	if !ok {
		return apierrors.NewNotFound(resource, path.Base(p))
	}
	var change map[string]any
	if err := convert(in, &change); err != nil {
		return err
	}
	if change["metadata"].(map[string]any)["resourceVersion"] != o["metadata"].(map[string]any)["resourceVersion"] {
		return apierrors.NewConflict(resource, path.Base(p), errors.New("changed"))
	}
	v.patches++
	var merged map[string]any
	if err := errors.Join(convert(o, &merged), convert(in, &merged)); err != nil { // Unmarshal merges maps
		return err
	}
	merged["spec"] = merge(o["spec"].(map[string]any), change["spec"].(map[string]any))
	v.putLocked(p, merged)
	return convert(merged, out)
}

func (v view) delete(ctx context.Context, p, _ string) error {
	if err := v.reach(ctx); err != nil {
		return err
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if _, ok := v.objects[p]; !ok {
		return apierrors.NewNotFound(resource, path.Base(p))
	}
	delete(v.objects, p)
	return nil
}

func merge(old, change map[string]any) map[string]any {
	for k, v := range change {
		old[k] = v
	}
	return old
}

func (m *memory) putLocked(p string, o map[string]any) {
	m.version++
	o["metadata"].(map[string]any)["resourceVersion"] = fmt.Sprint(m.version)
	m.objects[p] = o
}

func convert(in, out any) error {
	b, err := json.Marshal(in)
	if err != nil {
		return err
	}
	return json.Unmarshal(b, out)
}

const leasePath = "/apis/coordination.k8s.io/v1/namespaces/ns/leases/nodes"

func (m *memory) spec() map[string]any {
	m.mu.Lock()
	defer m.mu.Unlock()
	o := m.objects[leasePath]
	if o == nil {
		return nil
	}
	return o["spec"].(map[string]any)
}

// candidate is one process that competes for the lease.
type candidate struct {
	view
	*Lease
	leading *atomic.Int32 // how many candidates lead now
	terms   atomic.Int32  // how often this one has started to lead
	stop    context.CancelFunc
	done    chan struct{} // closed when Run has returned
}

func (m *memory) candidate(ctx context.Context, t *testing.T, name string, leading *atomic.Int32) *candidate {
	v := m.view()
	c := &candidate{
		view: v, leading: leading, done: make(chan struct{}),
		Lease: (&Client{objects: v}).Lease("ns", "nodes", name, slog.New(slog.NewTextHandler(&m.log, nil))),
	}
	ctx, c.stop = context.WithCancel(ctx)
	go func() {
		defer close(c.done)
		c.Run(ctx, func(ctx context.Context) {
			if n := leading.Add(1); n != 1 {
				t.Errorf("%s leads, and %d others do", name, n-1)
			}
			c.terms.Add(1)
			<-ctx.Done()
			leading.Add(-1)
		})
	}()
	return c
}

// election runs a test in a bubble of synctest. stand starts a candidate.
func election(t *testing.T, test func(t *testing.T, m *memory, stand func(name string) *candidate)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		m, leading := newMemory(), new(atomic.Int32)
		var all []*candidate
		test(t, m, func(name string) *candidate {
			c := m.candidate(ctx, t, name, leading)
			all = append(all, c)
			return c
		})
		cancel()
		for _, c := range all {
			<-c.done
		}
	})
}

func after(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

func TestLeaseHasOneHolder(t *testing.T) {
	election(t, func(t *testing.T, m *memory, stand func(string) *candidate) {
		a := stand("a")
		after(time.Second)
		b := stand("b")
		after(10 * time.Minute)
		if !a.Held() || b.Held() || a.terms.Load() != 1 {
			t.Fatalf("a holds: %v, in %d terms; b holds: %v", a.Held(), a.terms.Load(), b.Held())
		}
		if got := m.spec()["holderIdentity"]; got != "a" {
			t.Errorf("the object names %v", got)
		}
		if m.patches < 250 || m.patches > 320 {
			t.Errorf("renewed %d times in 10 minutes, want once in %v", m.patches, retryPeriod)
		}
		a.stop() // a clean end gives the lease back
		after(2*retryPeriod + time.Second)
		if a.Held() || !b.Held() || m.spec()["holderIdentity"] != "b" || m.spec()["leaseTransitions"] != 1.0 {
			t.Errorf("after a has ended: %v", m.spec())
		}
	})
}

// A holder that is disconnected stops before another one starts.
func TestLeaseExpires(t *testing.T) {
	election(t, func(t *testing.T, m *memory, stand func(string) *candidate) {
		a := stand("a")
		after(time.Second)
		b := stand("b")
		after(time.Minute)
		a.down.Store(true)
		after(renewDeadline + time.Second)
		if a.Held() || b.Held() || a.Err() == nil {
			t.Errorf("%v after the cut: a holds: %v (%v), b holds: %v", renewDeadline+time.Second, a.Held(), a.Err(), b.Held())
		}
		if log := m.log.String(); !regexp.MustCompile(`writes no longer.*` + errDown.Error()).MatchString(log) {
			t.Errorf("the log does not say why a stopped:\n%s", log)
		}
		after(leaseDuration)
		if !b.Held() {
			t.Error("b does not take it over")
		}
		a.down.Store(false)
		after(time.Minute)
		if a.Held() || !b.Held() || a.Err() != nil {
			t.Errorf("a is back: it holds: %v (%v)", a.Held(), a.Err())
		}
	})
}

// Without the namespace, nobody leads, and the error says so.
func TestLeaseWithoutNamespace(t *testing.T) {
	election(t, func(t *testing.T, m *memory, stand func(string) *candidate) {
		m.gone.Store(true)
		a := stand("a")
		after(time.Minute)
		if a.Held() || a.Err() == nil {
			t.Errorf("a holds: %v, %v", a.Held(), a.Err())
		}
		m.gone.Store(false)
		after(time.Minute)
		if !a.Held() || a.Err() != nil {
			t.Errorf("the namespace is there: a holds: %v, %v", a.Held(), a.Err())
		}
	})
}

// A process that is killed and starts again under the same name leads at once.
func TestLeaseOfTheSameName(t *testing.T) {
	election(t, func(t *testing.T, m *memory, stand func(string) *candidate) {
		a := stand("a")
		after(time.Minute)
		a.down.Store(true) // so that it cannot give the lease back
		a.stop()
		after(time.Second)
		again := stand("a")
		after(time.Second)
		if !again.Held() {
			t.Error("it waits for its own lease to expire")
		}
	})
}

// When an operator takes the Lease by hand, the holder stops. A deleted Lease is created again.
func TestLeaseTakenAway(t *testing.T) {
	election(t, func(t *testing.T, m *memory, stand func(string) *candidate) {
		a := stand("a")
		after(time.Minute)
		m.mu.Lock()
		merge(m.objects[leasePath]["spec"].(map[string]any), map[string]any{"holderIdentity": "operator"})
		m.putLocked(leasePath, m.objects[leasePath])
		m.mu.Unlock()
		after(retryPeriod + time.Second)
		if a.Held() {
			t.Error("a leads although another process holds the lease")
		}
		after(leaseDuration + 2*retryPeriod)
		if !a.Held() {
			t.Error("the lease has expired, and a does not take it")
		}
		m.mu.Lock()
		delete(m.objects, leasePath)
		m.mu.Unlock()
		after(3 * retryPeriod)
		if !a.Held() || m.spec() == nil {
			t.Error("a deleted lease is not created again")
		}
	})
}
