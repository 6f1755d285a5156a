package tunnel

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestLimiter(t *testing.T) {
	for name, tc := range map[string]struct {
		limiter *Limiter
		every   time.Duration
		burst   int
	}{
		"zero value":   {&Limiter{}, time.Minute, 1},
		"ten a second": {&Limiter{Every: time.Second, Burst: 10}, time.Second, 10},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := tc.limiter
				for round := range 3 {
					allowed, skipped := 0, 0
					for range 1000 {
						if n, ok := l.Allow(); ok {
							allowed++
							skipped += n
						}
					}
					want := 1000 - tc.burst // skipped in the round before
					if round == 0 {
						want = 0
					}
					if allowed != tc.burst || skipped != want {
						t.Errorf("round %d: %d allowed, %d reported as skipped; want %d and %d",
							round, allowed, skipped, tc.burst, want)
					}
					time.Sleep(tc.every)
				}
			})
		})
	}
}
