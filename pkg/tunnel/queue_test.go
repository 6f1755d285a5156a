package tunnel

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// door opens conns through a queue, as the callers of one node do.
type door struct {
	t *testing.T
	*Queue
	mu       sync.Mutex     // guards the following
	admitted []string       // callers that were let in since the last look, in order
	refused  []*Refusal     // refusals since the last look, in order
	all      sync.WaitGroup // the goroutines that call has started
}

func newDoor(t *testing.T, q *Queue) *door {
	q.Name, q.Counters = "node edge1", new(Counters)
	return &door{t: t, Queue: q}
}

// call enters the queue for a caller, in a goroutine of its own.
func (d *door) call(caller, addr string) {
	d.all.Go(func() {
		ctx, cancel := context.WithTimeout(d.t.Context(), 10*time.Second)
		defer cancel()
		refusal := d.Enter(ctx, nil, Request{Caller: caller, Addr: addr})
		d.mu.Lock()
		defer d.mu.Unlock()
		if refusal != nil {
			d.refused = append(d.refused, refusal)
		} else {
			d.admitted = append(d.admitted, caller)
		}
	})
	synctest.Wait() // so that opens enter in the order of the calls
}

// takeAdmitted returns the callers that were let in since the last call.
func (d *door) takeAdmitted() string {
	synctest.Wait()
	d.mu.Lock()
	defer d.mu.Unlock()
	got := strings.Join(d.admitted, " ")
	d.admitted = nil
	return got
}

// wantAdmitted checks which callers were let in since the last look, and their order.
func (d *door) wantAdmitted(why, callers string) {
	d.t.Helper()
	if got := d.takeAdmitted(); got != callers {
		d.t.Errorf("%s: %q were let in, want %q", why, got, callers)
	}
}

// wantRefused checks how many opens were refused since the last look, and that each refusal says
// why.
func (d *door) wantRefused(why string, n int, says ...string) {
	d.t.Helper()
	synctest.Wait()
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.refused) != n {
		d.t.Errorf("%s: %d opens were refused, want %d: %v", why, len(d.refused), n, d.refused)
	}
	for _, r := range d.refused {
		for _, s := range says {
			if r.Code != Overloaded || !strings.Contains(r.Text, s) {
				d.t.Errorf("%s: %v, want %q", why, r, s)
			}
		}
	}
	d.refused = nil
}

// done waits for all callers, and checks that the queue keeps nothing of them.
func (d *door) done() {
	d.t.Helper()
	d.all.Wait()
	d.Queue.mu.Lock()
	defer d.Queue.mu.Unlock()
	if d.waiting != 0 || len(d.sources) != 0 || d.Counters.Waiting.Load() != 0 {
		d.t.Errorf("%d opens of %d sources wait still", d.waiting, len(d.sources))
	}
}

// The opens of one source wait in order. Each conn that ends lets in one open.
func TestQueueIsInOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDoor(t, &Queue{Conns: 2})
		for i := range 5 {
			d.call(fmt.Sprint("1.1.1.1:", i), "a:1")
		}
		d.wantAdmitted("there is room for two", "1.1.1.1:0 1.1.1.1:1")
		d.Over()
		d.wantAdmitted("a conn has ended", "1.1.1.1:2")
		time.Sleep(9 * time.Second)
		d.Over()
		d.wantAdmitted("another one has", "1.1.1.1:3")
		time.Sleep(2 * time.Second)
		d.wantRefused("the last one has waited for 10 s", 1,
			"limit conns: node edge1 has 2 conns; this open has waited for 10s")
		if n := d.Counters.LimitedBy(LimitConns); n != 1 {
			t.Errorf("the limit is counted %d times, want 1", n)
		}
		d.done()
	})
}

// A flood from one source delays each other source by one open. A source is an address without
// its port, and for IPv6 only the upper half of the address.
func TestQueueTakesTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDoor(t, &Queue{Conns: 1, Dials: 10})
		d.call("first", "a:1")
		for i := range 10 {
			d.call(fmt.Sprintf("[2001:db8::%d]:%d", i, i), "a:1")
		}
		d.call("1.1.1.1:1", "a:1")
		d.call("1.1.1.1:2", "a:1")
		d.call("kube-apiserver", "b:1")
		d.wantAdmitted("there is room for one", "first")
		var got []string
		for range 6 {
			d.Dialled("a:1", true)
			d.Over()
			got = append(got, d.takeAdmitted())
		}
		want := "[2001:db8::0]:0 1.1.1.1:1 kube-apiserver [2001:db8::1]:1 1.1.1.1:2 [2001:db8::2]:2"
		if s := strings.Join(got, " "); s != want {
			t.Errorf("the turns are\n%s, want\n%s", s, want)
		}
		time.Sleep(10 * time.Second)
		d.done()
	})
}

