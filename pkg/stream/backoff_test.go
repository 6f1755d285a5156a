package stream

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/pkg/tunnel"
)

var (
	errNetwork = errors.New("connection refused")
	errToken   = fmt.Errorf("joining: %w", status.Error(codes.Unauthenticated, "no"))
)

// A refusal is answered by patience, from ten seconds to five minutes. A failure that is none is not.
func TestBackoffAfterRefusal(t *testing.T) {
	for range 1000 {
		var b backoff
		for i, bound := range []time.Duration{10, 20, 40, 80, 160, 300, 300} {
			bound *= time.Second
			if d := b.next(errToken, false); d < bound/2 || d >= bound {
				t.Fatalf("wait %d is %s, want %s to %s", i+1, d, bound/2, bound)
			}
		}
		if d := b.next(errNetwork, false); d >= tunnel.BackoffMax {
			t.Fatalf("a cloud that is down after a refusal is tried again after %s, want less than %s",
				d, tunnel.BackoffMax)
		}
		b.Reset()
		if d := b.next(errNetwork, false); d >= tunnel.BackoffMin {
			t.Fatalf("after a session the first wait is %s, want less than %s", d, tunnel.BackoffMin)
		}
	}
}

// Only what somebody has to change is a refusal.
func TestWhatIsARefusal(t *testing.T) {
	for code := codes.OK; code <= codes.Unauthenticated; code++ {
		var want bool
		switch code {
		case codes.Unauthenticated, codes.PermissionDenied, codes.FailedPrecondition, codes.Unimplemented, codes.Aborted:
			want = true
		}
		if code == codes.OK {
			continue
		}
		if got := isRefusal(explain(fmt.Errorf("joining: %w", status.Error(code, "x")))); got != want {
			t.Errorf("%s is a refusal: %t, want %t", code, got, want)
		}
	}
	if isRefusal(errNetwork) {
		t.Error("a network error is a refusal")
	}
}

// An edge whose replica is about to stop tries again several times while the replica waits for it.
func TestBackoffWhileMoving(t *testing.T) {
	for range 1000 {
		var b backoff
		for i := range 10 {
			if d := b.next(errNetwork, true); d >= backoffMoving || backoffMoving > (leaveLast-leaveFirst)/4 {
				t.Fatalf("wait %d is %s, want less than %s; the replica waits %s", i+1, d, backoffMoving, leaveLast)
			}
		}
	}
}
