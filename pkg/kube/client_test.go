package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
)

// server is an API server whose answers the test sets. It records all requests.
type server struct {
	*Client
	mu       sync.Mutex // guards the following
	requests []string   // method and path, and for a change its content type and body
	handler  http.HandlerFunc
}

// serve starts a server, and creates a Client for it.
func serve(t *testing.T, handler http.HandlerFunc) *server {
	t.Helper()
	s := &server{handler: handler}
	h := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		line := r.Method + " " + r.URL.Path
		if body, _ := io.ReadAll(r.Body); len(body) > 0 {
			line += " " + r.Header.Get("Content-Type") + " " + string(body)
		}
		s.mu.Lock()
		s.requests = append(s.requests, line)
		handler := s.handler
		s.mu.Unlock()
		w.Header().Set("Content-Type", "application/json")
		handler(w, r)
	}))
	t.Cleanup(h.Close)
	c, err := New(testkit.Kubeconfig(t, h.URL), "test")
	if err != nil {
		t.Fatal(err)
	}
	s.Client = c
	return s
}

// setHandler replaces the answers and forgets the recorded requests.
func (s *server) setHandler(handler http.HandlerFunc) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.handler, s.requests = handler, nil
}

// wantRequests checks all requests since the last call of setHandler.
func (s *server) wantRequests(t *testing.T, want ...string) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if !slices.Equal(s.requests, want) {
		t.Errorf("the requests are\n%s\nwant\n%s", strings.Join(s.requests, "\n"), strings.Join(want, "\n"))
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
	return text(code, fmt.Sprintf(`{"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "no",
		"code": %d, "reason": %q, "details": {%s}}`, code, reason, details))
}

const mapPath = "/api/v1/namespaces/ns/configmaps/nodes"

// A patch holds only the version that was read and our key, so it cannot change other keys.
func TestConfigMap(t *testing.T) {
	s := serve(t, refusal(404, "NotFound", ""))
	m := s.ConfigMap("ns", "nodes", "hosts")
	old, err := m.Load(t.Context())
	if err != nil || old != (Content{}) {
		t.Errorf("one that is not there is %+v, %v", old, err)
	}
	s.setHandler(text(201, `{"metadata": {"resourceVersion": "7"}}`))
	now, err := m.Save(t.Context(), old, "a\n")
	if want := (Content{Text: "a\n", Version: "7"}); err != nil || now != want {
		t.Errorf("created: %+v, %v; want %+v", now, err, want)
	}
	s.wantRequests(t, `POST /api/v1/namespaces/ns/configmaps application/json `+
		`{"metadata":{"name":"nodes","namespace":"ns"},"data":{"hosts":"a\n"}}`)

	s.setHandler(text(200, `{"metadata": {"resourceVersion": "8"}, "data": {"hosts": "b\n", "theirs": "12345"},
		"binaryData": {"raw": "AAEC"}}`))
	old, err = m.Load(t.Context())
	if want := (Content{Text: "b\n", Others: 8, Version: "8"}); err != nil || old != want {
		t.Errorf("read: %+v, %v; want %+v", old, err, want)
	}
	s.setHandler(text(200, `{"metadata": {"resourceVersion": "9"}}`))
	now, err = m.Save(t.Context(), old, "")
	if want := (Content{Others: 8, Version: "9"}); err != nil || now != want {
		t.Errorf("written: %+v, %v; want %+v", now, err, want)
	}
	s.wantRequests(t, `PATCH `+mapPath+` application/merge-patch+json `+
		`{"metadata":{"name":"nodes","namespace":"ns","resourceVersion":"8"},"data":{"hosts":""}}`)
}

// A binary key is one of binaryData.
func TestBinaryConfigMap(t *testing.T) {
	s := serve(t, text(200, `{"metadata": {"resourceVersion": "8"}, "data": {"theirs": "12345"},
		"binaryData": {"raw": "AP8=", "other": "AAEC"}}`))
	m := s.BinaryConfigMap("ns", "nodes", "raw")
	old, err := m.Load(t.Context())
	if want := (Content{Text: "\x00\xff", Others: 8, Version: "8"}); err != nil || old != want {
		t.Errorf("read: %+v, %v; want %+v", old, err, want)
	}
	s.setHandler(text(200, `{"metadata": {"resourceVersion": "9"}}`))
	if now, err := m.Save(t.Context(), old, "\xfe"); err != nil || now.Text != "\xfe" || now.Version != "9" {
		t.Errorf("written: %+v, %v", now, err)
	}
	s.wantRequests(t, `PATCH `+mapPath+` application/merge-patch+json `+
		`{"metadata":{"name":"nodes","namespace":"ns","resourceVersion":"8"},"binaryData":{"raw":"/g=="}}`)
}

