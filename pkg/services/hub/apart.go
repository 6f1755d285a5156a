package hub

import (
	"cmp"
	"iter"
	"maps"
	"slices"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"tunnel.example/tunnel/pkg/services"
	"tunnel.example/tunnel/pkg/tunnel"
)

// widePause is how long all nodes get all endpoints of a Service after the Service has lost its narrow view. Otherwise
// a user who changes the hints of one endpoint again and again would have all endpoints sent to all nodes each time.
const widePause = 5 * time.Minute

// pause is the time for which a Service is not put apart again.
type pause struct {
	service services.Path
	until   time.Time
}

// group has the endpoints of a Service.
type group struct {
	endpoints map[services.Path]*change // of each, the newest change
	hinted    int                       // how many have hints
}

// all returns the endpoints. g may be nil.
func (g *group) all() map[services.Path]*change {
	if g == nil {
		return nil
	}
	return g.endpoints
}

// countHints adds n to hinted, if an endpoint has hints. c may be nil.
func (g *group) countHints(c *change, n int) {
	if c != nil && hasField(c.value, fieldEndpointZoneHints, fieldEndpointNodeHints) {
		g.hinted += n
	}
}

// apart has the endpoints of a Service whose view is narrow. They are no part of Hub.changes and of Hub.digests, which
// are for all nodes. An apart does not change: settleLocked makes a new one.
type apart struct {
	view      *services.View
	endpoints []*change // sorted by path; view has positions in it
}

// apartChange returns the change of an endpoint of a Service in Hub.apart.
func apartChange(p services.Path, value []byte) *change {
	return &change{path: p, value: value, bucket: services.Bucket(p), digest: services.Digest(p, value)}
}

// need returns the endpoints that a node needs, sorted by path. a may be nil.
func (a *apart) need(self services.Self) need {
	if a == nil {
		return need{}
	}
	return need{a.endpoints, a.view.For(self)}
}

// need is a list of endpoints.
type need struct {
	endpoints []*change
	positions []int // of the elements of endpoints that belong to the list
}

func (n need) all() iter.Seq[*change] {
	return func(yield func(*change) bool) {
		for _, i := range n.positions {
			if !yield(n.endpoints[i]) {
				return
			}
		}
	}
}

// compare yields the differences between two lists, as pairs: the endpoint of old, and the endpoint of now that has the
// same path. One of a pair is nil if only one list has the path.
func compare(old, now need) iter.Seq2[*change, *change] {
	return func(yield func(*change, *change) bool) {
		at := func(n need, i int) *change {
			if i == len(n.positions) {
				return nil
			}
			return n.endpoints[n.positions[i]]
		}
		for i, j := 0, 0; i < len(old.positions) || j < len(now.positions); {
			a, b := at(old, i), at(now, j)
			switch {
			case a == b:
				i, j = i+1, j+1
				continue
			case b == nil || a != nil && a.path < b.path:
				b, i = nil, i+1
			case a == nil || b.path < a.path:
				a, j = nil, j+1
			default:
				i, j = i+1, j+1
			}
			if !yield(a, b) {
				return
			}
		}
	}
}

// own is what the hub keeps for one Watch about Services in Hub.apart. Hub.mu guards it.
//
// Once the edge has the series that is being sent, it has what its node needed at the last call of differenceLocked.
type own struct {
	self  services.Self // as it was then
	moved bool          // the Node of self has changed since
	// behind are the Services that have changed since, with what they were then. nil: the Service was not apart.
	behind map[services.Path]*apart
	// first are endpoints that are still to be sent in a series of whole buckets, sorted by bucket. They come before the
	// batch for all nodes that names their bucket: if the series breaks off, the edge keeps the buckets that have arrived
	// whole.
	first []*change
	// last are endpoints that are still to be sent in a series of changes, after the batches for all nodes: some may be
	// of a Service that is apart since a moment, and the changes for all nodes delete the endpoints of such a Service.
	last []*change
}

// note notes that a Service changes, which was as a says.
func (o *own) note(path services.Path, a *apart) {
	if _, noted := o.behind[path]; !noted {
		o.behind[path] = a
	}
}

// touchLocked notes that an item changes: an endpoint of the Service of, or with an empty of, a Service or a Node. The
// caller holds mu.
func (h *Hub) touchLocked(of, p services.Path) {
	h.changed.Notify()
	node, isNode := nodeOf(p)
	switch {
	case of != "":
		h.unsettled[of] = struct{}{}
	case !isNode:
		h.unsettled[p] = struct{}{}
	case h.watchers[node] != nil:
		h.watchers[node].moved = true
	}
}

// putLocked makes c the newest change of an item: of an endpoint of the Service of, or with an empty of, of a Service
// or a Node. The caller holds mu.
func (h *Hub) putLocked(of services.Path, c *change) {
	h.buckets[services.Bucket(c.path)][c.path] = c
	if of == "" {
		return
	}
	g := h.groups[of]
	if g == nil {
		g = &group{endpoints: make(map[services.Path]*change)}
		h.groups[of] = g
	}
	g.countHints(g.endpoints[c.path], -1)
	g.countHints(c, 1)
	g.endpoints[c.path] = c
}

// takeLocked undoes putLocked. The caller holds mu.
func (h *Hub) takeLocked(of, p services.Path) {
	delete(h.buckets[services.Bucket(p)], p)
	g := h.groups[of]
	if g == nil {
		return
	}
	g.countHints(g.endpoints[p], -1)
	if delete(g.endpoints, p); len(g.endpoints) == 0 {
		delete(h.groups, of)
	}
}

