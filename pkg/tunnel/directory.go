package tunnel

import (
	"cmp"
	"context"
	"maps"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
)

// Directory maps a node to its live session. The zero value is empty and ready.
type Directory struct {
	Counters *Counters // set before use; counts nodes that are not connected; nil: nobody looks

	mu       sync.RWMutex
	sessions map[NodeName]*Session // at most one per node: the newest
	changed  chan struct{}         // closed at the next change; nil while nobody waits for one
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
	return d.attachLocked(s)
}

// AttachUnless is Attach, unless stays says of the session that is there that it does.
// Then nothing changes, and ok is false.
func (d *Directory) AttachUnless(s *Session, stays func(*Session) bool) (ok bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if there := d.sessions[s.Node]; there != nil && stays(there) {
		return false
	}
	d.attachLocked(s)
	return true
}

// attachLocked is Attach. The caller holds mu.
func (d *Directory) attachLocked(s *Session) (replaced *Session) {
	if d.sessions == nil {
		d.sessions = make(map[NodeName]*Session)
	}
	replaced = d.sessions[s.Node]
	d.sessions[s.Node] = s
	d.noteLocked()
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
	d.noteLocked()
	return true
}

// Changed returns a channel that is closed when a node has come, gone, or got another
// session. To miss nothing, ask for it before asking who is connected.
func (d *Directory) Changed() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.changed == nil {
		d.changed = make(chan struct{})
	}
	return d.changed
}

// noteLocked tells who waits that a session has changed. The caller holds mu.
func (d *Directory) noteLocked() {
	if d.changed != nil {
		close(d.changed)
		d.changed = nil
	}
}

// Lookup returns the session of a node, or nil.
func (d *Directory) Lookup(n NodeName) *Session {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return d.sessions[n]
}

// Holds reports whether n has a session.
func (d *Directory) Holds(n NodeName) bool { return d.Lookup(n) != nil }

// Connected returns the names of the nodes that have a session, sorted.
func (d *Directory) Connected() []NodeName {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return slices.Sorted(maps.Keys(d.sessions))
}

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

// Reach returns what each connected node says it reaches, without those that say nothing.
func (d *Directory) Reach() map[NodeName]string {
	d.mu.RLock()
	defer d.mu.RUnlock()
	all := make(map[NodeName]string)
	for n, s := range d.sessions {
		if s.Reach != "" {
			all[n] = s.Reach
		}
	}
	return all
}

// Dial opens a conn through the session of r.Node. When r names no node it takes one of
// r.Among by chance: a node that could attract conns, by having few or by answering fast,
// could attract them all. One that cannot serve just now, because it is
// draining, full or gone, passes the request on to the next. When all are full or gone, the
// request waits at the first one that is full.
func (d *Directory) Dial(ctx context.Context, r Request) (net.Conn, error) {
	if r.Node != "" {
		s := d.Lookup(r.Node)
		if s == nil {
			return nil, d.noSuchNode("node %s is not connected", r.Node)
		}
		return s.Dial(ctx, r)
	}
	err := error(nil)
	waits := !r.NoWait
	r.NoWait = true
	var full *Session // the first that is at a limit
	for _, s := range d.byChance(r.Among) {
		r.Node = s.Node
		var c net.Conn
		if c, err = s.Dial(ctx, r); err == nil {
			return c, nil
		}
		if full == nil && CodeOf(err) == Overloaded {
			full = s
		}
		if code := CodeOf(err); code != Draining && code != Overloaded && code != Gone || ctx.Err() != nil {
			return nil, err
		}
	}
	switch {
	case full != nil && waits:
		r.Node, r.NoWait = full.Node, false
		return full.Dial(ctx, r)
	case err == nil:
		err = d.noSuchNode("no node %sis connected", among(r.Among))
	}
	return nil, err
}

func (d *Directory) noSuchNode(format string, args ...any) *Refusal {
	if d.Counters != nil {
		d.Counters.Refuse(NoSuchNode)
	}
	return Refusef(NoSuchNode, format, args...)
}

// among names the nodes of a selector, for an error.
func among(s Selector) string {
	if len(s) == 0 {
		return ""
	}
	return "of " + strings.Join(s, ", ") + " "
}

// byChance returns the sessions of the nodes that among chooses, in a random order, and last
// those that leave.
func (d *Directory) byChance(among Selector) []*Session {
	d.mu.RLock()
	sessions := make([]*Session, 0, len(d.sessions))
	for n, s := range d.sessions {
		if among.Chooses(n) {
			sessions = append(sessions, s)
		}
	}
	d.mu.RUnlock()
	// The order of a map is not random enough: it begins at a random place.
	rand.Shuffle(len(sessions), func(i, j int) { sessions[i], sessions[j] = sessions[j], sessions[i] })
	slices.SortStableFunc(sessions, func(a, b *Session) int {
		switch al, bl := a.Leaving.Load(), b.Leaving.Load(); {
		case al == bl:
			return 0
		case bl:
			return -1
		default:
			return 1
		}
	})
	return sessions
}
