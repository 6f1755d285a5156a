package kube

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"tunnel.example/tunnel/internal/testkit"
)

func TestNodeOf(t *testing.T) {
	s := serve(t, text(200, `{"kind": "Pod", "metadata": {"name": "p"}, "spec": {"nodeName": "edge1", "containers": []}}`))
	p := s.Pods(slog.New(slog.DiscardHandler))
	if n, err := p.NodeOf(t.Context(), "ns", "p"); n != "edge1" || err != nil {
		t.Errorf("%q, %v", n, err)
	}
	s.wantRequests(t, "GET /api/v1/namespaces/ns/pods/p")
	s.setHandler(text(200, `{"kind": "Pod", "spec": {}}`))
	if n, err := p.NodeOf(t.Context(), "ns", "p"); n != "" || err != nil {
		t.Errorf("a pod that is not bound: %q, %v", n, err)
	}
	s.setHandler(refusal(404, "NotFound", ""))
	if n, err := p.NodeOf(t.Context(), "ns", "p"); n != "" || err != nil {
		t.Errorf("a pod that does not exist: %q, %v", n, err)
	}
	for code, says := range map[int]string{403: "deployment/cloud-rbac.yaml", 500: ""} {
		reason := map[int]string{403: "Forbidden", 500: "InternalError"}[code]
		s.setHandler(refusal(code, reason, ""))
		if n, err := p.NodeOf(t.Context(), "ns", "p"); n != "" || err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%d: %q, %v", code, n, err)
		}
	}
}

// podsOnly is an API server that has one pod, or refuses to return it.
type podsOnly struct {
	objects             // nil: only get is called
	mu       sync.Mutex // guards the following
	err      error      // of the next requests; nil: the pod is returned
	requests int
}

func (o *podsOnly) get(_ context.Context, _ string, _ any) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.requests++
	return o.err
}

func (o *podsOnly) setErr(err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.err = err
}

// Missing rights show in Note before the first exec, and until they are granted.
func TestPodsNote(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		forbidden := apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, "tunnel", errors.New("no rule"))
		o := &podsOnly{err: forbidden}
		log := new(testkit.Log)
		p := (&Client{pods: o}).Pods(slog.New(slog.NewTextHandler(log, nil)))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- p.Run(ctx) }()
		want := func(why, note string, warnings, requests int) {
			t.Helper()
			synctest.Wait()
			if got := p.Note(); !strings.Contains(got, note) || (note == "") != (got == "") {
				t.Errorf("%s: the note is %q, want %q", why, got, note)
			}
			o.mu.Lock()
			defer o.mu.Unlock()
			if n := strings.Count(log.String(), "level=WARN"); n != warnings || o.requests != requests {
				t.Errorf("%s: %d warnings, %d requests; want %d, %d", why, n, o.requests, warnings, requests)
			}
		}
		const apply = "deployment/cloud-rbac.yaml"
		want("at the start", apply, 1, 1)
		if !strings.Contains(log.String(), apply) {
			t.Errorf("the log does not say what to apply: %s", log)
		}
		time.Sleep(podsRetryInterval)
		want("it is tried again", apply, 1, 2)
		o.setErr(nil)
		time.Sleep(podsRetryInterval)
		want("the rights are granted", "", 1, 3)
		time.Sleep(time.Hour)
		want("no further requests", "", 1, 3)
		o.setErr(forbidden)
		if _, err := p.NodeOf(t.Context(), "ns", "p"); err == nil {
			t.Error("no error without rights")
		}
		want("the rights are withdrawn", apply, 2, 4)
		o.setErr(apierrors.NewNotFound(schema.GroupResource{Resource: "pods"}, "tunnel"))
		time.Sleep(podsRetryInterval)
		want("not found is an answer, so the rights are there", "", 2, 5)
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}
