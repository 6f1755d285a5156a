package tunnel

import (
	"context"
	"time"
)

// GracePeriod is how long live conns may continue after the process was asked to stop.
// It is shorter than the time after which Kubernetes kills the process by default
// (terminationGracePeriodSeconds, 30 s). The rest is for the orderly end: conns are
// reset, sessions end with a status, and the log says so.
const GracePeriod = 25 * time.Second

// Grace returns a context for work that may outlive ctx. The returned context has the
// values of ctx. It is done d after ctx is done, or when cancel is called.
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
