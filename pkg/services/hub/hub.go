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
// Nearly all items are for all nodes, so the hub encodes each change of such an item once for all nodes. Each of these
// changes has a number. For each Watch, the hub keeps the number of the last change that the edge has got. An edge that
// was away sends the digests of its items, and gets the buckets that differ. So the hub keeps no history for an absent
// edge, and any replica can answer.
//
// Of some Services, a node needs only a few endpoints, such as those in its own zone (services.View). The hub keeps the
// endpoints of these Services apart, and compares for each Watch what the edge has with what it needs.
//
// The hub dials nothing.
package hub

import (
	"bytes"
	"cmp"
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
	// Cluster says that edges may reach endpoints that are not on edge nodes: the cloud dials such endpoints. Endpoints on
	// edge nodes may always be reached.
	Cluster bool
	// Serves reports whether a node has a session with any replica, and the node's edge serves Services. nil: no node
	// does.
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
	denials tunnel.Limiter // limits log lines about targets that are denied

	sent atomic.Uint64 // bytes of the batches that were sent, compressed

	deflating sync.Mutex // guards deflater
	deflater  deflater

	mu      sync.Mutex // guards the following
	buckets [services.Buckets]map[services.Path]*change
	digests services.Digests
	items   int
	// joined are the nodes whose edges serve Services, connected or not. Until all objects are known, joined may also have
	// nodes without a Node.
	joined    map[tunnel.NodeName]bool
	index     *index                     // for Endpoints; nil: not kept
	groups    map[services.Path]*group   // the endpoints of each Service that has any
	apart     map[services.Path]*apart   // the Services of which some nodes need only some endpoints
	unsettled map[services.Path]struct{} // the Services that settleLocked must look at
	// paused are the Services that have left apart within widePause. pauses has them, the oldest first.
	paused map[services.Path]struct{}
	pauses []pause
	synced bool // all objects are known
	named  bool // NodesKnown was called, or is not awaited
	ready  bool // synced and named: edges are served

	// changes are the newest change of each path, and superseded changes that are not removed yet, sorted by seq.
	changes    []*change
	superseded int
	// deleted are the newest changes of paths that were deleted, or are no longer for all nodes.
	deleted map[services.Path]*change
	seq     uint64 // of the last change
	// floor: the hub has forgotten the deletions up to this seq. An edge that is at an earlier seq needs whole buckets.
	floor    uint64
	changed  tunnel.Change // tells the goroutines of Watch that something has changed
	served   chan struct{} // closed when ready becomes true; nothing is sent
	stopped  chan struct{} // closed by Stop; nothing is sent
	watchers map[tunnel.NodeName]*watcher
	cache    cache
}

// change is what a path got at one time. Only superseded changes later.
type change struct {
	seq        uint64 // 0: it is the endpoint of a Service in Hub.apart, and in no list of changes
	path       services.Path
	value      []byte // nil: deleted
	superseded bool   // guarded by Hub.mu: there is a newer change of the path

	// Of an endpoint of a Service in Hub.apart:
	bucket int
	digest uint64
}

// isApart reports whether the change is the endpoint of a Service in Hub.apart.
func (c *change) isApart() bool { return c.seq == 0 }

// New returns a Hub without items.
func New(cfg Config) *Hub {
	h := &Hub{
		cfg: cfg, log: cfg.Log.With("module", Category), joined: make(map[tunnel.NodeName]bool),
		named: !cfg.AwaitNodes, served: make(chan struct{}), stopped: make(chan struct{}),
		deleted: make(map[services.Path]*change), watchers: make(map[tunnel.NodeName]*watcher),
		groups: make(map[services.Path]*group), apart: make(map[services.Path]*apart),
		paused: make(map[services.Path]struct{}), unsettled: make(map[services.Path]struct{}),
	}
	if cfg.Domain != "" {
		h.index = newIndex()
	}
	for b := range h.buckets {
		h.buckets[b] = make(map[services.Path]*change)
	}
	return h
}

