package tunnel

import (
	"math/rand/v2"
	"time"
)

// Backoff computes how long a client waits before it tries again to reach a server. The wait is a random
// part of a bound that doubles with each failure ("full jitter"). So ten thousand edges that lost their
// replica at the same moment do not reconnect at the same moment. After a refusal the wait is at least
// half the bound. The zero value is ready to use. A Backoff must not be used from several goroutines.
type Backoff struct {
	bound time.Duration // upper bound of the last wait; 0: no wait since Reset
}

const (
	// BackoffMin and BackoffMax bound the wait after a failure that is no refusal.
	BackoffMin = 500 * time.Millisecond
	BackoffMax = 10 * time.Second
	// BackoffRefusedMin and BackoffRefusedMax bound the wait after a refusal. An early retry is useless
	// then. But Kubernetes may deliver a changed Secret late, so the client keeps trying.
	BackoffRefusedMin = 10 * time.Second
	BackoffRefusedMax = 5 * time.Minute
)

// Next returns how long to wait after a failure that is no refusal. The wait is shorter than limit, which takes the
// place of BackoffMax.
func (b *Backoff) Next(limit time.Duration) time.Duration {
	b.bound = min(max(2*b.bound, BackoffMin), limit)
	return rand.N(b.bound) //nolint:gosec // jitter is no secret
}

// NextRefused returns how long to wait after a refusal.
func (b *Backoff) NextRefused() time.Duration {
	b.bound = min(max(2*b.bound, BackoffRefusedMin), BackoffRefusedMax)
	return b.bound/2 + rand.N(b.bound/2) //nolint:gosec // jitter is no secret
}

// Reset makes the next wait short again.
func (b *Backoff) Reset() { b.bound = 0 }
