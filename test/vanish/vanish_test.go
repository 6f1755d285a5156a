package vanish

import (
	"flag"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/test/rig/rigtest"
)

const (
	// noticed is from a peer's end to the tunnel's: the kernel takes some 3 s to give up on a
	// peer that has vanished, and the tunnel looks at conns that wait every 10 s.
	noticed = 30 * time.Second
	// noticedSlowly is the same with the keepalive times that the program itself sets: the
	// kernel then gives up after 150 s.
	noticedSlowly = 150*time.Second + noticed
	// released is from then to the baseline of goroutines and descriptors.
	released = 10 * time.Second
)

// program is the program under test.
var program string

func TestMain(m *testing.M) {
	flag.Parse()
	rigtest.Parallel(16)
	os.Exit(rigtest.Main(m, &program))
}

// round is one cut of the link.
type round struct {
	silence silence
	each    int  // conns in each state
	slow    bool // with the program's own keepalive times
}

// rounds returns the rounds of a test. i spreads the kinds of silence over the tests.
func rounds(i int) []round {
	kinds := []silence{timeout, unreachable}
	if os.Getenv("TUNNEL_VANISH") != "1" {
		return []round{{silence: kinds[i%2], each: 2}}
	}
	return []round{
		{silence: kinds[i%2], each: 3},
		{silence: kinds[(i+1)%2], each: 3},
		{silence: kinds[i%2], each: 2, slow: true},
	}
}

// total counts the conns of all tests.
type total struct{ streams, clean, held atomic.Int64 }

// TestVanish has callers' or targets' machines vanish, and counts how the conns end.
func TestVanish(t *testing.T) {
	sum := new(total)
	t.Cleanup(func() {
		t.Logf("%d streams cut off: %d clean ends; %d conns held", sum.streams.Load(), sum.clean.Load(), sum.held.Load())
	})
	i := 0
	for _, w := range ways() {
		for _, gone := range []end{callers, targets} {
			plan := rounds(i/2 + i)
			i++
			t.Run(fmt.Sprintf("%s/%s", w.name, gone), func(t *testing.T) {
				t.Parallel()
				tn := newTunnel(t, w, gone)
				tn.warmUp(plan[0].each * len(states()))
				base := tn.baseline()
				for _, r := range plan {
					tn.vanish(r, base, sum)
				}
			})
		}
	}
}

// vanish opens conns, takes the link down, and judges how each conn ends. It adds to sum.
func (tn *tunnel) vanish(r round, base map[string]weight, sum *total) {
	t := tn.t
	t.Helper()
	var all []*exchange
	for range r.each {
		for _, s := range states() {
			all = append(all, newExchange(tn.open(), s))
		}
	}
	var beginning sync.WaitGroup
	for _, x := range all {
		beginning.Go(func() {
			if err := x.state.begin(x); err != nil {
				t.Errorf("%s: before the peer vanishes: %v", x.state.name, err)
			}
		})
	}
	beginning.Wait()
	limit := noticed
	if r.slow {
		limit = noticedSlowly
	} else {
		for _, m := range tn.members {
			hurry(t, m.process)
		}
	}
	for _, x := range all {
		if x.state.resets {
			reset(x.gone)
		}
	}
	tn.cut(r.silence)
	cut := time.Now()

	outcomes := make([]outcome, len(all))
	var judging sync.WaitGroup
	for i, x := range all {
		if x.late = cut.Add(limit); x.state.judge != nil {
			judging.Go(func() { outcomes[i] = x.state.judge(x) })
		}
	}
	judging.Wait()
	err := testkit.Poll(time.Until(cut.Add(limit)), tn.noConns)
	took := time.Since(cut).Round(100 * time.Millisecond)
	if err != nil {
		t.Errorf("%s: %v after the cut: %v", r.silence, took, err)
	} else {
		t.Logf("%s: %d conns; the processes held none %v after the cut", r.silence, len(all), took)
	}
	// Conns that nobody observes are held if there are more than the observed ones.
	most, err := tn.conns()
	if err != nil {
		t.Fatal(err)
	}
	unseen := most - count(outcomes, held)
	for i, x := range all {
		if x.state.judge == nil {
			outcomes[i] = freed
			if unseen > 0 {
				outcomes[i] = held
				unseen--
			}
		}
	}

	for _, s := range states() {
		var of []outcome
		for i, x := range all {
			if x.state.name == s.name {
				of = append(of, outcomes[i])
			}
		}
		want := cutOff
		if s.judge == nil {
			want = freed
		} else {
			sum.streams.Add(int64(len(of)))
		}
		sum.clean.Add(int64(count(of, clean)))
		sum.held.Add(int64(count(of, held)))
		report := t.Errorf
		if count(of, want) == r.each {
			report = t.Logf
		}
		report("%s: %s: of %d: %d %s, %d %s, %d %s", r.silence, s.name, r.each, count(of, want), want, count(of, clean),
			clean, count(of, held), held)
	}
	for _, x := range all {
		x.end()
	}
	tn.mend()
	if err := testkit.Poll(released, func() error { return tn.back(base) }); err != nil {
		t.Errorf("%s: %v after the conns ended: %v", r.silence, released, err)
	}
}

func count(outcomes []outcome, o outcome) (n int) {
	for _, is := range outcomes {
		if is == o {
			n++
		}
	}
	return n
}

// warmUp opens as many conns as a round does, and closes them, so that what is made once is
// made: data connections, and between replicas as well.
func (tn *tunnel) warmUp(conns int) {
	tn.t.Helper()
	var all []pair
	for range conns {
		all = append(all, tn.open())
	}
	for _, p := range all {
		p.gone.CloseWrite()
		p.seen.CloseWrite()
		io.Copy(io.Discard, p.gone)
		io.Copy(io.Discard, p.seen)
		p.gone.Close()
		p.seen.Close()
	}
	if err := testkit.Poll(released, tn.noConns); err != nil {
		tn.t.Fatal(err)
	}
	time.Sleep(time.Second) // what ends the conns has ended
}

// conns returns the most conns that a member has.
func (tn *tunnel) conns() (most int, err error) {
	for _, m := range tn.members {
		w, err := m.weigh()
		if err != nil {
			return most, err
		}
		most = max(most, int(w.conns))
	}
	return most, nil
}

// noConns returns nil when no member has a conn.
func (tn *tunnel) noConns() error {
	n, err := tn.conns()
	if err == nil && n > 0 {
		err = fmt.Errorf("a process still has %d conns", n)
	}
	return err
}
