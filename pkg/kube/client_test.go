package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// server is an API server that says what the test wants, and notes what it is asked.
type server struct {
	*Client
	mu    sync.Mutex // guards the following
	asked []string   // method, path, query, and of a change its type and body
	say   http.HandlerFunc
}

func serve(t *testing.T, say http.HandlerFunc) *server {
	t.Helper()
	s := &server{say: say}
	h := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		line := r.Method + " " + r.URL.Path
		if body, _ := io.ReadAll(r.Body); len(body) > 0 {
			line += " " + r.Header.Get("Content-Type") + " " + string(body)
		}
		s.mu.Lock()
		s.asked = append(s.asked, line)
		say := s.say
		s.mu.Unlock()
		w.Header().Set("Content-Type", "application/json")
		say(w, r)
	}))
	t.Cleanup(h.Close)
	file := filepath.Join(t.TempDir(), "kubeconfig")
	config := `{"apiVersion": "v1", "kind": "Config", "current-context": "c", "contexts": [{"name": "c", "context": {"cluster": "c"}}],
		"clusters": [{"name": "c", "cluster": {"server": "` + h.URL + `"}}]}`
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := New(file, "test")
	if err != nil {
		t.Fatal(err)
	}
	s.Client = c
	return s
}

func (s *server) from(say http.HandlerFunc) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.say, s.asked = say, nil
}

func (s *server) wantAsked(t *testing.T, want ...string) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if !slices.Equal(s.asked, want) {
		t.Errorf("asked\n%s\nwant\n%s", strings.Join(s.asked, "\n"), strings.Join(want, "\n"))
	}
}

// text answers with a status and a body.
func text(status int, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		io.WriteString(w, body)
	}
}

// refusal answers with a Status.
func refusal(code int, reason, details string) http.HandlerFunc {
	return text(code, fmt.Sprintf(`{"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "no", "code": %d, "reason": %q, "details": {%s}}`, code, reason, details))
}

const mapPath = "/api/v1/namespaces/ns/configmaps/nodes"

// A patch holds the version that was read and our key, and so nothing that could touch
// anything else.
func TestConfigMap(t *testing.T) {
	s := serve(t, refusal(404, "NotFound", ""))
	m := s.ConfigMap("ns", "nodes", "hosts")
	old, err := m.Load(t.Context())
	if err != nil || old != (Content{}) {
		t.Errorf("one that is not there is %+v, %v", old, err)
	}
	s.from(text(201, `{"metadata": {"resourceVersion": "7"}}`))
	now, err := m.Save(t.Context(), old, "a\n")
	if want := (Content{Text: "a\n", Version: "7"}); err != nil || now != want {
		t.Errorf("created: %+v, %v; want %+v", now, err, want)
	}
	s.wantAsked(t, `POST /api/v1/namespaces/ns/configmaps application/json {"metadata":{"name":"nodes","namespace":"ns"},"data":{"hosts":"a\n"}}`)

	s.from(text(200, `{"metadata": {"resourceVersion": "8"}, "data": {"hosts": "b\n", "theirs": "12345"}, "binaryData": {"raw": "AAEC"}}`))
	old, err = m.Load(t.Context())
	if want := (Content{Text: "b\n", Others: 8, Version: "8"}); err != nil || old != want {
		t.Errorf("read: %+v, %v; want %+v", old, err, want)
	}
	s.from(text(200, `{"metadata": {"resourceVersion": "9"}}`))
	now, err = m.Save(t.Context(), old, "")
	if want := (Content{Others: 8, Version: "9"}); err != nil || now != want {
		t.Errorf("written: %+v, %v; want %+v", now, err, want)
	}
	s.wantAsked(t, `PATCH `+mapPath+` application/merge-patch+json {"metadata":{"name":"nodes","namespace":"ns","resourceVersion":"8"},"data":{"hosts":""}}`)
}

