// Package tap shows the conns of a cloud as they open and end, to operators who watch.
//
//	hub := tap.New("cloud-0")
//	door.Sink.Tap = hub           // a tunnel.Tap
//
//	w := hub.Watch("edge1")       // "": the conns of all nodes
//	defer w.Close()
//	for {
//		line, ok := w.Next(ctx)
//		…
//	}
//
// While there is no watcher, the Hub costs each conn two loads of a pointer. A watcher that reads slowly loses events,
// and Next returns how many; front doors never wait for a watcher. The Hub keeps no events: a watcher gets only the
// events that happen after Watch.
//
// An event holds addresses, names and counts, as the audit does; it never holds a byte of a conn. The Hub bounds its
// texts and makes them printable, because callers choose some of them.
package tap

import (
	"context"
	"strings"
	"sync"
	"sync/atomic"

	"tunnel.example/tunnel/pkg/tunnel"
)

const (
	// queueLen is how many lines may wait for a watcher. Usual lines have half a kilobyte.
	queueLen = 2048
	// maxText bounds each text of a line, in bytes.
	maxText = 512
)

// Line is one line of a watcher: an event, or a remark in its place.
type Line struct {
	Phase   tunnel.Phase `json:"phase,omitempty"` // "": a remark
	Replica string       `json:"replica,omitempty"`
	// Lost is a remark: the watcher has lost so many lines, because it reads too slowly.
	Lost uint64 `json:"lost,omitempty"`
	// Warning is a remark: why lines may be missing.
	Warning string `json:"warning,omitempty"`
	*tunnel.Event
}

// Hub passes events to watchers. Any goroutine may call its methods. It is a tunnel.Tap.
type Hub struct {
	replica string // set once

	mu       sync.Mutex                 // held to change watchers
	watchers atomic.Pointer[[]*Watcher] // nil: nobody watches; the list never changes
}

var _ tunnel.Tap = (*Hub)(nil)

// New returns a hub. Its lines name the replica.
func New(replica string) *Hub { return &Hub{replica: replica} }

// Watched implements tunnel.Tap.
func (h *Hub) Watched() bool { return h.watchers.Load() != nil }

// Show implements tunnel.Tap.
func (h *Hub) Show(phase tunnel.Phase, e tunnel.Event) {
	watchers := h.watchers.Load()
	if watchers == nil {
		return
	}
	for _, text := range []*string{&e.Caller, &e.Remote, &e.Door, &e.Target, &e.Method, &e.Path, &e.Err} {
		*text = shown(*text)
	}
	line := Line{Phase: phase, Replica: h.replica, Event: &e} // no watcher changes e
	for _, w := range *watchers {
		if w.node == "" || w.node == e.Node {
			w.Put(line)
		}
	}
}

// shown returns a text as lines have it.
func shown(text string) string {
	if len(text) > maxText {
		text = strings.ToValidUTF8(text[:maxText], "") + "…"
	}
	return tunnel.Printable(text)
}

// Watch returns a new watcher of the conns of a node; "": of all nodes. The caller closes it.
func (h *Hub) Watch(node tunnel.NodeName) *Watcher {
	w := &Watcher{hub: h, node: node, lines: make(chan Line, queueLen)}
	h.change(func(all []*Watcher) []*Watcher { return append(all, w) })
	return w
}

// change replaces the list of watchers.
func (h *Hub) change(f func([]*Watcher) []*Watcher) {
	h.mu.Lock()
	defer h.mu.Unlock()
	var all []*Watcher
	if old := h.watchers.Load(); old != nil {
		all = append(all, *old...)
	}
	if all = f(all); len(all) == 0 {
		h.watchers.Store(nil)
		return
	}
	h.watchers.Store(&all)
}

// Watcher is a bounded queue of lines. One goroutine may call Next; any goroutine may call Put.
type Watcher struct {
	// Set once.
	hub   *Hub
	node  tunnel.NodeName
	lines chan Line // Put sends, Next receives; never closed

	lost atomic.Uint64 // lines that found no room, and that Next has not told
}

// Put adds a line, such as one of another replica. It never waits: a line that finds no room is lost.
func (w *Watcher) Put(line Line) {
	select {
	case w.lines <- line:
	default:
		w.lost.Add(1)
	}
}

// Next returns the next line. ok is false when ctx is done.
func (w *Watcher) Next(ctx context.Context) (line Line, ok bool) {
	if lost := w.lost.Swap(0); lost > 0 {
		return Line{Replica: w.hub.replica, Lost: lost}, true
	}
	select {
	case line = <-w.lines:
		return line, true
	case <-ctx.Done():
		return Line{}, false
	}
}

// Waiting reports whether Next would return at once.
func (w *Watcher) Waiting() bool { return len(w.lines) > 0 || w.lost.Load() > 0 }

// Close ends the watch. Lines that were not read are dropped.
func (w *Watcher) Close() {
	w.hub.change(func(all []*Watcher) []*Watcher {
		rest := all[:0] // change has made a copy
		for _, other := range all {
			if other != w {
				rest = append(rest, other)
			}
		}
		return rest
	})
}
