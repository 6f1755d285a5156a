package inventory

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/kube"
	"tunnel.example/tunnel/pkg/tunnel"
)

// memMap is a Map in memory, with the rules of an API server.
type memMap struct {
	mu      sync.Mutex // guards the following
	content kube.Content
	version int
	fail    error  // of every request; nil: none
	race    func() // runs before the next Save; nil: nothing does
	loads   int
	saves   int
}

func (m *memMap) String() string { return "configmap test/inventory" }

func (m *memMap) Load(context.Context) (kube.Content, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.loads++
	return m.content, m.fail
}

func (m *memMap) Save(_ context.Context, old kube.Content, text string) (kube.Content, error) {
	m.mu.Lock()
	race := m.race
	m.race = nil
	m.mu.Unlock()
	if race != nil {
		race()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.fail != nil:
		return kube.Content{}, m.fail
	case old.Version != m.content.Version:
		return kube.Content{}, apierrors.NewConflict(schema.GroupResource{Resource: "configmaps"}, "inventory", nil)
	}
	m.saves++
	m.version++
	m.content.Text, m.content.Version = text, fmt.Sprint(m.version)
	return m.content, nil
}

// failWith sets the error of every request.
func (m *memMap) failWith(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.fail = err
}

// count returns how often the map was written.
func (m *memMap) count() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.saves
}

// stored returns the nodes in the map, sorted.
func (m *memMap) stored(t *testing.T) (names []string) {
	t.Helper()
	m.mu.Lock()
	defer m.mu.Unlock()
	nodes, err := unpack(m.content.Text)
	if err != nil {
		t.Fatal(err)
	}
	for n := range nodes {
		names = append(names, string(n))
	}
	slices.Sort(names)
	return names
}

// replica starts an inventory that m keeps. stop ends it, as a process that stops does.
func (m *memMap) replica(t *testing.T, name string) (i *Inventory, stop func()) {
	t.Helper()
	return m.replicaAhead(t, name, 0)
}

// replicaAhead is replica with a clock that is ahead.
func (m *memMap) replicaAhead(t *testing.T, name string, ahead time.Duration) (i *Inventory, stop func()) {
	t.Helper()
	i = New("", slog.New(slog.DiscardHandler))
	i.Map, i.Self = m, name
	i.now = func() time.Time { return time.Now().Add(ahead) }
	ctx, cancel := context.WithCancel(t.Context())
	ran := make(chan struct{})
	go func() {
		defer close(ran)
		i.Run(ctx)
	}()
	stop = func() { cancel(); <-ran }
	t.Cleanup(stop)
	return i, stop
}

// Replicas share an inventory: each knows the nodes of the others, and a replica that starts knows them all. A
// replica that is slower than another one loses nothing.
func TestShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := new(memMap)
		a, _ := m.replica(t, "pod-a")
		b, stopB := m.replica(t, "pod-b")
		synctest.Wait()
		a.Issued("edge1", &x509.Certificate{SerialNumber: big.NewInt(0xabc), NotAfter: time.Now().Add(time.Hour)})
		s := session("edge1", "v1")
		a.Attached(s)
		ends(a, s, "connection lost")
		b.Attached(session("edge2", "v2"))
		lost := time.Now().UTC()
		time.Sleep(2 * sharedPause)
		if got := m.stored(t); !slices.Equal(got, []string{"edge1", "edge2"}) {
			t.Fatalf("stored are %q", got)
		}

		// Another replica writes between the load and the write of b.
		m.mu.Lock()
		m.race = func() {
			c := New("", slog.New(slog.DiscardHandler))
			c.Map, c.Self = m, "pod-c"
			c.Attached(session("edge3", "v3"))
			c.save(t.Context())
		}
		m.mu.Unlock()
		b.Attached(session("edge4", "v4"))
		time.Sleep(2 * sharedPause)
		if got := m.stored(t); !slices.Equal(got, []string{"edge1", "edge2", "edge3", "edge4"}) {
			t.Fatalf("after a conflict, stored are %q", got)
		}
		stopB()

		m.mu.Lock() // d cannot read the map yet
		d, _ := m.replica(t, "pod-d")
		if d.Known() {
			t.Error("the inventory is known before it was read")
		}
		m.mu.Unlock()
		synctest.Wait()
		r := d.All()["edge1"]
		if !d.Known() || len(d.All()) != 4 || r.Connected || r.Ended != "connection lost" || r.Replica != "pod-a" ||
			r.CertShown != "abc" || r.Sessions != 0 || r.Issued != 0 || !r.LastSeen.Equal(lost) {
			t.Errorf("a new replica knows %+v", r)
		}
	})
}

