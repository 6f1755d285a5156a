package tunnel

import (
	"cmp"
	"context"
	"net"
	"slices"
	"sync"
)

// Directory maps a node to its live session. The zero value is empty and ready.
type Directory struct {
	mu       sync.RWMutex
	sessions map[NodeName]*Session // at most one per node: the newest
}

var (
	_ Dialer = (*Directory)(nil)
	_ Nodes  = (*Directory)(nil)
)

// Attach makes s the session of its node and returns the one it replaced, or nil.
// The caller closes the replaced one.
func (d *Directory) Attach(s *Session) (replaced *Session) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.sessions == nil {
		d.sessions = make(map[NodeName]*Session)
	}
	replaced = d.sessions[s.Node]
	d.sessions[s.Node] = s
	return replaced
}

// Detach removes s and reports whether it was there. The end of a session that has
// been replaced leaves its successor alone: sessions are compared, not names.
func (d *Directory) Detach(s *Session) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.sessions[s.Node] != s {
		return false
	}
	delete(d.sessions, s.Node)
	return true
}

// Lookup returns the session of a node, or nil.
func (d *Directory) Lookup(n NodeName) *Session {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return d.sessions[n]
}

// Holds reports whether n has a session.
func (d *Directory) Holds(n NodeName) bool { return d.Lookup(n) != nil }

// Len returns how many nodes have a session.
func (d *Directory) Len() int {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return len(d.sessions)
}

// Sessions returns the live sessions in the order of their nodes' names.
func (d *Directory) Sessions() []*Session {
	d.mu.RLock()
	all := make([]*Session, 0, len(d.sessions))
	for _, s := range d.sessions {
		all = append(all, s)
	}
	d.mu.RUnlock()
	slices.SortFunc(all, func(a, b *Session) int { return cmp.Compare(a.Node, b.Node) })
	return all
}

// Dial opens a conn through the session of r.Node, or, when r names no node,
// through the session that has the fewest conns.
func (d *Directory) Dial(ctx context.Context, r Request) (net.Conn, error) {
	if r.Node != "" {
		s := d.Lookup(r.Node)
		if s == nil {
			return nil, Refusef(NoSuchNode, "node %s is not connected", r.Node)
		}
		return s.Dial(ctx, r)
	}
	s := d.least()
	if s == nil {
		return nil, Refusef(NoSuchNode, "no node is connected")
	}
	r.Node = s.Node
	return s.Dial(ctx, r)
}

// least returns the session with the fewest conns, or nil. Among equals the map's
// random order decides, which spreads first conns over the nodes.
func (d *Directory) least() *Session {
	d.mu.RLock()
	defer d.mu.RUnlock()
	var best *Session
	var fewest int64
	for _, s := range d.sessions {
		if n := s.Conns.Load(); best == nil || n < fewest {
			best, fewest = s, n
		}
	}
	return best
}
