package netwatch

import (
	"context"
	"errors"
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
		w.subscribe = func(ctx context.Context, events chan<- struct{}) error {
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
			return nil
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

// A system that does not tell is logged once. What may have been missed is one change, not one at each attempt.
func TestNoSubscription(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, text := testkit.NewLog()
		calls, attempts := 0, 0
		w := New(func() { calls++ }, log)
		w.subscribe = func(context.Context, chan<- struct{}) error { attempts++; return errors.New("not permitted") }
		running := testkit.Run(t, w.Run)
		time.Sleep(time.Minute)
		running.Stop()
		if n := len(text.Lines("by timeouts", "not permitted")); n != 1 || calls != 1 || attempts < 3 {
			t.Errorf("%d lines, %d calls, %d attempts", n, calls, attempts)
		}
	})
}

// Each subscription that has worked may have lost changes at its end.
func TestSubscriptionBreaks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, _ := testkit.NewLog()
		calls := 0
		w := New(func() { calls++ }, log)
		w.subscribe = func(context.Context, chan<- struct{}) error {
			time.Sleep(time.Minute)
			return errors.New("no buffer space available")
		}
		running := testkit.Run(t, w.Run)
		time.Sleep(5 * time.Minute)
		running.Stop()
		if calls < 3 {
			t.Errorf("%d calls", calls)
		}
	})
}