// Why a request failed, what the operator reads, and that it is made once: whoever asked
// decides when to ask again.
func TestRefusals(t *testing.T) {
	for _, c := range []struct {
		what  string
		say   http.HandlerFunc
		want  Reason
		after time.Duration
		says  string
	}{
		{"changed", refusal(409, "Conflict", ""), Conflict, 0, "no"},
		{"created by somebody else", refusal(409, "AlreadyExists", ""), Conflict, 0, "no"},
		{"deleted", refusal(404, "NotFound", ""), Conflict, 0, "no"},
		{"no rights", refusal(403, "Forbidden", ""), Forbidden, 0, "deployment/cloud-rbac.yaml"},
		{"unknown", refusal(401, "Unauthorized", ""), Forbidden, 0, "is the service account or the kubeconfig up to date?"},
		{"too much to do", func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Retry-After", "1")
			refusal(429, "TooManyRequests", `"retryAfterSeconds": 1`)(w, r)
		}, Throttled, time.Second, "overloaded"},
		{"the object is too large", refusal(422, "Invalid", `"causes": [{"reason": "FieldValueTooLong"}]`), TooLarge, 0, "make room"},
		{"the request is too large", refusal(413, "RequestEntityTooLarge", ""), TooLarge, 0, "make room"},
		{"something else", refusal(422, "Invalid", `"causes": [{"reason": "FieldValueInvalid"}]`), Failed, 0, "no"},
		{"no JSON", text(200, "hello"), Failed, 0, "invalid character"},
		{"no answer", func(w http.ResponseWriter, _ *http.Request) { panic(http.ErrAbortHandler) }, Failed, 0, "EOF"},
	} {
		s := serve(t, c.say)
		_, err := s.ConfigMap("ns", "nodes", "hosts").Save(t.Context(), Content{Version: "1"}, "")
		if got := ReasonFor(err); got != c.want || RetryAfter(err) != c.after {
			t.Errorf("%s: %q after %v, want %q after %v", c.what, got, RetryAfter(err), c.want, c.after)
		}
		if err == nil || !strings.Contains(Explain(err).Error(), c.says) {
			t.Errorf("%s: %v, want %q in it", c.what, Explain(err), c.says)
		}
		s.mu.Lock()
		if len(s.asked) != 1 {
			t.Errorf("%s: asked %d times", c.what, len(s.asked))
		}
		s.mu.Unlock()
	}
}

// watched answers a list with items, then a watch with events until ctx is done.
func watched(ctx context.Context, t *testing.T, items []string, events <-chan string) http.HandlerFunc {
	return watchedList(ctx, t, `{"kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1", "metadata": {"resourceVersion": "1"}, "items": [`+strings.Join(items, ", ")+`]}`, events)
}

// watchedList is watched with a list of any kind.
func watchedList(ctx context.Context, t *testing.T, list string, events <-chan string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		switch q := r.URL.Query(); {
		case q.Get("sendInitialEvents") != "": // as an old API server
			refusal(422, "Invalid", "")(w, r)
		case q.Get("watch") == "":
			text(200, list)(w, r)
		default:
			w.WriteHeader(200)
			for {
				if err := http.NewResponseController(w).Flush(); err != nil {
					t.Error(err)
				}
				select {
				case e := <-events:
					io.WriteString(w, e+"\n")
				case <-r.Context().Done():
					return
				case <-ctx.Done():
					return
				}
			}
		}
	}
}

// partial is an object as far as it is watched.
func partial(name, version string) string {
	return fmt.Sprintf(`{"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": {"name": %q, "resourceVersion": %q}}`, name, version)
}

func event(kind, name, version string) string {
	return fmt.Sprintf(`{"type": %q, "object": %s}`, kind, partial(name, version))
}

func TestConfigMapFollow(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	events := make(chan string)
	s := serve(t, nil)
	s.from(func(w http.ResponseWriter, r *http.Request) {
		if got := r.URL.Query().Get("fieldSelector"); got != "metadata.name=nodes" {
			t.Errorf("all of %q are followed", got) // which the rights are not for
		}
		watched(ctx, t, []string{partial("nodes", "5")}, events)(w, r)
	})
	versions := make(chan string)
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.ConfigMap("ns", "nodes", "hosts").Follow(ctx, func(v string) { versions <- v }, func(error) {})
	}()
	if v := <-versions; v != "5" {
		t.Errorf("at first it is %q", v)
	}
	for _, c := range []struct{ kind, version, want string }{{"MODIFIED", "6", "6"}, {"DELETED", "7", ""}, {"ADDED", "8", "8"}} {
		events <- event(c.kind, "nodes", c.version)
		if v := <-versions; v != c.want {
			t.Errorf("%s %s is told as %q", c.kind, c.version, v)
		}
	}
	cancel()
	<-done
}

