// Package hub is the cloud's part of Services: it keeps the items of the cluster, sends them to edges, and decides what
// edges may reach.
//
//	h := hub.New(hub.Config{Log: log})
//	h.Set(services.ServicePath("shop", "web"), value) // for each object of the cluster, and for each change
//	h.Synced()                                        // once all objects are known
//	err := h.Watch("edge1", stream)                   // serves one edge
//	request, refusal := h.Target("edge1", "endpoint/shop/web/web-x7/10.88.2.5 TCP 8080")
//	found, err := h.Endpoints("web.shop.svc.cluster.local", 80) // for callers in the cluster
//
// All nodes get the same items, so each change is encoded once for all of them. Each change has a number, and a Watch
// is little more than the number up to which its edge is current. An edge that was away sends the digests of its
// items, and gets the buckets that differ. So the hub keeps no history for an absent edge, and any replica can answer.
//
// The hub dials nothing.
package hub

import (
	"bytes"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"google.golang.org/protobuf/encoding/protowire"

	"tunnel.example/tunnel/pkg/services"
	"tunnel.example/tunnel/pkg/tunnel"
)

// Config is what a Hub needs to know.
type Config struct {
	// Cluster says that edges may reach endpoints that are not on edge nodes: the cloud dials them. Endpoints on edge
	// nodes may always be reached.
	Cluster bool
	// Serves reports whether a node has a session with any replica, and its edge serves Services. nil: none does.
	Serves func(tunnel.NodeName) bool
	// AwaitNodes makes the hub serve edges only after both Synced and NodesKnown. Without it, Synced is enough.
	AwaitNodes bool
	// Domain is the cluster's domain, such as "cluster.local", for Endpoints. Empty: Endpoints finds nothing.
	Domain string
	Log    *slog.Logger
}

// Hub keeps the items, and serves them. Any goroutine may call any method.
type Hub struct {
	// Set once.
	cfg     Config
	log     *slog.Logger
	denials tunnel.Limiter // of log lines about targets that are denied

	sent atomic.Uint64 // bytes of batches

	deflating sync.Mutex // guards deflater
	deflater  deflater

	mu      sync.Mutex // guards the following
	buckets [services.Buckets]map[services.Path]*change
	digests services.Digests
	items   int
	// joined are the Nodes whose edges serve Services, also those that are away. Before all objects are known, it may
	// have names of no Node.
	joined map[tunnel.NodeName]bool
	index  *index // for Endpoints; nil: not kept
	synced bool   // all objects are known
	named  bool   // NodesKnown was called, or is not awaited
	ready  bool   // both: edges are served

	// changes are the last change of each path, and those that are superseded and not yet removed, by seq.
	changes    []*change
	superseded int
	deleted    map[services.Path]*change // the changes that are deletions
	seq        uint64                    // of the last change
	// floor is the seq of the last deletion that is forgotten: an edge that has not got it needs whole buckets.
	floor    uint64
	changed  tunnel.Change // of seq
	served   chan struct{} // closed when ready becomes true; nothing is sent
	watchers map[tunnel.NodeName]*watcher
	cache    cache
}

// change is the newest state of a path. It does not change, but for superseded.
type change struct {
	seq        uint64
	path       services.Path
	value      []byte // nil: deleted
	superseded bool   // guarded by Hub.mu: there is a newer change of the path
}

// New returns a Hub without items.
func New(cfg Config) *Hub {
	h := &Hub{
		cfg: cfg, log: cfg.Log.With("module", Category), joined: make(map[tunnel.NodeName]bool),
		named: !cfg.AwaitNodes, served: make(chan struct{}),
		deleted: make(map[services.Path]*change), watchers: make(map[tunnel.NodeName]*watcher),
	}
	if cfg.Domain != "" {
		h.index = newIndex()
	}
	for b := range h.buckets {
		h.buckets[b] = make(map[services.Path]*change)
	}
	return h
}

// Set adds or changes an item. value is a Service, an Endpoint or a Node of package services, as protobuf, encoded
// deterministically, without the fields Endpoint.cluster and Node.edge, and of services.MaxValue bytes at most. Set
// keeps it. A value that is already there is no change.
func (h *Hub) Set(p services.Path, value []byte) {
	node, isNode := nodeOf(p)
	serves := isNode && h.serves(node)
	h.set(p, value, serves)
	if isNode && !serves && h.serves(node) {
		h.Joined(node) // the edge has come meanwhile; its Joined may have found no item
	}
}

// set is Set. serves: p is the path of a node whose edge serves Services.
func (h *Hub) set(p services.Path, value []byte, serves bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	node, isNode := nodeOf(p)
	if serves {
		h.joined[node] = true
	}
	switch {
	case isNode && h.joined[node]:
		value = withTrue(value, fieldNodeEdge)
	case h.cfg.Cluster && services.ServiceOf(p) != "":
		value = withTrue(value, fieldEndpointCluster)
	}
	h.setLocked(p, value)
}

// serves reports whether a node is connected, and its edge serves Services.
func (h *Hub) serves(node tunnel.NodeName) bool { return h.cfg.Serves != nil && h.cfg.Serves(node) }

// nodeOf returns the name of the Node that p is the path of.
func nodeOf(p services.Path) (tunnel.NodeName, bool) {
	name, ok := strings.CutPrefix(p, services.NodePath(""))
	return tunnel.NodeName(name), ok
}