// A node that is forgotten stays forgotten, although another replica has stored it and this one never knew it. A node
// that comes back is there again.
func TestSharedForget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := new(memMap)
		a, _ := m.replica(t, "pod-a")
		b, _ := m.replica(t, "pod-b")
		synctest.Wait()
		s := session("edge1", "v1")
		a.Attached(s)
		ends(a, s, "")
		time.Sleep(sharedPause) // a has stored it
		for name, i := range map[string]*Inventory{"a": a, "b": b} {
			if had, err := i.Forget("edge1"); err != nil || had != (name == "a") {
				t.Errorf("%s: %t, %v", name, had, err)
			}
		}
		time.Sleep(3 * sharedPause)
		if got := m.stored(t); len(got) != 0 || a.Has("edge1") || b.Has("edge1") {
			t.Errorf("after forget, stored are %q", got)
		}
		b.Attached(session("edge1", "v1"))
		time.Sleep(2 * sharedPause)
		if got := m.stored(t); !slices.Equal(got, []string{"edge1"}) {
			t.Errorf("after it came back, stored are %q", got)
		}
	})
}

// A node that was lost after it was forgotten, by the clock of the replica that has lost it, stays forgotten.
func TestSharedForgetAhead(t *testing.T) {
	t.Run("some minutes", func(t *testing.T) { testForgetAhead(t, 4*sharedPause) })
	t.Run("more than forgetTime", func(t *testing.T) { testForgetAhead(t, 2*forgetTime) })
}

func testForgetAhead(t *testing.T, ahead time.Duration) {
	synctest.Test(t, func(t *testing.T) {
		m := new(memMap)
		a, _ := m.replica(t, "pod-a")
		b, _ := m.replicaAhead(t, "pod-b", ahead)
		synctest.Wait()
		s := session("edge1", "v1")
		b.Attached(s)
		ends(b, s, "")
		time.Sleep(2 * sharedPause)
		if got := m.stored(t); !slices.Equal(got, []string{"edge1"}) {
			t.Fatalf("stored are %q", got)
		}
		for _, i := range []*Inventory{a, b} { // tunnel forget asks all replicas, and one hears of it late
			if _, err := i.Forget("edge1"); err != nil {
				t.Fatal(err)
			}
			time.Sleep(2 * sharedPause)
		}
		time.Sleep(2 * refresh)
		if got := m.stored(t); len(got) != 0 || a.Has("edge1") || b.Has("edge1") {
			t.Errorf("after forget, stored are %q; a has it: %t; b has it: %t", got, a.Has("edge1"), b.Has("edge1"))
		}
	})
}

// The map is written when something has changed, at most once a pause, and each refresh while nodes are connected.
func TestSharedWritesRarely(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := new(memMap)
		a, _ := m.replica(t, "pod-a")
		synctest.Wait()
		s := session("edge1", "v1")
		before := m.count()
		for range 600 { // a node that comes and goes each second
			a.Attached(s)
			ends(a, s, "lost")
			time.Sleep(time.Second)
		}
		if n := m.count() - before; n < 9 || n > 11 {
			t.Errorf("%d writes in ten minutes", n)
		}
		time.Sleep(2 * sharedPause)
		before = m.count()
		time.Sleep(10 * refresh)
		if n := m.count() - before; n != 0 {
			t.Errorf("%d writes while nothing changes", n)
		}
		a.Attached(s)
		time.Sleep(2 * sharedPause)
		before = m.count()
		time.Sleep(10 * refresh)
		if n := m.count() - before; n < 9 || n > 10 {
			t.Errorf("%d writes in ten times the refresh", n)
		}
	})
}