func TestNodes(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	events := make(chan string)
	s := serve(t, nil)
	s.from(func(w http.ResponseWriter, r *http.Request) {
		if got, want := r.URL.Query().Get("labelSelector"), "edge=,!node-role.kubernetes.io/control-plane,!node-role.kubernetes.io/master"; got != want {
			t.Errorf("asked for %q, want %q", got, want)
		}
		watched(ctx, t, []string{partial("edge1", "1"), partial("edge2", "1")}, events)(w, r)
	})
	if _, err := s.Nodes("a=b=c", slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), "label selector") {
		t.Errorf("a selector that is none: %v", err)
	}
	n, err := s.Nodes("edge=", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if may, known := n.May("edge1"); may || known {
		t.Error("known before anybody was asked")
	}
	changed := n.Changed()
	done := make(chan struct{})
	go func() {
		defer close(done)
		n.Run(ctx)
	}()
	want := func(names string) {
		t.Helper()
		select {
		case <-changed:
			changed = n.Changed()
		case <-time.After(10 * time.Second):
			t.Fatal("no change")
		}
		n.mu.RLock()
		defer n.mu.RUnlock()
		var got []string
		for name := range n.names {
			got = append(got, string(name))
		}
		slices.Sort(got)
		if strings.Join(got, " ") != names || !n.known {
			t.Errorf("names %q, known: %v; want %q", got, n.known, names)
		}
	}
	want("edge1 edge2")
	events <- event("MODIFIED", "edge1", "2") // its status: no change
	events <- event("ADDED", "edge3", "3")
	want("edge1 edge2 edge3")
	events <- event("DELETED", "edge1", "4")
	want("edge2 edge3")
	cancel()
	<-done
	if err := n.Err(); err != nil {
		t.Errorf("the end is an error: %v", err)
	}
}

// What stands in the way of reading the nodes is said, once, and no name is known.
func TestNodesForbidden(t *testing.T) {
	s := serve(t, refusal(403, "Forbidden", ""))
	var said transcript
	n, err := s.Nodes("", slog.New(slog.NewTextHandler(&said, nil)))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		n.Run(ctx)
	}()
	for tick := time.Tick(5 * time.Millisecond); n.Err() == nil; {
		<-tick
	}
	if _, known := n.May("edge1"); known || ReasonFor(n.Err()) != Forbidden {
		t.Errorf("known: %v, err: %v", known, n.Err())
	}
	cancel()
	<-done
	if got := said.String(); strings.Count(got, "\n") != 1 || !strings.Contains(got, "cloud-rbac.yaml") {
		t.Errorf("said %q", got)
	}
}

// Pods count whether they are ready or not, in all slices of both families.
func TestReplicas(t *testing.T) {
	var query string
	s := serve(t, nil)
	list, err := json.Marshal(map[string]any{"items": []any{
		map[string]any{"endpoints": []any{
			map[string]any{"addresses": []string{"10.0.0.1"}},
			map[string]any{"addresses": []string{"10.0.0.2"}, "conditions": map[string]any{"ready": false, "terminating": true}},
		}},
		map[string]any{"endpoints": []any{map[string]any{"addresses": []string{"fd00::1"}}}},
		map[string]any{"addressType": "FQDN", "endpoints": []any{map[string]any{"addresses": []string{"a.example.com"}}}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	s.from(func(w http.ResponseWriter, r *http.Request) {
		query = r.URL.RawQuery
		w.Write(list)
	})
	got, err := s.Replicas(t.Context(), "ns", "cloud")
	want := []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("fd00::1")}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v; want %v", got, err, want)
	}
	s.wantAsked(t, "GET /apis/discovery.k8s.io/v1/namespaces/ns/endpointslices")
	if query != "labelSelector=kubernetes.io%2Fservice-name%3Dcloud" {
		t.Errorf("asked for %s", query)
	}
}

// Where there is no API server, the error says what to set.
func TestNoCluster(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	if _, err := New("", "test"); err == nil || !strings.Contains(err.Error(), "KUBECONFIG") {
		t.Errorf("no pod: %v", err)
	}
	if _, err := New("/nonexistent", "test"); err == nil || !strings.Contains(err.Error(), "kubeconfig /nonexistent") {
		t.Errorf("no file: %v", err)
	}
}