// When the queue is full, the source with the most waiters loses its newest one.
func TestQueueIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDoor(t, &Queue{Conns: 3})
		for range 3 + 6 {
			d.call("1.1.1.1:1", "a:1")
		}
		d.wantRefused("so many may wait", 0)
		d.call("1.1.1.1:2", "a:1")
		d.wantRefused("one more of the same source", 1, "limit conns: node edge1 has 3 conns; 6 more opens wait")
		d.call("1.1.1.2:1", "a:1")
		d.wantRefused("one of another source", 1, "limit conns: ")
		d.takeAdmitted()
		d.Over()
		d.wantAdmitted("the first turn", "1.1.1.1:1")
		d.Over()
		d.wantAdmitted("the second turn", "1.1.1.2:1")
		time.Sleep(10 * time.Second)
		d.done()
	})
}

// Opens beyond the limit of opens per second wait.
func TestQueueWaitsForTheRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		next := time.Now()
		d := newDoor(t, &Queue{Conns: 100, Take: func() time.Duration { // one in 100 ms
			if wait := time.Until(next); wait > 0 {
				return wait
			}
			next = time.Now().Add(100 * time.Millisecond)
			return 0
		}})
		for i := range 50 {
			d.call(fmt.Sprint("1.1.1.1:", i), "a:1")
		}
		d.wantAdmitted("one at once", "1.1.1.1:0")
		time.Sleep(time.Second)
		if got := len(strings.Fields(d.takeAdmitted())); got != 10 {
			t.Errorf("%d more in a second, want 10", got)
		}
		time.Sleep(4 * time.Second)
		d.wantRefused("all have come in", 0)
		d.done()
	})
}

// A timer that fires while it is being replaced does not start a second series of ticks.
func TestQueueReplacedTimerDoesNotTick(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		took := 0
		d := newDoor(t, &Queue{Conns: 100, Take: func() time.Duration { took++; return time.Hour }})
		d.call("1.1.1.1:1", "a:1")
		d.Queue.mu.Lock()
		d.wakeLocked(time.Millisecond)
		time.Sleep(time.Millisecond) // the timer's function now waits for mu
		d.wakeAt = d.wakeAt.Add(time.Hour)
		d.wakeLocked(time.Millisecond)
		took = 0
		d.Queue.mu.Unlock()
		time.Sleep(2*time.Second + 100*time.Millisecond)
		d.Queue.mu.Lock()
		if took != 5 {
			t.Errorf("%d ticks in two seconds, want one and four", took)
		}
		d.Queue.mu.Unlock()
		time.Sleep(time.Minute)
		d.done()
	})
}

// An open with NoWait does not wait, and its refusal is not counted: the caller tries another node.
func TestQueueNoWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDoor(t, &Queue{Conns: 1})
		d.call("1.1.1.1:1", "a:1")
		start := time.Now()
		refusal := d.Enter(t.Context(), nil, Request{NoWait: true, Addr: "a:1"})
		if refusal == nil || refusal.Code != Overloaded || time.Since(start) > 0 {
			t.Errorf("%v after %s, want overloaded at once", refusal, time.Since(start))
		}
		if n := d.Counters.LimitedBy(LimitConns); n != 0 {
			t.Errorf("it is counted %d times", n)
		}
		d.done()
	})
}

// The queue refuses an address that is too long, and does not remember it.
func TestQueueLongAddress(t *testing.T) {
	q := &Queue{Conns: 1}
	refusal := q.Enter(t.Context(), nil, Request{Addr: strings.Repeat("a", MaxAddr+1)})
	if refusal == nil || refusal.Code != Unreachable || len(q.targets) != 0 {
		t.Errorf("%v, and %d targets are remembered", refusal, len(q.targets))
	}
	if refusal := q.Enter(t.Context(), nil, Request{Addr: strings.Repeat("a", MaxAddr)}); refusal != nil {
		t.Error(refusal)
	}
}

