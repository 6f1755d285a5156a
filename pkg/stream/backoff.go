package stream

import (
	"errors"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/pkg/tunnel"
)

// backoff is the wait between two attempts of an edge to join. The client calls Reset after a session that
// lived longer than tunnel.BackoffMax, and after a pause that HurryUp or a new list of replicas ended early.
// If another address of this machine ended the pause, it calls Reset unless the cloud has refused the edge.
type backoff struct{ tunnel.Backoff }

// backoffMoving replaces tunnel.BackoffMax while the edge's replica is about to stop. The replica waits until
// leaveLast for the edge to reach another replica, so the edge must be able to try several times in that time.
const backoffMoving = 1500 * time.Millisecond

// next returns how long to wait after a failure with err. moving says whether the edge's replica is about to stop.
func (b *backoff) next(err error, moving bool) time.Duration {
	switch {
	case isRefusal(err):
		return b.NextRefused()
	case moving:
		return b.Next(backoffMoving)
	}
	return b.Next(tunnel.BackoffMax)
}

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