// A failed request has a reason, and a text for the operator. It is sent only once: the caller
// decides when to try again.
func TestRefusals(t *testing.T) {
	for _, c := range []struct {
		what    string
		handler http.HandlerFunc
		want    Reason
		after   time.Duration
		says    string
	}{
		{"changed", refusal(409, "Conflict", ""), Conflict, 0, "no"},
		{"created by somebody else", refusal(409, "AlreadyExists", ""), Conflict, 0, "no"},
		{"deleted", refusal(404, "NotFound", ""), Conflict, 0, "no"},
		{"no rights", refusal(403, "Forbidden", ""), Forbidden, 0, "deployment/cloud-rbac.yaml"},
		{"credential not accepted", refusal(401, "Unauthorized", ""), Forbidden, 0,
			"is the service account or the kubeconfig up to date?"},
		{"too many requests", func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Retry-After", "1")
			refusal(429, "TooManyRequests", `"retryAfterSeconds": 1`)(w, r)
		}, Throttled, time.Second, "overloaded"},
		{"the object is too large", refusal(422, "Invalid", `"causes": [{"reason": "FieldValueTooLong"}]`), TooLarge, 0,
			"make room"},
		{"the request is too large", refusal(413, "RequestEntityTooLarge", ""), TooLarge, 0, "make room"},
		{"another failure", refusal(422, "Invalid", `"causes": [{"reason": "FieldValueInvalid"}]`), Failed, 0, "no"},
		{"no JSON", text(200, "hello"), Failed, 0, "invalid character"},
		{"no answer", func(w http.ResponseWriter, _ *http.Request) { panic(http.ErrAbortHandler) }, Failed, 0, "EOF"},
	} {
		s := serve(t, c.handler)
		_, err := s.ConfigMap("ns", "nodes", "hosts").Save(t.Context(), Content{Version: "1"}, "")
		if got := ReasonFor(err); got != c.want || RetryAfter(err) != c.after {
			t.Errorf("%s: %q after %v, want %q after %v", c.what, got, RetryAfter(err), c.want, c.after)
		}
		if err == nil || !strings.Contains(Explain(err).Error(), c.says) {
			t.Errorf("%s: %v, want %q in it", c.what, Explain(err), c.says)
		}
		s.mu.Lock()
		if len(s.requests) != 1 {
			t.Errorf("%s: %d requests were sent, want 1", c.what, len(s.requests))
		}
		s.mu.Unlock()
	}
}

// listAndWatchMetadata answers a list request with items, then a watch with events until ctx is
// done.
func listAndWatchMetadata(ctx context.Context, t *testing.T, items []string, events <-chan string) http.HandlerFunc {
	return listAndWatch(ctx, t, `{"kind": "PartialObjectMetadataList", "apiVersion": "meta.k8s.io/v1",
		"metadata": {"resourceVersion": "1"}, "items": [`+strings.Join(items, ", ")+`]}`, events)
}

