package testkit

import (
	"context"
	"testing"
	"time"
)

// Running is a goroutine that Run has started.
type Running struct {
	t      testing.TB
	cancel context.CancelFunc
	done   chan struct{} // closed when run has returned
}

// Run calls run in a goroutine until the test ends, or until Stop. The test fails if run returns an
// error.
func Run(t testing.TB, run func(ctx context.Context) error) *Running {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	r := &Running{t, cancel, make(chan struct{})}
	go func() {
		defer close(r.done)
		if err := run(ctx); err != nil {
			t.Errorf("Run: %v", err)
		}
	}()
	t.Cleanup(r.Stop)
	return r
}

// Cancel ends the context of run, and does not wait.
func (r *Running) Cancel() { r.cancel() }

// Done returns a channel that is closed when run has returned.
func (r *Running) Done() <-chan struct{} { return r.done }

// Stop ends the context of run and waits until run has returned. The test fails if that takes more
// than a minute.
func (r *Running) Stop() {
	r.t.Helper()
	r.cancel()
	select {
	case <-r.done:
	case <-time.After(patience):
		r.t.Errorf("Run does not return within %s", patience)
	}
}
