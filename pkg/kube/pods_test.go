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
)

func TestNodeOf(t *testing.T) {
	s := serve(t, text(200, `{"kind": "Pod", "metadata": {"name": "p"}, "spec": {"nodeName": "edge1", "containers": []}}`))
	p := s.Pods(slog.New(slog.DiscardHandler))
	if n, err := p.NodeOf(t.Context(), "ns", "p"); n != "edge1" || err != nil {
		t.Errorf("%q, %v", n, err)
	}
	s.wantAsked(t, "GET /api/v1/namespaces/ns/pods/p")
	s.from(text(200, `{"kind": "Pod", "spec": {}}`))
	if n, err := p.NodeOf(t.Context(), "ns", "p"); n != "" || err != nil {
		t.Errorf("one that is not bound: %q, %v", n, err)
	}
	s.from(refusal(404, "NotFound", ""))
	if n, err := p.NodeOf(t.Context(), "ns", "p"); n != "" || err != nil {
		t.Errorf("one that is not there: %q, %v", n, err)
	}
	for code, says := range map[int]string{403: "deployment/cloud-rbac.yaml", 500: ""} {
		reason := map[int]string{403: "Forbidden", 500: "InternalError"}[code]
		s.from(refusal(code, reason, ""))
		if n, err := p.NodeOf(t.Context(), "ns", "p"); n != "" || err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%d: %q, %v", code, n, err)
		}
	}
}

// podsOnly is an API server that has one pod, or refuses to show it.
type podsOnly struct {
	objects            // nil: nobody asks for anything else
	mu      sync.Mutex // guards the following
	err     error
	asked   int
}

func (o *podsOnly) get(_ context.Context, _ string, _ any) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.asked++
	return o.err
}

func (o *podsOnly) becomes(err error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.err = err
}

// Missing rights show before the first exec, and until they are there.
func TestPodsNote(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		forbidden := apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, "tunnel", errors.New("no rule"))
		o := &podsOnly{err: forbidden}
		log := new(strings.Builder)
		p := (&Client{pods: o}).Pods(slog.New(slog.NewTextHandler(log, nil)))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- p.Run(ctx) }()
		want := func(why, note string, warnings, asked int) {
			t.Helper()
			synctest.Wait()
			if got := p.Note(); !strings.Contains(got, note) || (note == "") != (got == "") {
				t.Errorf("%s: it notes %q, want %q", why, got, note)
			}
			o.mu.Lock()
			defer o.mu.Unlock()
			if n := strings.Count(log.String(), "level=WARN"); n != warnings || o.asked != asked {
				t.Errorf("%s: %d warnings, asked %d times; want %d, %d", why, n, o.asked, warnings, asked)
			}
		}
		const apply = "deployment/cloud-rbac.yaml"
		want("at the start", apply, 1, 1)
		if !strings.Contains(log.String(), apply) {
			t.Errorf("the log does not say what to apply: %s", log)
		}
		time.Sleep(podsAgain)
		want("it is tried again", apply, 1, 2)
		o.becomes(nil)
		time.Sleep(podsAgain)
		want("the rights are there", "", 1, 3)
		time.Sleep(time.Hour)
		want("nothing is asked without need", "", 1, 3)
		o.becomes(forbidden)
		if _, err := p.NodeOf(t.Context(), "ns", "p"); err == nil {
			t.Error("no error without rights")
		}
		want("the rights have gone", apply, 2, 4)
		o.becomes(apierrors.NewNotFound(schema.GroupResource{Resource: "pods"}, "tunnel"))
		time.Sleep(podsAgain)
		want("who may ask hears that there is no such pod", "", 2, 5)
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}