// The fields that the hub sets in values. They are the last ones of their messages, so that appending them gives the
// deterministic encoding.
const (
	fieldNodeEdge        protowire.Number = 4
	fieldEndpointCluster protowire.Number = 11
)

// withTrue returns the message in value with a bool field set.
func withTrue(value []byte, field protowire.Number) []byte {
	set := make([]byte, 0, len(value)+2)
	set = append(set, value...)
	return protowire.AppendVarint(protowire.AppendTag(set, field, protowire.VarintType), 1)
}

// setLocked is Set for a complete value. The caller holds mu.
func (h *Hub) setLocked(p services.Path, value []byte) {
	old := h.itemLocked(p)
	if old != nil {
		if bytes.Equal(old.value, value) {
			return
		}
		h.digests.Flip(p, old.value)
		h.supersedeLocked(old)
	} else {
		h.items++
		if gone := h.deleted[p]; gone != nil {
			delete(h.deleted, p)
			h.supersedeLocked(gone)
		}
	}
	if value == nil {
		value = []byte{} // a message without fields is no deletion
	}
	h.digests.Flip(p, value)
	h.index.set(p, value)
	h.buckets[services.Bucket(p)][p] = h.appendLocked(p, value)
}

// itemLocked returns the newest change of an item, or nil if there is no such item. The caller holds mu.
func (h *Hub) itemLocked(p services.Path) *change { return h.buckets[services.Bucket(p)][p] }

// Delete removes an item, if there is one.
func (h *Hub) Delete(p services.Path) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if node, ok := nodeOf(p); ok {
		delete(h.joined, node)
	}
	old := h.itemLocked(p)
	if old == nil {
		return
	}
	delete(h.buckets[services.Bucket(p)], p)
	h.index.forget(p)
	h.items--
	h.digests.Flip(p, old.value)
	h.supersedeLocked(old)
	h.deleted[p] = h.appendLocked(p, nil)
	// With more deletions than items, whole buckets are no larger than the changes.
	if len(h.deleted) > h.items+maxDeleted {
		h.forgetLocked()
	}
}

// maxDeleted is how many more deletions than items the hub remembers.
const maxDeleted = 4096

// appendLocked appends a change, and wakes the watchers. The caller holds mu.
func (h *Hub) appendLocked(p services.Path, value []byte) *change {
	h.seq++
	c := &change{seq: h.seq, path: p, value: value}
	h.changes = append(h.changes, c)
	h.changed.Notify()
	return c
}

// supersedeLocked marks a change as superseded, and removes all such changes once they are half of all. The caller
// holds mu.
func (h *Hub) supersedeLocked(c *change) {
	c.superseded = true
	if h.superseded++; 2*h.superseded > len(h.changes) {
		h.compactLocked()
	}
}

// compactLocked removes superseded changes. The caller holds mu.
func (h *Hub) compactLocked() {
	kept := h.changes[:0]
	for _, c := range h.changes {
		if !c.superseded {
			kept = append(kept, c)
		}
	}
	clear(h.changes[len(kept):])
	h.changes, h.superseded = kept, 0
}

// forgetLocked forgets the deletions that all watchers have got, and the older half of all: watchers that lack one of
// them have to begin again. The caller holds mu.
func (h *Hub) forgetLocked() {
	seqs := make([]uint64, 0, len(h.deleted))
	for _, c := range h.deleted {
		seqs = append(seqs, c.seq)
	}
	slices.Sort(seqs)
	floor := h.seq
	for _, w := range h.watchers {
		floor = min(floor, w.cursor)
	}
	h.floor = max(h.floor, floor, seqs[len(seqs)/2])
	for p, c := range h.deleted {
		if c.seq <= h.floor {
			c.superseded = true
			delete(h.deleted, p)
		}
	}
	h.compactLocked()
}

// Synced says that all objects of the cluster have been set. The hub serves no edge before Synced: the edge would
// delete every item that the hub does not have yet.
func (h *Hub) Synced() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.synced = true
	for node := range h.joined {
		if h.itemLocked(services.NodePath(string(node))) == nil {
			delete(h.joined, node)
		}
	}
	h.readyLocked()
}

// NodesKnown says that Joined was called for all nodes that the cloud remembers. With Config.AwaitNodes, no edge is
// served until then: after a restart of the cloud, edges would take out the redirects to nodes that have not come back.
func (h *Hub) NodesKnown() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.named = true
	h.readyLocked()
}

// readyLocked serves edges if that may begin now. The caller holds mu.
func (h *Hub) readyLocked() {
	if h.synced && h.named && !h.ready {
		h.ready = true
		close(h.served)
	}
}

// Joined says that the edge of a node serves Services: endpoints on the node can be reached through it. The hub forgets
// that when the node has Left, or when the Node is deleted.
func (h *Hub) Joined(node tunnel.NodeName) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.joined[node] {
		return
	}
	p := services.NodePath(string(node))
	item := h.itemLocked(p)
	if item == nil && h.synced {
		return // Set asks Serves if there is a Node later
	}
	h.joined[node] = true
	if item != nil {
		h.setLocked(p, withTrue(item.value, fieldNodeEdge))
	}
}

// Left undoes Joined: the edge of a node no longer serves Services.
func (h *Hub) Left(node tunnel.NodeName) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.joined[node] {
		return
	}
	delete(h.joined, node)
	p := services.NodePath(string(node))
	if item := h.itemLocked(p); item != nil {
		h.setLocked(p, bytes.TrimSuffix(item.value, withTrue(nil, fieldNodeEdge)))
	}
}
