package stream

import (
	"io"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tunnel.example/tunnel/internal/testkit"
)

// Data connections give way to the session's own connection on a narrow link, and only there.
func TestNextPace(t *testing.T) {
	const unbounded = 0
	for name, c := range map[string]struct {
		rate, capacity int64
		own            need
		want           int64
	}{
		"a wide link":                            {unbounded, narrowRate, starving, unbounded},
		"nobody else needs a narrow link":        {unbounded, 12_000, none, unbounded},
		"the session's own waits":                {unbounded, 12_000, waiting, 6_000},
		"the session's own starves":              {unbounded, 12_000, starving, 3_000},
		"it starves although they have half":     {6_000, 12_000, starving, 3_000},
		"nothing is known to arrive":             {unbounded, 0, starving, 1},
		"it is better, and they get more":        {3_000, 12_000, waiting, 3_000 + 3_000/paceGrowth + 1},
		"they get half at most":                  {6_000, 12_000, waiting, 6_000},
		"it needs nothing, and they get more":    {6_000, 6_000, none, 6_000 + 6_000/paceGrowth + 1},
		"it needs nothing for long":              {narrowRate, narrowRate, none, unbounded},
		"the link has become wide":               {16_000, 2 * narrowRate, waiting, unbounded},
		"it has become wide and the own starves": {16_000, 2 * narrowRate, starving, unbounded},
	} {
		if got := nextPace(c.rate, c.capacity, c.own); got != c.want {
			t.Errorf("%s: %d bytes a second, want %d", name, got, c.want)
		}
	}
}

// The kernel is told of a bound, and that there is none any more.
func TestPacerTellsTheKernel(t *testing.T) {
	raw, _ := tcpPair(t)
	c, _ := carry(raw, time.Hour, nil)
	c.alone()
	var p pacer
	p.add(c)
	of := p.data[c]
	for _, want := range []int64{6_000, 1_000, leastPace, 0} {
		of.setBound(c, want)
		var rate uint64
		var err error
		if cerr := c.raw.Control(func(fd uintptr) {
			rate, err = unix.GetsockoptUint64(int(fd), unix.SOL_SOCKET, unix.SO_MAX_PACING_RATE)
		}); cerr != nil || err != nil {
			t.Fatal(cerr, err)
		}
		if want == 0 {
			want = -1 // no bound
		}
		if int64(rate) != want { //nolint:gosec // no bound is all ones
			t.Errorf("the kernel has %d bytes a second, want %d", int64(rate), want) //nolint:gosec // likewise
		}
	}
}

// A data connection that sends little is not slowed down beside one that sends much, and none gets
// less than a little.
func TestBoundOf(t *testing.T) {
	p := pacer{rate: 3_000}
	little, much, more := &progress{}, &progress{}, &progress{}
	busy := []*progress{much, more}
	for of, want := range map[*progress]int64{little: 0, much: 1_500, more: 1_500} {
		if got := p.boundOf(of, busy); got != want {
			t.Errorf("a bound of %d, want %d", got, want)
		}
	}
	p.rate = 10
	if got := p.boundOf(much, busy); got != leastPace {
		t.Errorf("a bound of %d, want %d", got, leastPace)
	}
}

// A data connection over a wide link is never slowed down, however much it sends beside the
// session's own, and the pacer stops when nobody sends.
func TestPacerOnAWideLink(t *testing.T) {
	var own, data *carrier
	for _, c := range []**carrier{&own, &data} {
		a, b := tcpPair(t)
		*c, _ = carry(a, time.Hour, nil)
		go io.Copy(io.Discard, b) // it ends with the test
	}
	data.alone()
	p := pacer{own: own, guard: func(f func()) func() { return f }}
	p.add(data)
	looked := false
	for end := time.Now().Add(5 * paceInterval); !looked || time.Now().Before(end); {
		for _, c := range []*carrier{own, data} {
			if _, err := c.Write(blob(64 << 10)); err != nil {
				t.Fatal(err)
			}
		}
		p.mu.Lock()
		rate := p.rate
		looked = p.data[data].known
		p.mu.Unlock()
		if rate > 0 || p.narrow() {
			t.Fatalf("a bound of %d bytes a second", rate)
		}
	}
	testkit.Eventually(t, "it stops looking when nobody sends", func() bool { return !p.watching.Load() })
}

// The bound ends soon once nobody needs it, and where it does not help.
func TestPacerDecides(t *testing.T) {
	now := time.Now()
	fresh := func() *pacer {
		p := &pacer{arrival: 12_000, ownRate: 1_000, capacity: 12_000, needed: sureLooks}
		p.ours.shortestTrip = 50 * time.Millisecond
		p.decide(starving, true, 8, now)
		if p.rate != max(3_000, 8*leastPace) {
			t.Fatalf("the bound is %d", p.rate)
		}
		return p
	}
	p := fresh()
	looks := 0
	for ; p.rate > 0 && looks < 100; looks++ {
		p.decide(none, false, 8, now) // even where nothing arrives
	}
	if took := time.Duration(looks) * paceInterval; took > 5*time.Second {
		t.Errorf("nobody needs the bound, and it ends after %v", took)
	}

	p = fresh()
	for range helpLooks {
		p.decide(starving, true, 8, now)
	}
	if p.rate > 0 || p.narrow() {
		t.Error("the bound has not helped, and stays")
	}
	p.needed = sureLooks
	if p.decide(starving, true, 8, now.Add(narrowTime/2)); p.rate > 0 {
		t.Error("another one begins soon after")
	}
	if p.decide(starving, true, 8, now.Add(narrowTime)); p.rate == 0 {
		t.Error("none begins ever after")
	}

	p = fresh()
	p.ownRate = 6_000
	for range 2 * helpLooks {
		p.decide(starving, true, 8, now)
	}
	if p.rate == 0 {
		t.Error("the bound has helped, and ends")
	}

	p = &pacer{arrival: 12_000, capacity: 12_000, needed: sureLooks - 1}
	p.ours.shortestTrip = 50 * time.Millisecond
	if p.decide(starving, true, 8, now); p.rate > 0 {
		t.Error("a bound begins before it is sure")
	}
	p.needed, p.ours.shortestTrip = sureLooks, leastTrip/2
	if p.decide(starving, true, 8, now); p.rate > 0 {
		t.Error("a bound begins over a short way")
	}
}