// A waiter whose caller leaves, or whose session ends, leaves the queue at once and takes no room.
func TestQueueWaiterLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDoor(t, &Queue{Conns: 1})
		d.call("1.1.1.1:1", "a:1")
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		refusals := make(chan *Refusal)
		for _, e := range []chan struct{}{nil, ended} {
			go func() { refusals <- d.Enter(ctx, e, Request{Addr: "a:1"}) }()
			synctest.Wait()
		}
		close(ended)
		if r := <-refusals; r == nil || r.Code != Gone || !strings.Contains(r.Text, "session") {
			t.Errorf("the session has ended: %v", r)
		}
		cancel()
		if r := <-refusals; r == nil || r.Code != Gone || !strings.Contains(r.Text, "caller") {
			t.Errorf("the caller has gone: %v", r)
		}
		d.Over()
		d.call("1.1.1.1:2", "a:1")
		d.wantAdmitted("there is room for the next", "1.1.1.1:1 1.1.1.1:2")
		d.done()
	})
}

// A target that never answers uses two dials at first and one later, however many callers it
// has. Targets that answer are not affected. An open of a silent target that finds no room is
// refused after two seconds, not after ten.
func TestQueueSilentTargets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const dials, targets = 300, 64
		d := newDoor(t, &Queue{Conns: 4096, Dials: dials})
		black := func(i int) string { return fmt.Sprintf("10.0.0.%d:80", i) }
		good := func(why, addr string) {
			t.Helper()
			d.call("1.1.1.2:1", addr)
			d.wantAdmitted(why, "1.1.1.2:1")
			d.Dialled(addr, true)
			d.Over()
		}
		flood := func() (in int) {
			for i := range targets {
				for range 20 {
					d.call("1.1.1.1:1", black(i))
				}
			}
			return len(strings.Fields(d.takeAdmitted()))
		}
		good("a target that was not dialled before", "good:1")
		in := flood()
		if in != newTargetOpens*targets {
			t.Errorf("%d opens of targets that do not answer were let in, want two each", in)
		}
		good("a target that has answered", "good:1")
		time.Sleep(silenceTimeout + time.Second)
		d.wantRefused("the targets are silent", 20*targets-in,
			"limit dials: node edge1 has 128 opens to answer", "no answer has come for 2s")
		good("a target that has answered", "good:1")

		d.Queue.mu.Lock()
		var open []string
		for addr, of := range d.targets {
			for range of.n {
				open = append(open, addr)
			}
		}
		d.Queue.mu.Unlock()
		for _, addr := range open { // the edge's dials time out
			d.Dialled(addr, false)
			d.Over()
		}
		d.takeAdmitted()
		if in = flood(); in != targets {
			t.Errorf("%d opens were let in then, want one for each target", in)
		}
		good("a target that was not dialled before", "good:2")
		d.Dialled(black(1), true)
		d.takeAdmitted()
		d.call("1.1.1.2:1", black(1))
		d.wantAdmitted("it has answered", "1.1.1.2:1")
		time.Sleep(10 * time.Second)
		d.done()
	})
}

// One target may have as many unanswered dials as the node has free. Further opens wait, and each
// answer lets one in.
func TestQueueShareOfATarget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDoor(t, &Queue{Dials: 5})
		d.call("1.1.1.1:1", "a:1")
		d.Dialled("a:1", true)
		d.wantAdmitted("it answers", "1.1.1.1:1")
		for i := range 6 {
			d.call(fmt.Sprint("1.1.1.1:", i), "a:1")
		}
		d.wantAdmitted("three of five for one", "1.1.1.1:0 1.1.1.1:1 1.1.1.1:2")
		d.call("1.1.1.1:7", "b:1")
		d.wantAdmitted("another target is asked at once", "1.1.1.1:7")
		d.Dialled("b:1", true)
		time.Sleep(time.Second)
		d.Dialled("a:1", true)
		d.wantAdmitted("an answer", "1.1.1.1:3")
		time.Sleep(time.Second)
		d.Dialled("a:1", true)
		d.wantAdmitted("an answer", "1.1.1.1:4")
		time.Sleep(3 * time.Second)
		d.wantRefused("the target is silent since then", 1,
			"limit dials: node edge1 has 3 opens to answer, 3 of them of a:1; no answer has come for 2s")
		d.done()
	})
}

// Callers do not wait for an edge that hangs: within seconds all waiting callers are refused, and
// later callers are refused at once.
func TestQueueHungNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDoor(t, &Queue{Conns: 100, Dials: 10})
		for i := range 30 { // a scan of many addresses looks the same
			d.call("1.1.1.1:1", fmt.Sprintf("10.0.0.%d:80", i))
		}
		if n := len(strings.Fields(d.takeAdmitted())); n != 5 {
			t.Errorf("%d were let in, want 5", n)
		}
		time.Sleep(silenceTimeout + time.Second)
		d.wantRefused("nothing is answered", 25, "limit dials: node edge1 has 5 opens to answer; no answer has come for 2s")
		start := time.Now()
		d.call("1.1.1.1:1", "10.0.1.1:80")
		d.wantRefused("a later one", 1, "no answer has come")
		if took := time.Since(start); took > 0 {
			t.Errorf("it has waited for %s", took)
		}
		d.done()
	})
}

