package stream

import (
	"errors"
	"math/rand/v2"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// backoff says how long an edge waits before it tries again: a random part of a
// bound that doubles ("full jitter"), so that ten thousand edges that lost their
// replica at the same moment do not come back at the same moment.
type backoff struct {
	bound time.Duration // of the next wait; 0: none was needed yet
}

const (
	backoffMin = 500 * time.Millisecond
	backoffMax = 10 * time.Second
	// After a refusal trying again soon is of no use, but a Secret may lag behind.
	backoffRefusedMin = 10 * time.Second
	backoffRefusedMax = 5 * time.Minute
)

// next returns the wait after err.
func (b *backoff) next(err error) time.Duration {
	low, high := backoffMin, backoffMax
	if isRefusal(err) {
		low, high = backoffRefusedMin, backoffRefusedMax
	}
	b.bound = min(max(2*b.bound, low), high)
	if isRefusal(err) {
		return b.bound/2 + rand.N(b.bound/2) //nolint:gosec // jitter is no secret
	}
	return rand.N(b.bound) //nolint:gosec // jitter is no secret
}

// reset is called when a session has proven itself.
func (b *backoff) reset() { b.bound = 0 }

// isRefusal reports whether the cloud has decided against this edge, so that it will
// decide the same way again until somebody changes something.
func isRefusal(err error) bool {
	if errors.Is(err, errSelf) { // an address of ours, until it is given to another replica
		return true
	}
	switch status.Code(err) {
	case codes.Unauthenticated, codes.PermissionDenied, // the token
		codes.FailedPrecondition, codes.Unimplemented, // the version
		codes.Aborted: // another edge uses this node's name and token
		return true
	}
	return false
}
