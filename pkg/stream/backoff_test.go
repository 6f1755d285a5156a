package stream

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

var (
	errNetwork = errors.New("connection refused")
	errToken   = fmt.Errorf("joining: %w", status.Error(codes.Unauthenticated, "no"))
)

// The waits of an edge that cannot reach its cloud double from half a second to ten,
// and each is any part of that: ten thousand edges do not come back at once.
func TestBackoffIsFullJitter(t *testing.T) {
	const edges = 2000
	bounds := []time.Duration{500 * time.Millisecond, time.Second, 2 * time.Second, 4 * time.Second, 8 * time.Second, 10 * time.Second, 10 * time.Second}
	early, late := make([]int, len(bounds)), make([]int, len(bounds))
	for range edges {
		var b backoff
		for i, bound := range bounds {
			d := b.next(errNetwork, false)
			if d < 0 || d >= bound {
				t.Fatalf("wait %d is %s, want less than %s", i+1, d, bound)
			}
			switch {
			case d < bound/4:
				early[i]++
			case d >= bound*3/4:
				late[i]++
			}
		}
	}
	for i := range bounds {
		// 500 of 2,000 are expected in each quarter; 350 is eight deviations off.
		if early[i] < 350 || late[i] < 350 {
			t.Errorf("wait %d is not spread over its bound: %d of %d in the first quarter, %d in the last", i+1, early[i], edges, late[i])
		}
	}
}

// A refusal is answered by patience, from ten seconds to five minutes.
func TestBackoffAfterRefusal(t *testing.T) {
	var b backoff
	for i, bound := range []time.Duration{10, 20, 40, 80, 160, 300, 300} {
		bound *= time.Second
		if d := b.next(errToken, false); d < bound/2 || d >= bound {
			t.Errorf("wait %d is %s, want %s to %s", i+1, d, bound/2, bound)
		}
	}
	if d := b.next(errNetwork, false); d >= backoffMax {
		t.Errorf("a cloud that is down after a refusal is tried again after %s, want less than %s", d, backoffMax)
	}
	b.reset()
	if d := b.next(errNetwork, false); d >= backoffMin {
		t.Errorf("after a session the first wait is %s, want less than %s", d, backoffMin)
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
