package tunnel

import (
	"context"
	"time"
)

// GracePeriod is how long live conns may go on after the process was asked to stop.
// It is shorter than Kubernetes waits by default before it kills
// (terminationGracePeriodSeconds, 30 s), so that what comes after it still happens:
// conns are reset, sessions end with a status, the log says so.
const GracePeriod = 25 * time.Second

// Grace returns a context for work that may outlive ctx: it is done d after ctx is,
// or when cancel is called.
func Grace(ctx context.Context, d time.Duration) (graced context.Context, cancel context.CancelFunc) {
	graced, cancelCtx := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
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
