package mirror

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/labels"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/kube"
	"tunnel.example/tunnel/pkg/tunnel"
)

// apiServer is an API server that keeps its objects in memory. It deletes an object whose owner has gone.
type apiServer struct {
	t   *testing.T
	url string

	mu      sync.Mutex // guards the following
	objects map[string]*stored
	events  []apiEvent
	version int
	changed tunnel.Change
	deny    bool // changes are refused: 403
	late    bool // watches of EndpointSlices show nothing more
	writes  []string
	closed  bool
}

// stored is an object. It does not change: a change replaces it.
type stored struct {
	resource, namespace, name string
	version                   int
	fields                    map[string]any
}

// apiEvent is a change of an object; before or now is nil.
type apiEvent struct {
	version     int
	before, now *stored
}

func newAPIServer(t *testing.T) *apiServer {
	t.Helper()
	a := &apiServer{t: t, objects: make(map[string]*stored), version: 1}
	server := httptest.NewServer(a)
	a.url = server.URL
	t.Cleanup(func() {
		a.mu.Lock()
		a.closed = true
		a.changed.Notify()
		a.mu.Unlock()
		server.Close()
	})
	return a
}

// client returns a new client of the server.
func (a *apiServer) client() *kube.Client {
	a.t.Helper()
	c, err := kube.New(testkit.Kubeconfig(a.t, a.url), "test")
	if err != nil {
		a.t.Fatal(err)
	}
	return c
}

// parse returns the parts of a path: /api/v1/[namespaces/NS/]RESOURCE[/NAME], or /apis/GROUP/v1/… .
func parse(path string) (resource, namespace, name string) {
	parts := strings.Split(strings.Trim(path, "/"), "/")
	parts = parts[slices.Index(parts, "v1")+1:]
	if len(parts) > 2 && parts[0] == "namespaces" {
		namespace, parts = parts[1], parts[2:]
	}
	return parts[0], namespace, strings.Join(parts[1:], "/")
}

func (s *stored) matches(resource, namespace, selector string) bool {
	if s == nil || s.resource != resource || namespace != "" && s.namespace != namespace {
		return false
	}
	parsed, err := labels.Parse(selector)
	if err != nil {
		panic(err)
	}
	set := make(labels.Set)
	for k, v := range s.metadata("labels") {
		set[k] = fmt.Sprint(v)
	}
	return parsed.Matches(set)
}

func (s *stored) metadata(field string) map[string]any {
	m, _ := s.fields["metadata"].(map[string]any)[field].(map[string]any)
	return m
}

func (s *stored) text(field string) string {
	return fmt.Sprint(s.fields["metadata"].(map[string]any)[field])
}

// ServeHTTP implements http.Handler.
func (a *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	resource, namespace, name := parse(r.URL.Path)
	q := r.URL.Query()
	w.Header().Set("Content-Type", "application/json")
	body, _ := io.ReadAll(r.Body)
	a.mu.Lock()
	defer a.mu.Unlock()
	key := resource + "/" + namespace + "/" + name
	old := a.objects[key]
	if r.Method != http.MethodGet && a.deny {
		refuse(w, http.StatusForbidden, "Forbidden")
		return
	}
	done := func() { a.writes = append(a.writes, r.Method+" "+r.URL.Path) }
	switch {
	case q.Get("sendInitialEvents") != "": // an old API server does not support it
		refuse(w, http.StatusUnprocessableEntity, "Invalid")
	case r.Method == http.MethodGet && q.Get("watch") != "":
		a.watch(w, r, resource, namespace)
	case r.Method == http.MethodGet && name == "":
		list := map[string]any{
			"kind": kinds[resource] + "List", "apiVersion": apiVersions[resource],
			"metadata": map[string]any{"resourceVersion": fmt.Sprint(a.version)}, "items": []any{},
		}
		for _, o := range a.objects {
			if o.matches(resource, namespace, q.Get("labelSelector")) {
				list["items"] = append(list["items"].([]any), o.fields)
			}
		}
		json.NewEncoder(w).Encode(list)
	case r.Method == http.MethodPost:
		var fields map[string]any
		json.Unmarshal(body, &fields)
		name, _ = fields["metadata"].(map[string]any)["name"].(string)
		if a.objects[resource+"/"+namespace+"/"+name] != nil {
			refuse(w, http.StatusConflict, "AlreadyExists")
			return
		}
		done()
		w.WriteHeader(http.StatusCreated)
		json.NewEncoder(w).Encode(a.putLocked(resource, namespace, name, fields).fields)
	case old == nil:
		refuse(w, http.StatusNotFound, "NotFound")
	case r.Method == http.MethodGet:
		json.NewEncoder(w).Encode(old.fields)
	case r.Method == http.MethodPatch:
		var patch map[string]any
		json.Unmarshal(body, &patch)
		if patch["metadata"].(map[string]any)["resourceVersion"] != old.text("resourceVersion") {
			refuse(w, http.StatusConflict, "Conflict")
			return
		}
		done()
		json.NewEncoder(w).Encode(a.putLocked(resource, namespace, name, merge(old.fields, patch).(map[string]any)).fields)
	case r.Method == http.MethodDelete:
		var options struct {
			Preconditions struct{ ResourceVersion string }
		}
		json.Unmarshal(body, &options)
		if options.Preconditions.ResourceVersion != old.text("resourceVersion") {
			refuse(w, http.StatusConflict, "Conflict")
			return
		}
		done()
		a.deleteLocked(key)
		io.WriteString(w, "{}")
	}
}

