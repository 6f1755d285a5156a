package stream

import (
	"errors"
	"math/rand/v2"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// backoff computes how long an edge waits before its next attempt. The wait is a random part of a
// bound that doubles with each attempt ("full jitter"). So ten thousand edges that lost their
// replica at the same moment do not reconnect at the same moment. After a refusal the wait is at
// least half the bound.
type backoff struct {
	bound time.Duration // upper bound of the last wait; 0: no wait since reset
}

const (
	backoffMin = 500 * time.Millisecond
	backoffMax = 10 * time.Second
	// backoffMoving replaces backoffMax while the edge's replica is about to stop. The replica waits for the
	// edge to reach another one until leaveLast, so the edge must try several times until then.
	backoffMoving = 2 * time.Second
	// backoffRefusedMin and backoffRefusedMax bound the wait after a refusal. An early retry is
	// useless then. But Kubernetes may deliver a changed Secret late, so the edge keeps trying.
	backoffRefusedMin = 10 * time.Second
	backoffRefusedMax = 5 * time.Minute
)

// next returns how long to wait after a failure with err. moving says whether the edge's replica is about to stop.
func (b *backoff) next(err error, moving bool) time.Duration {
	low, high := backoffMin, backoffMax
	switch {
	case isRefusal(err):
		low, high = backoffRefusedMin, backoffRefusedMax
	case moving:
		high = backoffMoving
	}
	b.bound = min(max(2*b.bound, low), high)
	if isRefusal(err) {
		return b.bound/2 + rand.N(b.bound/2) //nolint:gosec // jitter is no secret
	}
	return rand.N(b.bound) //nolint:gosec // jitter is no secret
}

// reset makes the next wait short again. The client calls reset after a session that lived longer
// than backoffMax, and after a pause that ended early because of HurryUp, a new list of replicas, or, unless the
// cloud has refused the edge, another address of this machine.
func (b *backoff) reset() { b.bound = 0 }

// isRefusal reports whether the cloud has refused this edge. The cloud will refuse the edge again
// until a credential, a version or an address changes.
func isRefusal(err error) bool {
	if errors.Is(err, ErrSelf) { // a replica has joined itself; its address may lead to another replica later
		return true
	}
	switch status.Code(err) {
	case codes.Unauthenticated, codes.PermissionDenied, // the token or the certificate
		codes.FailedPrecondition, codes.Unimplemented, // the protocol version
		codes.Aborted: // another edge uses the name and credential of this node
		return true
	}
	return false
}