// Set adds or changes an item. value is a Service, an Endpoint or a Node of package services, as deterministic
// protobuf, of services.MaxValue bytes at most. The fields Endpoint.cluster and Node.edge must be missing: Set adds
// them. The hub keeps value. If the item already has this value, Set does nothing.
func (h *Hub) Set(p services.Path, value []byte) {
	node, isNode := nodeOf(p)
	serves := isNode && h.serves(node)
	h.set(p, value, serves)
	if isNode && !serves && h.serves(node) {
		h.Joined(node) // the edge came meanwhile, and its Joined may have found no item
	}
}

// set does what Set says. serves says that p is the path of a Node whose edge serves Services.
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

// nodeOf returns the name of the Node with path p. ok is false for other paths.
func nodeOf(p services.Path) (_ tunnel.NodeName, ok bool) {
	name, ok := strings.CutPrefix(p, services.NodePath(""))
	return tunnel.NodeName(name), ok
}

// The hub sets these fields in values, behind all others.
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

// setLocked does what Set says, with a value that has all its fields. The caller holds mu.
func (h *Hub) setLocked(p services.Path, value []byte) {
	old := h.itemLocked(p)
	if old != nil && bytes.Equal(old.value, value) {
		return
	}
	if value == nil {
		value = []byte{} // a message without fields is empty, but must not look like a deletion
	}
	of := services.ServiceOf(p)
	if old == nil {
		h.items++
	}
	h.index.set(p, value)
	h.touchLocked(of, p)
	if h.apart[of] != nil {
		h.putLocked(of, apartChange(p, value))
		return
	}
	if old != nil {
		h.digests.Flip(p, old.value)
		h.supersedeLocked(old)
	}
	h.shareLocked(of, p, value)
}

// shareLocked makes an item one that is for all nodes. The caller holds mu.
func (h *Hub) shareLocked(of, p services.Path, value []byte) {
	if gone := h.deleted[p]; gone != nil {
		delete(h.deleted, p)
		h.supersedeLocked(gone)
	}
	h.digests.Flip(p, value)
	h.putLocked(of, h.appendLocked(p, value))
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
	h.index.forget(p)
	of := services.ServiceOf(p)
	h.touchLocked(of, p)
	h.takeLocked(of, p)
	h.items--
	if !old.isApart() {
		h.withdrawLocked(old)
	}
	if service := cmp.Or(of, p); h.itemLocked(service) == nil && h.groups[service] == nil && h.apart[service] == nil {
		delete(h.unsettled, service) // nothing is left that could be put apart
	}
}

// withdrawLocked appends the deletion of an item that was for all nodes. The caller holds mu.
func (h *Hub) withdrawLocked(old *change) {
	h.digests.Flip(old.path, old.value)
	h.supersedeLocked(old)
	h.deleted[old.path] = h.appendLocked(old.path, nil)
	// With so many deletions, whole buckets are no larger than all changes.
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

// forgetLocked forgets the deletions that all watchers have got, and at least the older half of all deletions. A
// watcher that lacks a forgotten deletion must watch again. The caller holds mu.
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

// readyLocked lets edges be served once Synced and, if awaited, NodesKnown were called. The caller holds mu.
func (h *Hub) readyLocked() {
	if h.synced && h.named && !h.ready {
		h.settleLocked()
		if len(h.deleted) > 0 {
			h.forgetLocked() // no edge has got what was deleted
		}
		h.ready = true
		close(h.served)
	}
}

// Stop ends each Watch, and makes new ones fail: this replica learns of no changes any more. So edges ask another
// replica, and know meanwhile that their state is not current. Target and Endpoints go on. Stop may be called once.
func (h *Hub) Stop() {
	h.mu.Lock()
	defer h.mu.Unlock()
	close(h.stopped)
	for _, w := range h.watchers {
		w.end(errStopped)
	}
}

// Joined says that the edge of a node serves Services, so endpoints on the node can be reached through that edge. The
// hub forgets the node after Left, or when the Node is deleted.
func (h *Hub) Joined(node tunnel.NodeName) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.joined[node] {
		return
	}
	p := services.NodePath(string(node))
	item := h.itemLocked(p)
	if item == nil && h.synced {
		return // when the Node comes, Set asks Serves
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
