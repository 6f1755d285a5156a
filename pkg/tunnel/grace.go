package tunnel

import (
	"context"
	"errors"
	"sync/atomic"
	"time"
)

// GracePeriod is how long live conns may continue after the process was asked to stop.
// It is shorter than the time after which Kubernetes kills the process by default
// (terminationGracePeriodSeconds, 30 s). The rest is for the orderly end: conns are
// reset, sessions end with a status, and the log says so.
const GracePeriod = 25 * time.Second

// quietTime is the last part of a grace period, in which Splice ends a connection at a quiet moment.
const quietTime = 10 * time.Second

// GraceEnd is the time at which a grace period ends. The zero value is one that has not begun. The time has a monotonic
// clock reading, since the wall clock may be set meanwhile.
type GraceEnd struct{ at atomic.Pointer[time.Time] }

// Begin begins the grace period, which ends after d.
func (g *GraceEnd) Begin(d time.Duration) { g.at.Store(new(time.Now().Add(d))) }

// time returns when the grace period ends; zero: it has not begun.
func (g *GraceEnd) time() (at time.Time) {
	if g == nil {
		return at
	}
	if begun := g.at.Load(); begun != nil {
		at = *begun
	}
	return at
}

// graceKey is the key under which a context holds its *GraceEnd. Splice looks it up.
type graceKey struct{}

// WithGraceEnd returns a context for conns that somebody resets at end, if end begins: see Splice. Unlike the context
// of Grace, it is not done then. end may be nil.
func WithGraceEnd(ctx context.Context, end *GraceEnd) context.Context {
	if end == nil {
		return ctx
	}
	return context.WithValue(ctx, graceKey{}, end)
}

// Stopping is the cause of a context that ends some time after the process was asked to stop, at Since. The grace
// period counts from Since, because the 30 s of Kubernetes begin at the request to stop.
type Stopping struct{ Since time.Time }

// Error implements error.
func (Stopping) Error() string { return context.Canceled.Error() }

// Unwrap says that nothing has failed.
func (Stopping) Unwrap() error { return context.Canceled }

// GraceLeft returns how long a grace period of d still lasts when ctx is done.
func GraceLeft(ctx context.Context, d time.Duration) time.Duration {
	if s, ok := errors.AsType[Stopping](context.Cause(ctx)); ok {
		return max(0, d-time.Since(s.Since))
	}
	return d
}

// Grace returns a context for work that may outlive ctx. The returned context has the values of ctx. It is done when
// cancel is called, or d after ctx is done; the time since Stopping.Since counts as part of d. In the last quietTime
// of d, Splice ends silent connections, see watchdog.look.
func Grace(ctx context.Context, d time.Duration) (graced context.Context, cancel context.CancelFunc) {
	return GraceFunc(ctx, func() time.Duration { return GraceLeft(ctx, d) })
}

// GraceFunc is like Grace, for a duration that is known only when ctx is done: it calls left at that moment.
func GraceFunc(
	ctx context.Context, left func() time.Duration,
) (graced context.Context, cancel context.CancelFunc) {
	end := new(GraceEnd)
	graced, cancelCtx := context.WithCancel(WithGraceEnd(context.WithoutCancel(ctx), end))
	stop := context.AfterFunc(ctx, func() {
		d := left()
		end.Begin(d)
		select {
		case <-time.After(d):
			cancelCtx()
		case <-graced.Done():
		}
	})
	return graced, func() {
		stop()
		cancelCtx()
	}
}