var (
	kinds       = map[string]string{"services": "Service", "endpointslices": "EndpointSlice", "nodes": "Node"}
	apiVersions = map[string]string{"services": "v1", "endpointslices": "discovery.k8s.io/v1", "nodes": "v1"}
)

func refuse(w http.ResponseWriter, code int, reason string) {
	w.WriteHeader(code)
	fmt.Fprintf(w, `{"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "no", "code": %d,
		"reason": %q}`, code, reason)
}

// merge applies a merge patch (RFC 7386), and returns a new value.
func merge(old, patch any) any {
	p, ok := patch.(map[string]any)
	if !ok {
		return patch
	}
	merged := make(map[string]any)
	if o, ok := old.(map[string]any); ok {
		for k, v := range o {
			merged[k] = v
		}
	}
	for k, v := range p {
		if v == nil {
			delete(merged, k)
		} else {
			merged[k] = merge(merged[k], v)
		}
	}
	return merged
}

// putLocked stores an object.
func (a *apiServer) putLocked(resource, namespace, name string, fields map[string]any) *stored {
	key := resource + "/" + namespace + "/" + name
	before := a.objects[key]
	a.version++
	metadata := merge(fields["metadata"], map[string]any{
		"name": name, "namespace": namespace, "resourceVersion": fmt.Sprint(a.version),
	}).(map[string]any)
	if before == nil {
		metadata["uid"] = fmt.Sprintf("uid-%d", a.version)
		metadata["creationTimestamp"] = time.Unix(int64(a.version), 0).UTC().Format(time.RFC3339)
	}
	now := &stored{resource, namespace, name, a.version, merge(fields, map[string]any{
		"kind": kinds[resource], "apiVersion": apiVersions[resource], "metadata": metadata,
	}).(map[string]any)}
	a.objects[key] = now
	a.events = append(a.events, apiEvent{a.version, before, now})
	a.changed.Notify()
	return now
}

// deleteLocked deletes an object, and the objects that it owns.
func (a *apiServer) deleteLocked(key string) {
	gone := a.objects[key]
	delete(a.objects, key)
	a.version++
	a.events = append(a.events, apiEvent{a.version, gone, nil})
	a.changed.Notify()
	for k, o := range a.objects {
		owners, _ := o.fields["metadata"].(map[string]any)["ownerReferences"].([]any)
		if len(owners) > 0 && owners[0].(map[string]any)["uid"] == gone.text("uid") {
			a.deleteLocked(k)
		}
	}
}

// watch sends events until the client leaves. The caller holds mu.
func (a *apiServer) watch(w http.ResponseWriter, r *http.Request, resource, namespace string) {
	var since int
	fmt.Sscan(r.URL.Query().Get("resourceVersion"), &since)
	selector := r.URL.Query().Get("labelSelector")
	for !a.closed && r.Context().Err() == nil {
		for _, e := range a.events {
			if e.version <= since || a.late && resource == "endpointslices" {
				continue
			}
			since = e.version
			was, is := e.before.matches(resource, namespace, selector), e.now.matches(resource, namespace, selector)
			kind, o := "MODIFIED", e.now
			switch {
			case was && !is:
				kind, o = "DELETED", e.before
			case is && !was:
				kind = "ADDED"
			case !is:
				continue
			}
			json.NewEncoder(w).Encode(map[string]any{"type": kind, "object": o.fields})
		}
		http.NewResponseController(w).Flush()
		changed := a.changed.Next()
		a.mu.Unlock()
		select {
		case <-changed:
		case <-r.Context().Done():
		}
		a.mu.Lock()
	}
}

// put creates or changes an object that a user has written as JSON.
func (a *apiServer) put(resource, namespace, name, text string) {
	a.t.Helper()
	var fields map[string]any
	if err := json.Unmarshal([]byte(text), &fields); err != nil {
		a.t.Fatal(err)
	}
	if fields["metadata"] == nil {
		fields["metadata"] = map[string]any{}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if old := a.objects[resource+"/"+namespace+"/"+name]; old != nil {
		for _, field := range []string{"uid", "creationTimestamp"} {
			fields["metadata"].(map[string]any)[field] = old.text(field)
		}
	}
	a.putLocked(resource, namespace, name, fields)
}

// remove deletes an object, as a user does.
func (a *apiServer) remove(resource, namespace, name string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.deleteLocked(resource + "/" + namespace + "/" + name)
}

// get decodes an object into out, and reports whether it exists.
func (a *apiServer) get(resource, namespace, name string, out any) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	o := a.objects[resource+"/"+namespace+"/"+name]
	if o == nil {
		return false
	}
	text, err := json.Marshal(o.fields)
	if err == nil {
		err = json.Unmarshal(text, out)
	}
	if err != nil {
		a.t.Error(err)
	}
	return true
}

// written returns the changes by clients since the last call.
func (a *apiServer) written() (all []string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	all, a.writes = a.writes, nil
	return all
}