// A target that has answered before may be dialled further while the whole node is silent: the
// link may be slow or cut. Opens of the target wait for an answer, up to its half of Dials. Only
// an open beyond that is refused at once.
func TestQueueCutLink(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDoor(t, &Queue{Conns: 100, Dials: 16})
		kubelet, ssh := "127.0.0.1:10250", "127.0.0.1:22"
		for _, addr := range []string{kubelet, ssh} {
			d.call("1.1.1.1:1", addr)
			d.Dialled(addr, true)
		}
		d.call("1.1.1.1:1", kubelet)
		d.takeAdmitted()
		time.Sleep(silenceTimeout + time.Second/10)
		for range 7 {
			d.call("1.1.1.1:1", kubelet)
		}
		d.call("1.1.1.1:2", ssh)
		d.wantAdmitted("nothing is answered, and there is room",
			strings.TrimSpace(strings.Repeat("1.1.1.1:1 ", 7))+" 1.1.1.1:2")
		d.call("1.1.1.1:1", kubelet)
		d.wantRefused("half of Dials is in use", 1,
			"limit dials: node edge1 has 9 opens to answer, 8 of them of 127.0.0.1:10250; no answer has come for 2s")
		for range 8 { // they time out
			d.Dialled(kubelet, false)
		}
		d.Dialled(ssh, false)
		for range 8 {
			d.call("1.1.1.1:1", kubelet)
		}
		if n := len(strings.Fields(d.takeAdmitted())); n != 8 {
			t.Errorf("%d opens were let in after a cut, want 8 as before it", n)
		}
		d.done()
	})
}

// A target that hangs while its node answers opens of others may have an eighth of Dials if it has
// answered before. After its opens have ended without an answer, it may have one open.
func TestQueueHungTarget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDoor(t, &Queue{Dials: 64})
		for _, addr := range []string{"hangs:1", "good:1"} {
			d.call("1.1.1.1:1", addr)
			d.Dialled(addr, true)
		}
		d.call("1.1.1.1:1", "hangs:1")
		time.Sleep(silenceTimeout)
		d.call("1.1.1.1:1", "good:1")
		d.Dialled("good:1", true)
		d.takeAdmitted()
		for range 10 {
			d.call("1.1.1.1:1", "hangs:1")
		}
		if n := len(strings.Fields(d.takeAdmitted())); n != 7 {
			t.Errorf("%d opens were let in beside one, want 7: eight of 64", n)
		}
		d.wantRefused("the share is used up", 3, "8 of them of hangs:1; no answer has come for 2s")
		for range 8 {
			d.Dialled("hangs:1", false)
		}
		d.call("1.1.1.1:1", "hangs:1")
		d.call("1.1.1.1:2", "hangs:1")
		d.wantAdmitted("it was silent", "1.1.1.1:1")
		d.Dialled("hangs:1", true)
		d.wantAdmitted("it answers again", "1.1.1.1:2")
		d.done()
	})
}

// A new target does not count as silent because another target is silent.
func TestQueueNewTargetBesideASilentOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDoor(t, &Queue{Dials: 64})
		d.call("1.1.1.1:1", "hangs:1")
		time.Sleep(silenceTimeout + time.Second)
		d.takeAdmitted()
		for i := range 3 {
			d.call(fmt.Sprint("1.1.1.1:", i), "new:1")
		}
		d.wantAdmitted("two tries", "1.1.1.1:0 1.1.1.1:1")
		d.Dialled("new:1", true)
		d.wantAdmitted("it answers", "1.1.1.1:2")
		d.wantRefused("no open is refused", 0)
		d.done()
	})
}

