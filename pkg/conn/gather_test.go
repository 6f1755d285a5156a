package conn

import (
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// Small pieces in a row are gathered; answers, large pieces and slow ones are not.
func TestGather(t *testing.T) { synctest.Test(t, testGather) }

func testGather(t *testing.T) {
	many := func(n, gathered int, heard bool, every time.Duration) (paused int) {
		var p pace
		size := n
		for range 100 {
			var said atomic.Bool
			said.Store(heard)
			wait := p.gathers(size, &said)
			size = n
			if wait {
				paused++
				size = gathered
			}
			time.Sleep(every)
		}
		return paused
	}
	if n := many(128, 256, false, time.Millisecond); n != 100-gatherAfter {
		t.Errorf("a log that is followed: %d pauses", n)
	}
	if n := many(128, 256, true, time.Millisecond) + many(16<<10, 16<<10, false, time.Millisecond) +
		many(128, 256, false, time.Second); n != 0 {
		t.Errorf("%d pauses where there is nothing to gather", n)
	}
	if n := many(128, 128, false, time.Millisecond); n != gatherVain {
		t.Errorf("%d pauses before a source that gives piece by piece", n)
	}
}
