package netwatch

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/internal/testkit/leaks"
)

func TestMain(m *testing.M) { leaks.Main(m) }

// Changes that follow each other are one call, and calls keep a distance.
func TestCoalesce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, _ := testkit.NewLog()
		var calls []time.Duration
		began := time.Now()
		w := New(func() { calls = append(calls, time.Since(began)) }, log)
		w.subscribe = func(ctx context.Context, events chan<- struct{}) (opened bool, err error) {
			for range 10 { // a machine gets its addresses
				tell(events)
				time.Sleep(20 * time.Millisecond)
			}
			time.Sleep(time.Minute)
			for range 100 { // pods come and go
				tell(events)
				time.Sleep(100 * time.Millisecond)
			}
			<-ctx.Done()
			return true, nil
		}
		running := testkit.Run(t, w.Run)
		time.Sleep(time.Hour)
		running.Stop()
		if len(calls) < 2 || calls[0] != settle || calls[1] < time.Minute || len(calls) > 7 {
			t.Errorf("called at %v", calls)
		}
		for i := 1; i < len(calls); i++ {
			if calls[i]-calls[i-1] < pause {
				t.Errorf("called at %v", calls)
			}
		}
	})
}

// A system that does not tell is logged once, and an attempt is no change.
func TestNoSubscription(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, text := testkit.NewLog()
		calls, attempts := 0, 0
		w := New(func() { calls++ }, log)
		w.subscribe = func(context.Context, chan<- struct{}) (opened bool, err error) {
			attempts++
			return false, errors.New("not permitted")
		}
		running := testkit.Run(t, w.Run)
		time.Sleep(time.Minute)
		running.Stop()
		if n := len(text.Lines("by timeouts", "not permitted")); n != 1 || calls != 0 || attempts < 3 {
			t.Errorf("%d lines, %d calls, %d attempts", n, calls, attempts)
		}
	})
}

// A subscription that breaks off may have lost changes, and so may the pause until the next one, if there is a pause.
func TestSubscriptionBreaks(t *testing.T) {
	for lasts, calls := range map[time.Duration]int{time.Minute: 5, time.Second: 27} {
		synctest.Test(t, func(t *testing.T) {
			log, text := testkit.NewLog()
			var open atomic.Bool
			got := 0
			w := New(func() {
				got++
				if !open.Load() {
					t.Error("changed is called while nobody listens for the next change")
				}
			}, log)
			w.subscribe = func(context.Context, chan<- struct{}) (opened bool, err error) {
				open.Store(true)
				time.Sleep(lasts)
				open.Store(false)
				return true, errors.New("no buffer space available")
			}
			running := testkit.Run(t, w.Run)
			time.Sleep(5*time.Minute + time.Second)
			running.Stop()
			if got != calls || len(text.Lines("by timeouts")) > 0 {
				t.Errorf("subscriptions of %v: %d calls, want %d:\n%s", lasts, got, calls, text)
			}
		})
	}
}
