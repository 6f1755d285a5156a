package kube

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

// nodeJSON returns a Node that also has fields that this package does not use.
func nodeJSON(name, version, address, cidr string) string {
	return fmt.Sprintf(`{"kind": "Node", "apiVersion": "v1",
		"metadata": {"name": %q, "resourceVersion": %q, "labels": {"a": "b"}},
		"spec": {"podCIDR": %q, "podCIDRs": [%q, "nonsense"], "taints": [{"key": "k", "effect": "NoSchedule"}]},
		"status": {
			"capacity": {"cpu": "2"},
			"addresses": [{"type": "InternalIP", "address": %q}, {"type": "Hostname", "address": %q}],
			"images": [{"sizeBytes": 3}]
		}}`,
		name, version, cidr, cidr, address, name)
}

// nodeListJSON returns a list of one Node.
func nodeListJSON(node string) string {
	return `{"kind": "NodeList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": [` + node + `]}`
}

func TestReaches(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	events := make(chan string)
	s := serve(t, nil)
	s.setHandler(func(w http.ResponseWriter, r *http.Request) {
		listAndWatch(ctx, t, nodeListJSON(nodeJSON("edge1", "1", "10.0.0.1", "10.88.1.0/24")), events)(w, r)
	})
	r := s.Reaches(slog.New(slog.DiscardHandler))
	changed := r.Changed()
	if r.Known() || r.Ready() == nil {
		t.Error("the nodes are known before Run")
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.Run(ctx)
	}()
	want := func(why, text string) {
		t.Helper()
		select {
		case <-changed:
			changed = r.Changed()
		case <-time.After(10 * time.Second):
			t.Fatalf("%s: no change; %s", why, r.Note())
		}
		if got := fmt.Sprint(r.All()); got != text {
			t.Errorf("%s: %s, want %s", why, got, text)
		}
	}
	want("listed", "map[edge1:{[edge1 10.0.0.1] [10.88.1.0/24] []}]")
	kept := r.All()
	if err := r.Ready(); err != nil || !r.Known() {
		t.Errorf("the nodes are not known: %v", err)
	}
	events <- `{"type": "MODIFIED", "object": ` + nodeJSON("edge1", "2", "10.0.0.1", "10.88.1.0/24") + `}` // a heartbeat
	events <- `{"type": "ADDED", "object": ` + nodeJSON("edge2", "3", "10.0.0.2", "10.88.2.0/24") + `}`
	want("one more", "map[edge1:{[edge1 10.0.0.1] [10.88.1.0/24] []} edge2:{[edge2 10.0.0.2] [10.88.2.0/24] []}]")
	events <- `{"type": "MODIFIED", "object": ` + nodeJSON("edge1", "4", "10.0.0.9", "::ffff:10.88.1.0/120") + `}`
	want("another address", "map[edge1:{[edge1 10.0.0.9] [10.88.1.0/24] []} edge2:{[edge2 10.0.0.2] [10.88.2.0/24] []}]")
	events <- `{"type": "DELETED", "object": ` + nodeJSON("edge1", "5", "10.0.0.9", "10.88.1.0/24") + `}`
	const one = "edge2:{[edge2 10.0.0.2] [10.88.2.0/24] []}"
	want("one less", "map["+one+"]")
	// Nodes of the control plane are known, but no node reaches their pods.
	withLabel := func(node, label string) string { return strings.Replace(node, `"a"`, `"`+label+`"`, 1) }
	events <- `{"type": "ADDED", "object": ` +
		withLabel(nodeJSON("cp1", "6", "10.0.0.7", "10.88.7.0/24"), controlPlane) + `}`
	want("a machine of the control plane", "map[cp1:{[cp1 10.0.0.7] [] []} "+one+"]")
	events <- `{"type": "MODIFIED", "object": ` +
		withLabel(nodeJSON("cp1", "7", "10.0.0.8", "10.88.7.0/24"), oldControlPlane) + `}`
	want("an old label", "map[cp1:{[cp1 10.0.0.8] [] []} "+one+"]")
	if len(kept) != 1 || kept[tunnel.NodeName("edge1")].Hosts[1] != "10.0.0.1" {
		t.Errorf("a map that All returned earlier has changed: %v", kept)
	}
	cancel()
	<-done
	if n := r.Note(); n != "" {
		t.Errorf("the end is an error: %s", n)
	}
}

// If the nodes cannot be read, Reaches becomes ready all the same, and Note says why they are
// unknown.
func TestReachesCannotBeRead(t *testing.T) {
	s := serve(t, refusal(403, "Forbidden", ""))
	r := s.Reaches(slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.Run(ctx)
	}()
	for late := time.Now().Add(10 * time.Second); r.Ready() != nil; time.Sleep(time.Millisecond) {
		if time.Now().After(late) {
			t.Fatal(r.Ready())
		}
	}
	if r.Known() || r.Note() == "" {
		t.Errorf("the nodes are known (%v), or Note does not say why not: %q", r.Known(), r.Note())
	}
	cancel()
	<-done
}