// A replica that starts while it cannot read the map keeps what nodes have said before with the same certificates.
func TestSharedKeepsTrusts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := new(memMap)
		joined := func() *tunnel.Session {
			s := session("edge1", "v1")
			s.Certificate.Store(&tunnel.Certificate{Serial: "abc", Ends: time.Now().Add(time.Hour)})
			return s
		}
		a, stop := m.replica(t, "pod-a")
		synctest.Wait()
		a.Attached(joined())
		a.Trusts("edge1", []string{"ca1"})
		time.Sleep(2 * sharedPause)
		stop()

		m.failWith(errors.New("no API server"))
		b, _ := m.replica(t, "pod-b")
		synctest.Wait()
		b.Attached(joined())
		m.failWith(nil)
		time.Sleep(2*sharedPause + 2*retryPause)
		if got := b.All()["edge1"].CertTrusts; got != "ca1" {
			t.Errorf("the new replica knows %q", got)
		}
		c, _ := m.replica(t, "pod-c")
		synctest.Wait()
		if got := c.All()["edge1"].CertTrusts; got != "ca1" {
			t.Errorf("stored is %q", got)
		}
	})
}

// Replicas with facts of one second do not undo what another has written.
func TestSharedFactsOfOneSecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := new(memMap)
		a, _ := m.replica(t, "pod-a")
		b, _ := m.replica(t, "pod-b")
		synctest.Wait()
		one, other := session("edge1", "v1"), session("edge1", "v1")
		one.Remote, other.Remote = "192.0.2.1:1", "192.0.2.2:1"
		a.Attached(one)
		b.Attached(other)
		ends(a, one, "lost")
		ends(b, other, "lost")
		time.Sleep(5 * sharedPause)
		before := m.count()
		time.Sleep(10 * refresh)
		if n := m.count() - before; n != 0 {
			t.Errorf("%d writes while nothing changes", n)
		}
	})
}

// A map that cannot be read or written is tried again; the log and /readyz say so once.
func TestSharedFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, lines := testkit.NewLog()
		m := new(memMap)
		m.failWith(apierrors.NewForbidden(schema.GroupResource{Resource: "configmaps"}, "inventory", errors.New("no")))
		i := New("", log)
		i.Map = m
		ctx, stop := context.WithCancel(t.Context())
		ran := make(chan error, 1) // capacity 1: Run need not wait for the test
		go func() { ran <- i.Run(ctx) }()
		time.Sleep(10 * retryPause)
		if note := i.Note(); !strings.Contains(note, "cloud-rbac.yaml") || i.Known() {
			t.Errorf("the note is %q", note)
		}
		i.Attached(session("edge1", "v1")) // does not delay the next attempt
		m.failWith(nil)
		time.Sleep(retryPause + time.Second)
		if got := m.stored(t); !slices.Equal(got, []string{"edge1"}) || i.Note() != "" || !i.Known() {
			t.Errorf("stored are %q, and the note is %q", got, i.Note())
		}

		// What is no inventory stays as it is.
		m.mu.Lock()
		m.content.Text = "nonsense"
		m.mu.Unlock()
		i.Attached(session("edge2", "v1"))
		time.Sleep(2 * sharedPause)
		if note := i.Note(); !strings.Contains(note, "delete the ConfigMap") || m.content.Text != "nonsense" {
			t.Errorf("the note is %q, and the map has %q", note, m.content.Text)
		}
		stop()
		if err := <-ran; err != nil {
			t.Error(err)
		}
		if n := strings.Count(lines.String(), "level=WARN"); n != 2 {
			t.Errorf("%d warnings:\n%s", n, lines)
		}
	})
}

