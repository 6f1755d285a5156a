package kube

import (
	"testing"
)

// A question about a right names the right alone, and the API server's answer counts.
func TestMay(t *testing.T) {
	s := serve(t, text(201, `{"status": {"allowed": true}}`))
	right := Right{Verb: "patch", Resource: "configmaps", Name: "nodes", Namespace: "ns"}
	if may, err := s.May(t.Context(), right); !may || err != nil {
		t.Errorf("allowed: %t, %v", may, err)
	}
	s.wantRequests(t, `POST /apis/authorization.k8s.io/v1/selfsubjectaccessreviews application/json `+
		`{"spec":{"resourceAttributes":{"namespace":"ns","verb":"patch","resource":"configmaps","name":"nodes"}}}`)
	s.setHandler(text(201, `{"status": {"allowed": false, "reason": "no"}}`))
	if may, err := s.May(t.Context(), right); may || err != nil {
		t.Errorf("not allowed: %t, %v", may, err)
	}
	s.setHandler(refusal(401, "Unauthorized", ""))
	if _, err := s.May(t.Context(), right); ReasonFor(err) != Forbidden {
		t.Errorf("a server that does not know us: %v", err)
	}
	approval := Right{Verb: "patch", Resource: "requests", Subresource: "approval"}
	if got := right.String() + "; " + approval.String(); got != "patch configmaps nodes in ns; patch requests/approval" {
		t.Error(got)
	}
	s.setHandler(text(200, `{"gitVersion": "v1.36.1"}`))
	if v, err := s.Version(t.Context()); v != "v1.36.1" || err != nil {
		t.Errorf("version %q, %v", v, err)
	}
}
