package kube

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Reason is why a request failed. Callers or operators react differently to each reason.
type Reason string

// The reasons. Their values are also the values of a metric's label.
const (
	OK        Reason = "ok"
	Conflict  Reason = "conflict"  // another writer changed the object since it was read: read it again
	Forbidden Reason = "forbidden" // the rights are missing, or the credential is not accepted
	Throttled Reason = "throttled" // 429: the server is overloaded
	TooLarge  Reason = "too_large" // the object or the request is too large
	Failed    Reason = "failed"    // any other failure, also a server that cannot be reached
)

// Reasons returns all reasons.
func Reasons() []Reason { return []Reason{OK, Conflict, Forbidden, Throttled, TooLarge, Failed} }

// ReasonFor returns why a request of this package failed.
func ReasonFor(err error) Reason {
	switch {
	case err == nil:
		return OK
	// Another writer has created or deleted the object meanwhile: read it again.
	case apierrors.IsConflict(err), apierrors.IsAlreadyExists(err), apierrors.IsNotFound(err):
		return Conflict
	case apierrors.IsForbidden(err), apierrors.IsUnauthorized(err):
		return Forbidden
	case apierrors.IsTooManyRequests(err):
		return Throttled
	case apierrors.IsRequestEntityTooLargeError(err), apierrors.HasStatusCause(err, metav1.CauseType("FieldValueTooLong")):
		return TooLarge
	default:
		return Failed
	}
}

// RetryAfter returns how long the server asks the client to wait before the next request; 0 if
// it does not say.
func RetryAfter(err error) time.Duration {
	seconds, ok := apierrors.SuggestsClientDelay(err)
	if !ok {
		return 0
	}
	return time.Duration(seconds) * time.Second
}

// Explain adds to an error of this package what an operator can do about the error.
func Explain(err error) error {
	var timeout net.Error
	switch {
	case apierrors.IsUnauthorized(err):
		return fmt.Errorf("%w: the API server does not know our credential; "+
			"is the service account or the kubeconfig up to date?", err)
	case apierrors.IsForbidden(err):
		return fmt.Errorf("%w: grant it (deployment/cloud-rbac.yaml holds all rights that are needed)", err)
	case apierrors.IsTooManyRequests(err):
		return fmt.Errorf("%w: the API server is overloaded, or its priority and fairness settings are tight", err)
	case ReasonFor(err) == TooLarge:
		return fmt.Errorf("%w: make room, or move other keys to an object of their own", err)
	case errors.Is(err, context.DeadlineExceeded) || errors.As(err, &timeout) && timeout.Timeout():
		return fmt.Errorf("no answer from the API server in time: %w", err)
	default:
		return err
	}
}