// fleet returns the records of n nodes, with facts that differ as those of real nodes do.
func fleet(n int) map[tunnel.NodeName]Record {
	rnd := rand.New(rand.NewPCG(1, 2))
	base := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	all := make(map[tunnel.NodeName]Record, n)
	at := func() time.Time { return base.Add(time.Duration(rnd.IntN(90*86400)) * time.Second) }
	for k := range n {
		all[tunnel.NodeName(fmt.Sprintf("site-%03d-edge-%05d", k%200, k))] = Record{
			FirstSeen: at(), LastSeen: at(), FactsAt: at(), Software: "v1.2.3",
			Remote:  fmt.Sprintf("%d.%d.%d.%d:%d", rnd.IntN(256), rnd.IntN(256), rnd.IntN(256), rnd.IntN(256), rnd.IntN(65536)),
			Ended:   "the edge has closed the connection",
			Replica: fmt.Sprintf("tunnel-cloud-5d8f7b9c6d-%05d", rnd.IntN(3)), CertEnds: at(), CertFrom: at(),
			CertShown: fmt.Sprintf("%016x%016x", rnd.Uint64(), rnd.Uint64()), CertBy: "tunnel nodes 2026",
		}
	}
	return all
}

// 10,000 nodes fit. Of more nodes, those stay that were seen last.
func TestSharedSize(t *testing.T) {
	text, kept, err := pack(fleet(10_000), sharedLimit)
	if err != nil || len(kept) != 10_000 {
		t.Fatalf("%d of 10,000 nodes fit: %v", len(kept), err)
	}
	t.Logf("10,000 nodes are %d bytes", len(text))
	again, err := unpack(text)
	if err != nil || differ(again, kept) {
		t.Errorf("what is read is not what was written: %v", err)
	}

	all := fleet(3000)
	text, kept, err = pack(all, len(text)/10)
	if err != nil || len(kept) < 700 || len(kept) > 1100 {
		t.Fatalf("%d nodes fit, in %d bytes: %v", len(kept), len(text), err)
	}
	oldest := newest(kept, len(kept))
	for n, r := range all {
		if _, ok := kept[n]; ok {
			continue
		}
		for _, k := range oldest {
			if r.LastSeen.After(k.LastSeen) {
				t.Fatalf("%s was left out, and seen after a node that was kept", n)
			}
		}
	}
	for _, limit := range []int{0, -5} {
		if text, kept, err = pack(fleet(3), limit); err != nil || text != "" || len(kept) != 0 {
			t.Errorf("without room: %q, %v, %v", text, kept, err)
		}
	}

	m := &memMap{content: kube.Content{Others: sharedLimit - 300}}
	i := New("", slog.New(slog.DiscardHandler))
	i.Map = m
	for n, r := range fleet(100) {
		i.Adopt(n, r)
	}
	i.save(t.Context())
	if note := i.Note(); !strings.Contains(note, "no room") || len(m.stored(t)) == 100 {
		t.Errorf("%d nodes are stored, and the note is %q", len(m.stored(t)), note)
	}
}

// Any text is an inventory or an error.
func FuzzUnpack(f *testing.F) {
	text, err := compress(fleet(2))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Add("")
	f.Add(text[:len(text)/2])
	f.Fuzz(func(t *testing.T, text string) {
		nodes, err := unpack(text)
		if err != nil {
			return
		}
		again, err := compress(nodes)
		if err != nil {
			t.Fatal(err)
		}
		if back, err := unpack(again); err != nil || len(back) != len(nodes) {
			t.Errorf("%d nodes become %d: %v", len(nodes), len(back), err)
		}
	})
}