// settleLocked looks at each Service that has changed. If some nodes do not need all of its endpoints, settleLocked
// puts the Service into apart. During a pause of a Service, settleLocked leaves it out of apart. After the pause, it
// looks at the Service again. The caller holds mu.
func (h *Hub) settleLocked() {
	for len(h.pauses) > 0 && !time.Now().Before(h.pauses[0].until) {
		path := h.pauses[0].service
		h.pauses = h.pauses[1:]
		delete(h.paused, path)
		h.unsettled[path] = struct{}{}
	}
	for path := range h.unsettled {
		was := h.apart[path]
		var now *apart
		if _, paused := h.paused[path]; !paused {
			now = h.viewLocked(path, was != nil)
		}
		if was == nil && now == nil {
			continue
		}
		for _, w := range h.watchers {
			w.note(path, was)
		}
		if now != nil {
			h.separateLocked(path, now)
			h.apart[path] = now
			continue
		}
		delete(h.apart, path)
		if len(h.groups[path].all()) == 0 {
			continue
		}
		h.paused[path] = struct{}{}
		h.pauses = append(h.pauses, pause{path, time.Now().Add(widePause)})
		for p, c := range h.groups[path].all() {
			h.shareLocked(path, p, c.value)
		}
	}
	clear(h.unsettled)
}

// The fields that make a view narrow.
const (
	fieldServiceInternalLocal protowire.Number = 5
	fieldEndpointZoneHints    protowire.Number = 7
	fieldEndpointNodeHints    protowire.Number = 8
)

// viewLocked returns the endpoints of a Service whose view is narrow, or nil if all nodes need all endpoints. was says
// that the view was narrow before. The caller holds mu.
func (h *Hub) viewLocked(path services.Path, was bool) *apart {
	item, g := h.itemLocked(path), h.groups[path]
	if item == nil || g == nil || !was && g.hinted == 0 && !hasField(item.value, fieldServiceInternalLocal) {
		return nil
	}
	service := new(services.Service)
	if proto.Unmarshal(item.value, service) != nil {
		return nil
	}
	a := &apart{endpoints: slices.SortedFunc(maps.Values(g.endpoints), func(a, b *change) int {
		return cmp.Compare(a.path, b.path)
	})}
	endpoints := make([]services.Named, len(a.endpoints))
	for i, c := range a.endpoints {
		endpoints[i] = services.Named{Path: c.path, Endpoint: new(services.Endpoint)}
		if proto.Unmarshal(c.value, endpoints[i].Endpoint) != nil {
			return nil
		}
	}
	if a.view = services.ViewOf(service, endpoints); !a.view.Narrow() {
		return nil
	}
	return a
}

// separateLocked takes the endpoints of a, which are those of a Service, from the items for all nodes. The caller holds
// mu.
func (h *Hub) separateLocked(path services.Path, a *apart) {
	for i, c := range a.endpoints {
		if !c.isApart() {
			h.withdrawLocked(c)
			a.endpoints[i] = apartChange(c.path, c.value)
			h.putLocked(path, a.endpoints[i])
		}
	}
}

// hasField reports whether an encoded message has one of the fields.
func hasField(value []byte, fields ...protowire.Number) bool {
	for len(value) > 0 {
		field, _, n := protowire.ConsumeField(value)
		if n < 0 {
			return false
		}
		if slices.Contains(fields, field) {
			return true
		}
		value = value[n:]
	}
	return false
}

// selfLocked returns what decides which endpoints a node needs. The caller holds mu.
func (h *Hub) selfLocked(node string) services.Self {
	self := services.Self{Node: node}
	if item := h.itemLocked(services.NodePath(node)); item != nil {
		var n services.Node
		proto.Unmarshal(item.value, &n) //nolint:errcheck // a Node that cannot be read has no zone
		self.Zone = n.GetZone()
	}
	return self
}

// beginLocked fills own and the buckets of a new watcher: those in which the edge has other items than its node needs.
// has are the digests of what the edge has. The caller holds mu.
func (h *Hub) beginLocked(w *watcher, node tunnel.NodeName, has services.Digests) {
	h.settleLocked()
	w.own = own{self: h.selfLocked(string(node)), behind: make(map[services.Path]*apart)}
	needs := h.digests
	for _, a := range h.apart {
		for c := range a.need(w.self).all() {
			needs[c.bucket] ^= c.digest
		}
	}
	for b := range has {
		if has[b] != needs[b] {
			w.buckets.add(b)
			w.whole = true
		}
	}
	for _, a := range h.apart {
		for c := range a.need(w.self).all() {
			if w.buckets.has(c.bucket) {
				w.first = append(w.first, c)
			}
		}
	}
	slices.SortFunc(w.first, func(a, b *change) int { return a.bucket - b.bucket })
}

// differenceLocked returns what the edge lacks of Services in Hub.apart. The caller holds mu, and sends it.
func (h *Hub) differenceLocked(o *own) (changes []*change) {
	before := o.self
	if o.moved {
		o.moved = false
		if o.self = h.selfLocked(before.Node); o.self != before {
			for path, a := range h.apart {
				o.note(path, a)
			}
		}
	}
	for path, was := range o.behind {
		for old, now := range compare(was.need(before), h.apart[path].need(o.self)) {
			if now == nil && !h.isSharedLocked(old.path) {
				now = &change{path: old.path}
			}
			if now != nil {
				changes = append(changes, now)
			}
		}
	}
	clear(o.behind)
	return changes
}

// isSharedLocked reports whether there is an item that is for all nodes. The caller holds mu.
func (h *Hub) isSharedLocked(p services.Path) bool {
	item := h.itemLocked(p)
	return item != nil && !item.isApart()
}
