package tunnel

import (
	"testing"
	"time"
)

// The waits of an edge that cannot reach its cloud double from half a second to ten,
// and each is any part of that: ten thousand edges do not come back at once.
func TestBackoffIsFullJitter(t *testing.T) {
	const edges = 2000
	bounds := []time.Duration{
		500 * time.Millisecond, time.Second, 2 * time.Second, 4 * time.Second, 8 * time.Second, 10 * time.Second,
		10 * time.Second,
	}
	early, late := make([]int, len(bounds)), make([]int, len(bounds))
	for range edges {
		var b Backoff
		for i, bound := range bounds {
			d := b.Next(BackoffMax)
			if d < 0 || d >= bound {
				t.Fatalf("wait %d is %s, want less than %s", i+1, d, bound)
			}
			switch {
			case d < bound/4:
				early[i]++
			case d >= bound*3/4:
				late[i]++
			}
		}
	}
	for i := range bounds {
		// 500 of 2,000 are expected in each quarter; 350 is eight deviations off.
		if early[i] < 350 || late[i] < 350 {
			t.Errorf("wait %d is not spread over its bound: %d of %d in the first quarter, %d in the last",
				i+1, early[i], edges, late[i])
		}
	}
}

// The waits after refusals double from ten seconds to five minutes, and each is at least half its bound.
func TestBackoffAfterRefusal(t *testing.T) {
	for range 1000 {
		var b Backoff
		for i, bound := range []time.Duration{10, 20, 40, 80, 160, 300, 300} {
			bound *= time.Second
			if d := b.NextRefused(); d < bound/2 || d >= bound {
				t.Fatalf("wait %d is %s, want %s to %s", i+1, d, bound/2, bound)
			}
		}
		if d := b.Next(BackoffMax); d >= BackoffMax {
			t.Fatalf("a server that is down after a refusal is tried again after %s, want less than %s",
				d, BackoffMax)
		}
		b.Reset()
		if d := b.Next(BackoffMax); d >= BackoffMin {
			t.Fatalf("after Reset the first wait is %s, want less than %s", d, BackoffMin)
		}
	}
}
