package stream

import (
	"fmt"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
)

// A reason crosses the wire beside code and text, whatever is said around it here; a reason of other
// software is none of ours.
func TestReason(t *testing.T) {
	err := withReason(codes.Unauthenticated, reasonExpired, "the credential of this node has expired")
	received := status.FromProto(status.Convert(err).Proto()).Err()
	wrapped := fmt.Errorf("joining as node edge1: %w", received)
	if got := reasonOf(wrapped); got != reasonExpired {
		t.Errorf("the reason is %q, want %q", got, reasonExpired)
	}
	if got := status.Convert(received).Message(); got != "the credential of this node has expired" {
		t.Errorf("the text is %q", got)
	}
	if status.Code(wrapped) != codes.Unauthenticated {
		t.Errorf("the code is %v", status.Code(wrapped))
	}
	foreign, ferr := status.New(codes.Unauthenticated, "expired").WithDetails(&errdetails.ErrorInfo{Reason: string(reasonExpired), Domain: "example.org"})
	if ferr != nil {
		t.Fatal(ferr)
	}
	for name, err := range map[string]error{"other software's": foreign.Err(), "an older release's": status.Error(codes.Unauthenticated, "it has expired"), "none": nil} {
		if got := reasonOf(err); got != "" {
			t.Errorf("%s reason is %q, want none", name, got)
		}
	}
}
