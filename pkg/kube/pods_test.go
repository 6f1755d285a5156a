package kube

import (
	"strings"
	"testing"
)

func TestNodeOf(t *testing.T) {
	s := serve(t, text(200, `{"kind": "Pod", "metadata": {"name": "p"}, "spec": {"nodeName": "edge1", "containers": []}}`))
	if n, err := s.NodeOf(t.Context(), "ns", "p"); n != "edge1" || err != nil {
		t.Errorf("%q, %v", n, err)
	}
	s.wantAsked(t, "GET /api/v1/namespaces/ns/pods/p")
	s.from(text(200, `{"kind": "Pod", "spec": {}}`))
	if n, err := s.NodeOf(t.Context(), "ns", "p"); n != "" || err != nil {
		t.Errorf("one that is not bound: %q, %v", n, err)
	}
	s.from(refusal(404, "NotFound", ""))
	if n, err := s.NodeOf(t.Context(), "ns", "p"); n != "" || err != nil {
		t.Errorf("one that is not there: %q, %v", n, err)
	}
	for code, says := range map[int]string{403: "deployment/cloud-rbac.yaml", 500: ""} {
		reason := map[int]string{403: "Forbidden", 500: "InternalError"}[code]
		s.from(refusal(code, reason, ""))
		if n, err := s.NodeOf(t.Context(), "ns", "p"); n != "" || err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%d: %q, %v", code, n, err)
		}
	}
}
