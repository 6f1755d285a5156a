package tunnel

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// A line that is repeated every five seconds for a day is logged a few dozen times, and says each time how many
// were left out.
func TestRepeatsForADay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r Repeats
		logged, skipped, rest, all := 0, 0, 0, 0
		for end := time.Now().Add(24 * time.Hour); time.Now().Before(end); time.Sleep(5 * time.Second) {
			all++
			if n, ok := r.Allow("read tcp 127.0.0.1:" + time.Now().Format("05000") + ": refused"); ok {
				logged, skipped, rest = logged+1, skipped+n, 0
			} else {
				rest++
			}
		}
		if logged < 10 || logged > 40 || logged+skipped+rest != all {
			t.Errorf("of %d lines %d were logged; %d and %d were left out", all, logged, skipped, rest)
		}
		if _, ok := r.Allow("something else"); !ok {
			t.Error("another fault was not logged")
		}
		r.Reset()
		if n, ok := r.Allow("read tcp 127.0.0.1:1: refused"); !ok || n != 0 {
			t.Errorf("after the fault was over: %d, %v", n, ok)
		}
	})
}

// Faults that alternate do not make each other new, and more faults than are remembered take no memory.
func TestRepeatsAlternate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r Repeats
		logged := 0
		for range 100 {
			for _, text := range []string{"refused", "timeout", "no such host"} {
				if _, ok := r.Allow(text); ok {
					logged++
				}
			}
		}
		if logged != 3 {
			t.Errorf("%d lines were logged, want 3", logged)
		}
		for c := 'a'; c < 'z'; c++ {
			r.Allow(string(c))
		}
		if len(r.kinds) != repeatKinds {
			t.Errorf("%d kinds are remembered", len(r.kinds))
		}
	})
}

// A peer that sends another text each time gets no more lines than one that repeats itself.
func TestRepeatsVary(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r Repeats
		logged, skipped := 0, 0
		for n := range 1000 {
			if more, ok := r.Allow("refused: " + strings.Repeat("x", n)); ok {
				logged, skipped = logged+1, skipped+more
			}
		}
		if logged != repeatKinds || skipped != 0 {
			t.Errorf("%d lines were logged, want %d", logged, repeatKinds)
		}
		time.Sleep(repeatMin)
		if n, ok := r.Allow("one more"); !ok || n != 1000-repeatKinds {
			t.Errorf("a minute later: %d were skipped, %v", n, ok)
		}
		time.Sleep(3 * repeatMax) // the texts have not come for long
		for _, text := range []string{"a", "b", "a"} {
			if _, ok := r.Allow(text); ok {
				logged++
			}
		}
		if logged != repeatKinds+2 {
			t.Errorf("%d lines were logged after hours, want 2", logged-repeatKinds)
		}
	})
}

func TestDoorCounters(t *testing.T) {
	t.Parallel()
	var c DoorCounters
	for _, d := range []time.Duration{0, 2 * time.Millisecond, 3 * time.Millisecond, 20 * time.Second, time.Minute} {
		c.Ended(d, nil)
	}
	c.Ended(time.Second, Refusef(Denied, "no"))
	c.Failed(0)
	c.Failed(200)
	count, sum, buckets := c.Durations()
	if count != 5 || sum != 80.005 {
		t.Errorf("count %d, sum %v", count, sum)
	}
	for bound, want := range map[float64]uint64{0.002: 2, 0.005: 3, 10: 3, 20: 4} {
		if buckets[bound] != want {
			t.Errorf("bucket %v: %d, want %d", bound, buckets[bound], want)
		}
	}
	if len(buckets) != numBounds {
		t.Errorf("%d buckets", len(buckets))
	}
	for code, want := range map[Code]uint64{0: 1, Denied: 1, Internal: 1, Refused: 0} {
		if n := c.Results(code); n != want {
			t.Errorf("%d were refused with %v, want %d", n, code, want)
		}
	}
}
