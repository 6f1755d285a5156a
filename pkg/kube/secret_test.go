package kube

import (
	"testing"
)

// A Secret is written as Kubernetes reads it, and read as Kubernetes writes it.
func TestSecret(t *testing.T) {
	s := serve(t, refusal(404, "NotFound", ""))
	if data, found, err := s.Secret(t.Context(), "ns", "cloud"); data != nil || found || err != nil {
		t.Errorf("a missing Secret is %q, found %t, %v", data, found, err)
	}
	s.wantRequests(t, "GET /api/v1/namespaces/ns/secrets/cloud")

	s.setHandler(text(201, `{"metadata": {"resourceVersion": "7"}}`))
	err := s.CreateSecret(t.Context(), "ns", "cloud", map[string][]byte{"tls.key": []byte("key\n"), "tokens": {}})
	if err != nil {
		t.Error(err)
	}
	s.wantRequests(t, `POST /api/v1/namespaces/ns/secrets application/json `+
		`{"metadata":{"name":"cloud","namespace":"ns"},"type":"Opaque","data":{"tls.key":"a2V5Cg==","tokens":""}}`)

	s.setHandler(text(200, `{"metadata": {"resourceVersion": "7"}, "data": {"tls.key": "a2V5Cg=="}}`))
	data, found, err := s.Secret(t.Context(), "ns", "cloud")
	if string(data["tls.key"]) != "key\n" || !found || err != nil {
		t.Errorf("the Secret is %q, found %t, %v", data, found, err)
	}

	s.setHandler(refusal(409, "AlreadyExists", ""))
	if err := s.CreateSecret(t.Context(), "ns", "cloud", nil); ReasonFor(err) != Conflict {
		t.Errorf("creating a Secret that exists: %v, want a conflict", err)
	}
	s.setHandler(refusal(403, "Forbidden", ""))
	if _, found, err := s.Secret(t.Context(), "ns", "cloud"); found || ReasonFor(err) != Forbidden {
		t.Errorf("reading without the right: found %t, %v", found, err)
	}
}