// listAndWatch is listAndWatchMetadata for a list of any kind.
func listAndWatch(ctx context.Context, t *testing.T, list string, events <-chan string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		switch q := r.URL.Query(); {
		case q.Get("sendInitialEvents") != "": // an old API server does not support it
			refusal(422, "Invalid", "")(w, r)
		case q.Get("watch") == "":
			text(200, list)(w, r)
		default:
			w.WriteHeader(200)
			for {
				if err := http.NewResponseController(w).Flush(); err != nil {
					if ctx.Err() == nil && r.Context().Err() == nil { // else the client has left
						t.Error(err)
					}
					return
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

// metadataJSON returns the metadata of an object.
func metadataJSON(name, version string) string {
	return fmt.Sprintf(`{"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", `+
		`"metadata": {"name": %q, "resourceVersion": %q}}`, name, version)
}

// event returns a watch event.
func event(kind, name, version string) string {
	return fmt.Sprintf(`{"type": %q, "object": %s}`, kind, metadataJSON(name, version))
}

func TestConfigMapFollow(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	events := make(chan string)
	s := serve(t, nil)
	s.setHandler(func(w http.ResponseWriter, r *http.Request) {
		if got := r.URL.Query().Get("fieldSelector"); got != "metadata.name=nodes" {
			t.Errorf("the field selector is %q", got) // our rights cover only this one ConfigMap
		}
		listAndWatchMetadata(ctx, t, []string{metadataJSON("nodes", "5")}, events)(w, r)
	})
	versions := make(chan string)
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.ConfigMap("ns", "nodes", "hosts").Follow(ctx, func(v string) { versions <- v }, func(error) {})
	}()
	if v := <-versions; v != "5" {
		t.Errorf("the first version is %q", v)
	}
	for _, c := range []struct{ kind, version, want string }{
		{"MODIFIED", "6", "6"}, {"DELETED", "7", ""}, {"ADDED", "8", "8"},
	} {
		events <- event(c.kind, "nodes", c.version)
		if v := <-versions; v != c.want {
			t.Errorf("%s %s is reported as %q", c.kind, c.version, v)
		}
	}
	cancel()
	<-done
}

func TestNodes(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	events := make(chan string)
	s := serve(t, nil)
	s.setHandler(func(w http.ResponseWriter, r *http.Request) {
		const want = "edge=,!node-role.kubernetes.io/control-plane,!node-role.kubernetes.io/master"
		if got := r.URL.Query().Get("labelSelector"); got != want {
			t.Errorf("the label selector is %q, want %q", got, want)
		}
		listAndWatchMetadata(ctx, t, []string{metadataJSON("edge1", "1"), metadataJSON("edge2", "1")}, events)(w, r)
	})
	_, err := s.Nodes("a=b=c", slog.New(slog.DiscardHandler))
	if err == nil || !strings.Contains(err.Error(), "label selector") {
		t.Errorf("a selector that is not valid: %v", err)
	}
	n, err := s.Nodes("edge=", slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if may, known := n.May("edge1"); may || known {
		t.Error("known before Run")
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
		all, known := n.Names()
		var got []string
		for _, name := range all {
			got = append(got, string(name))
		}
		slices.Sort(got)
		if strings.Join(got, " ") != names || !known {
			t.Errorf("names %q, known: %v; want %q", got, known, names)
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

// If the nodes cannot be read, the log says why, once, and no name is known.
func TestNodesForbidden(t *testing.T) {
	s := serve(t, refusal(403, "Forbidden", ""))
	var log testkit.Log
	n, err := s.Nodes("", slog.New(slog.NewTextHandler(&log, nil)))
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
	if got := log.String(); strings.Count(got, "\n") != 1 || !strings.Contains(got, "cloud-rbac.yaml") {
		t.Errorf("logged %q", got)
	}
}

// Replicas returns all pods, ready or not, of all slices and of both address families.
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
	s.setHandler(func(w http.ResponseWriter, r *http.Request) {
		query = r.URL.RawQuery
		w.Write(list)
	})
	got, err := s.Replicas(t.Context(), "ns", "cloud")
	want := []netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("fd00::1")}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v; want %v", got, err, want)
	}
	s.wantRequests(t, "GET /apis/discovery.k8s.io/v1/namespaces/ns/endpointslices")
	if query != "labelSelector=kubernetes.io%2Fservice-name%3Dcloud" {
		t.Errorf("the query is %s", query)
	}
}

// Without a configured API server, the error says what to set.
func TestNoCluster(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	if _, err := New("", "test"); err == nil || !strings.Contains(err.Error(), "KUBECONFIG") {
		t.Errorf("no pod: %v", err)
	}
	if _, err := New("/nonexistent", "test"); err == nil || !strings.Contains(err.Error(), "kubeconfig /nonexistent") {
		t.Errorf("no file: %v", err)
	}
}

// A replica that starts is not ready before it has read the names. If Kubernetes does not answer, it is ready after
// namesAnyway.
func TestNodesReady(t *testing.T) {
	for name, test := range map[string]struct {
		nodes *Nodes
		ready bool
	}{
		"before Run": {&Nodes{}, false},
		"not read":   {&Nodes{began: time.Now()}, false},
		"read":       {&Nodes{began: time.Now(), known: true}, true},
		"failed":     {&Nodes{began: time.Now(), err: errors.New("forbidden")}, true},
		"no answer":  {&Nodes{began: time.Now().Add(-namesAnyway)}, true},
	} {
		if err := test.nodes.Ready(); (err == nil) != test.ready {
			t.Errorf("%s: %v", name, err)
		}
	}
}