// A scan of many addresses does not make the cloud forget the targets that answer.
func TestQueueRemembersThroughAScan(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := newDoor(t, &Queue{Conns: 100_000, Dials: 2048})
		good := func(why string) {
			t.Helper()
			d.call("1.1.1.2:1", "good:1")
			d.wantAdmitted(why, "1.1.1.2:1")
			d.Dialled("good:1", true)
		}
		good("a target that was not dialled before")
		for round := range 6 {
			var scanned []string
			for i := range 1100 {
				addr := fmt.Sprintf("10.%d.%d.%d:80", round, i/250, i%250)
				scanned = append(scanned, addr)
				go func() {
					ctx, cancel := context.WithTimeout(t.Context(), time.Second)
					defer cancel()
					if d.Enter(ctx, nil, Request{Caller: "1.1.1.1:1", Addr: addr}) == nil {
						time.Sleep(5 * time.Second)
						d.Dialled(addr, false)
					}
				}()
			}
			d.wantAdmitted("no open of the good target has entered", "")
			good("a target that has answered")
			time.Sleep(silenceTimeout + time.Second)
			good("and again") // so that the scanned targets count as silent
			time.Sleep(silenceTimeout + time.Second)
			d.Queue.mu.Lock()
			if n, idle := len(d.targets), d.idle.Len(); n > 4096 || idle != n {
				t.Errorf("after %d addresses %d are remembered, %d of them idle", len(scanned)*(round+1), n, idle)
			}
			d.Queue.mu.Unlock()
		}
		d.done()
	})
}

// An open that reaches no limit costs the same however many opens wait for other targets.
func BenchmarkQueueBesideWaiters(b *testing.B) {
	for _, sources := range []int{1, 100} {
		b.Run(fmt.Sprint(sources, "sources"), func(b *testing.B) {
			q := &Queue{Name: "node edge1", Conns: 4096, Dials: 2048, Counters: new(Counters)}
			ctx, cancel := context.WithCancel(b.Context())
			var all sync.WaitGroup
			good := Request{Addr: "good:1", Caller: "10.9.0.1:1"}
			open := func() {
				if refusal := q.Enter(ctx, nil, good); refusal != nil {
					b.Fatal(refusal)
				}
				q.Dialled(good.Addr, true)
				q.Over()
			}
			open()
			for i := range 9000 {
				all.Go(func() {
					q.Enter(ctx, nil, Request{
						Addr: fmt.Sprintf("10.1.0.%d:80", i%600), Caller: fmt.Sprintf("10.0.0.%d:5", i%sources),
					})
				})
			}
			for q.Counters.Waiting.Load() < 7900 {
				time.Sleep(time.Millisecond)
				open()
			}
			for b.Loop() {
				open()
			}
			b.StopTimer()
			cancel()
			all.Wait()
		})
	}
}

// In no order of events does an open wait although there is room for it.
func TestQueueUsesAllRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for seed := range uint64(200) {
			random := rand.New(rand.NewPCG(seed, 0))
			d := newDoor(t, &Queue{Conns: 5 + random.IntN(30), Dials: 1 + random.IntN(20)})
			var mu sync.Mutex
			var dialling []string
			conns := 0
			for step := range 300 {
				switch random.IntN(6) {
				case 0, 1, 2:
					addr := fmt.Sprint("t", random.IntN(6), ":1")
					caller := fmt.Sprint("c", random.IntN(4))
					d.all.Go(func() {
						ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
						defer cancel()
						if d.Enter(ctx, nil, Request{Caller: caller, Addr: addr}) == nil {
							mu.Lock()
							defer mu.Unlock()
							dialling = append(dialling, addr)
						}
					})
				case 3, 4:
					if len(dialling) > 0 {
						i := random.IntN(len(dialling))
						addr := dialling[i]
						dialling = slices.Delete(dialling, i, i+1)
						answered := addr != "t0:1" && random.IntN(5) > 0
						d.Dialled(addr, answered)
						if answered {
							conns++
						} else {
							d.Over()
						}
					} else if conns > 0 {
						conns--
						d.Over()
					}
				case 5:
					time.Sleep(time.Duration(random.IntN(1000)) * time.Millisecond)
				}
				synctest.Wait()
				d.Queue.mu.Lock()
				w := d.nextLocked(time.Now(), nil)
				d.Queue.mu.Unlock()
				if w != nil {
					t.Fatalf("seed %d, step %d: an open of %s waits, and there is room", seed, step, w.target.addr)
				}
			}
			for range conns {
				d.Over()
			}
			time.Sleep(time.Minute)
			synctest.Wait()
			for _, addr := range dialling {
				d.Dialled(addr, false)
				d.Over()
			}
			d.done()
			d.Queue.mu.Lock()
			if d.Queue.conns != 0 || d.Queue.all.n != 0 || d.unproven != 0 || d.idle.Len() != len(d.targets) {
				t.Errorf("seed %d: %d conns, %d dials, %d unproven, %d of %d targets idle",
					seed, d.Queue.conns, d.Queue.all.n, d.unproven, d.idle.Len(), len(d.targets))
			}
			d.Queue.mu.Unlock()
		}
	})
}
