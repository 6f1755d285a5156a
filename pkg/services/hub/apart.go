package hub

import (
	"iter"
	"maps"
	"slices"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"tunnel.example/tunnel/pkg/services"
	"tunnel.example/tunnel/pkg/tunnel"
)

// apart has the endpoints of a Service whose view is narrow. They are no part of Hub.changes and of Hub.digests, which
// are for all nodes. An apart does not change: settleLocked makes a new one.
type apart struct {
	view      *services.View
	endpoints []*change // sorted by path; view has positions in it
}

// own is what the hub keeps for one Watch about Services in Hub.apart. Hub.mu guards it.
type own struct {
	self   services.Self
	moved  bool                       // the Node of self has changed
	told   map[services.Path]told     // what the edge has of each such Service, once it has the series that is being sent
	behind map[services.Path]struct{} // the Services of which told may not be what the edge needs
	// first and last are still to be sent in a series, before and after its batches for all nodes. In a series of whole
	// buckets, these endpoints come first: if the series breaks off, the edge keeps the buckets that have arrived, and a
	// bucket is whole only with these endpoints. In a series of changes they come last: some may be of a Service that is
	// apart since a moment, and the changes for all nodes delete the endpoints of such a Service.
	first, last []*change
}

// told are the endpoints of a Service that an edge has.
type told struct {
	of    *apart
	picks []int // positions in of.endpoints
}

// compare yields each endpoint in which old and now differ: that of old, and that of now. One of them may be nil.
func compare(old, now told) iter.Seq2[*change, *change] {
	return func(yield func(*change, *change) bool) {
		next := func(t told, i int) *change {
			if i == len(t.picks) {
				return nil
			}
			return t.of.endpoints[t.picks[i]]
		}
		for i, j := 0, 0; i < len(old.picks) || j < len(now.picks); {
			a, b := next(old, i), next(now, j)
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

// endpoints yields the endpoints that the edge has of Services in Hub.apart, in no order.
func (o *own) endpoints() iter.Seq[*change] {
	return func(yield func(*change) bool) {
		for _, t := range o.told {
			for _, i := range t.picks {
				if !yield(t.of.endpoints[i]) {
					return
				}
			}
		}
	}
}

// touchLocked notes that an item changes: an endpoint of the Service of, or with an empty of, a Service or a Node. The
// caller holds mu.
func (h *Hub) touchLocked(of, p services.Path) {
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

// listLocked notes a new endpoint of the Service of. If of is empty, the item is no endpoint. The caller holds mu.
func (h *Hub) listLocked(of, p services.Path) {
	if of == "" {
		return
	}
	if h.endpoints[of] == nil {
		h.endpoints[of] = make(map[services.Path]struct{})
	}
	h.endpoints[of][p] = struct{}{}
}

// unlistLocked undoes listLocked. The caller holds mu.
func (h *Hub) unlistLocked(of, p services.Path) {
	if delete(h.endpoints[of], p); len(h.endpoints[of]) == 0 {
		delete(h.endpoints, of)
	}
}

// setApartLocked sets an endpoint of a Service that is apart. The caller holds mu.
func (h *Hub) setApartLocked(p services.Path, value []byte) {
	h.buckets[services.Bucket(p)][p] = &change{path: p, value: value}
	h.changed.Notify()
}

// settleLocked looks at the Services that have changed, and puts those apart of which some nodes need only some
// endpoints. The caller holds mu.
func (h *Hub) settleLocked() {
	for path := range h.unsettled {
		view, paths := h.viewLocked(path)
		narrow, wasApart := view != nil, h.apart[path] != nil
		if !narrow && !wasApart {
			continue
		}
		now := &apart{view: view}
		for _, p := range paths {
			item := h.itemLocked(p)
			switch {
			case narrow && !item.isApart():
				h.withdrawLocked(item)
				h.setApartLocked(p, item.value)
			case !narrow && item.isApart():
				h.shareLocked(p, item.value)
			}
			now.endpoints = append(now.endpoints, h.itemLocked(p))
		}
		if h.apart[path] = now; !narrow {
			delete(h.apart, path)
		}
		for _, w := range h.watchers {
			w.behind[path] = struct{}{}
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

// viewLocked returns the view of a Service, or nil if all nodes need all endpoints, and the paths of the Service's
// endpoints, sorted. The view's positions are those of the paths. The caller holds mu.
func (h *Hub) viewLocked(path services.Path) (*services.View, []services.Path) {
	paths := slices.Sorted(maps.Keys(h.endpoints[path]))
	item := h.itemLocked(path)
	if item == nil || !hasField(item.value, fieldServiceInternalLocal) &&
		!slices.ContainsFunc(paths, func(p services.Path) bool {
			return hasField(h.itemLocked(p).value, fieldEndpointZoneHints, fieldEndpointNodeHints)
		}) {
		return nil, paths
	}
	service := new(services.Service)
	if proto.Unmarshal(item.value, service) != nil {
		return nil, paths
	}
	endpoints := make([]services.Named, len(paths))
	for i, p := range paths {
		endpoints[i] = services.Named{Path: p, Endpoint: new(services.Endpoint)}
		if proto.Unmarshal(h.itemLocked(p).value, endpoints[i].Endpoint) != nil {
			return nil, paths
		}
	}
	if view := services.ViewOf(service, endpoints); view.Narrow() {
		return view, paths
	}
	return nil, paths
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
func (h *Hub) selfLocked(node tunnel.NodeName) services.Self {
	self := services.Self{Node: string(node)}
	if item := h.itemLocked(services.NodePath(self.Node)); item != nil {
		var n services.Node
		proto.Unmarshal(item.value, &n) //nolint:errcheck // a Node that cannot be read has no zone
		self.Zone = n.GetZone()
	}
	return self
}

// ownLocked returns what the hub keeps for a new Watch. The edge is told all that it needs. The caller holds mu.
func (h *Hub) ownLocked(node tunnel.NodeName) own {
	h.settleLocked()
	o := own{
		self: h.selfLocked(node), told: make(map[services.Path]told, len(h.apart)),
		behind: make(map[services.Path]struct{}),
	}
	for path, a := range h.apart {
		o.told[path] = told{a, a.view.For(o.self)}
	}
	return o
}

// differenceLocked returns what the edge lacks of Services in Hub.apart, and notes that the edge is told so. The caller
// holds mu.
func (h *Hub) differenceLocked(o *own) (changes []*change) {
	if o.moved {
		o.moved = false
		if self := h.selfLocked(tunnel.NodeName(o.self.Node)); self != o.self {
			o.self = self
			for path := range h.apart {
				o.behind[path] = struct{}{}
			}
		}
	}
	for path := range o.behind {
		old, now := o.told[path], told{}
		if a := h.apart[path]; a != nil {
			now = told{a, a.view.For(o.self)}
			o.told[path] = now
		} else {
			delete(o.told, path)
		}
		for gone, set := range compare(old, now) {
			if set == nil && !h.isSharedLocked(gone.path) {
				set = &change{path: gone.path}
			}
			if set != nil {
				changes = append(changes, set)
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
