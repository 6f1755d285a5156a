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
	"time"
)

// Directory maps a node to its live session. The zero value is empty and ready.
type Directory struct {
	// Counters counts refusals for nodes that are not connected. Set it before use. nil: they are
	// not counted.
	Counters *Counters
	// Watcher is called for each session that is attached or detached. Set it before use. nil: no calls.
	Watcher SessionWatcher

	mu       sync.RWMutex          // guards the following
	sessions map[NodeName]*Session // at most one per node: the newest
	changed  Change                // a node connects, disconnects, or gets another session
	expected map[NodeName]struct{} // nodes that are about to connect, see Expect; nil: none
	late     time.Time             // after late, no node counts as expected
}

// SessionWatcher learns of each session that a Directory attaches or detaches, in the order of the changes. The
// Directory calls the methods with its lock held. So a method must return at once, and must not call the Directory.
type SessionWatcher interface {
	Attached(s *Session) // a session that s replaces is not reported as detached
	Detached(s *Session)
}

var (
	_ Dialer = (*Directory)(nil)
	_ Nodes  = (*Directory)(nil)
)

// Attach makes s the session of its node. It returns the session that s replaced, or
// nil. The caller must close the replaced session.
func (d *Directory) Attach(s *Session) (replaced *Session) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.attachLocked(s)
}

// AttachUnless attaches s unless the node already has a session for which keep returns
// true. It reports whether s was attached. keep is called with the directory locked.
func (d *Directory) AttachUnless(s *Session, keep func(*Session) bool) (ok bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if current := d.sessions[s.Node]; current != nil && keep(current) {
		return false
	}
	d.attachLocked(s)
	return true
}

// attachLocked is Attach for a caller that holds mu.
func (d *Directory) attachLocked(s *Session) (replaced *Session) {
	if d.sessions == nil {
		d.sessions = make(map[NodeName]*Session)
	}
	replaced = d.sessions[s.Node]
	d.sessions[s.Node] = s
	if d.Watcher != nil {
		d.Watcher.Attached(s)
	}
	d.changed.Notify()
	return replaced
}

// Detach removes s and reports whether s was attached. It compares sessions, not node
// names: when a replaced session ends, its successor stays attached.
func (d *Directory) Detach(s *Session) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.sessions[s.Node] != s {
		return false
	}
	delete(d.sessions, s.Node)
	if d.Watcher != nil {
		d.Watcher.Detached(s)
	}
	d.changed.Notify()
	return true
}

// Changed returns a channel that is closed when a node connects, disconnects, or gets
// another session. To miss no change, call Changed before Connected or Lookup.
func (d *Directory) Changed() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.changed.Next()
}

// Expect says that these nodes are about to connect. Until late, dials to them wait for their sessions, and Holds
// returns true for them.
func (d *Directory) Expect(nodes []NodeName, late time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.expected, d.late = make(map[NodeName]struct{}, len(nodes)), late
	for _, n := range nodes {
		d.expected[n] = struct{}{}
	}
}

// Unexpect says that a node has connected to another replica. If it was expected here, it no longer is.
func (d *Directory) Unexpect(n NodeName) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, ok := d.expected[n]; ok {
		delete(d.expected, n)
		d.changed.Notify()
	}
}

// Missing returns how many nodes are expected now and have no session.
func (d *Directory) Missing() (n int) {
	d.mu.RLock()
	defer d.mu.RUnlock()
	if time.Now().After(d.late) {
		return 0
	}
	for node := range d.expected {
		if d.sessions[node] == nil {
			n++
		}
	}
	return n
}

// await waits until node has a session. If node is "", it waits until any node that among chooses has one. It returns
// at once if no such node is expected, and at the latest when nodes are no longer expected.
func (d *Directory) await(ctx context.Context, node NodeName, among Selector) {
	for {
		d.mu.Lock()
		changed, late := d.changed.Next(), d.late
		waits := time.Now().Before(late) && d.comesLocked(node, among)
		d.mu.Unlock()
		if !waits {
			return
		}
		select {
		case <-changed:
		case <-time.After(time.Until(late)):
		case <-ctx.Done():
			return
		}
	}
}

// comesLocked reports whether await has to wait: node is expected and has no session. If node is "": among chooses an
// expected node, and no node with a session. The caller holds mu.
func (d *Directory) comesLocked(node NodeName, among Selector) bool {
	if node != "" {
		_, comes := d.expected[node]
		return comes && d.sessions[node] == nil
	}
	if d.anyLocked(among) {
		return false
	}
	for n := range d.expected {
		if among.Chooses(n) {
			return true
		}
	}
	return false
}

// Any reports whether a node that among chooses has a session.
func (d *Directory) Any(among Selector) bool {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return d.anyLocked(among)
}

// anyLocked is Any. The caller holds mu.
func (d *Directory) anyLocked(among Selector) bool {
	for n := range d.sessions {
		if among.Chooses(n) {
			return true
		}
	}
	return false
}

// expects reports whether a node is expected.
func (d *Directory) expects(n NodeName) bool {
	d.mu.RLock()
	defer d.mu.RUnlock()
	_, ok := d.expected[n]
	return ok && time.Now().Before(d.late)
}

// Lookup returns the session of a node, or nil.
func (d *Directory) Lookup(n NodeName) *Session {
	d.mu.RLock()
	defer d.mu.RUnlock()
	return d.sessions[n]
}

// Holds reports whether n has a session, or is expected to connect.
func (d *Directory) Holds(n NodeName) bool { return d.Lookup(n) != nil || d.expects(n) }

// ServesServices reports whether n has a session now, and if so whether its edge serves Services of the cluster.
func (d *Directory) ServesServices(n NodeName) (connected, serves bool) {
	s := d.Lookup(n)
	return s != nil, s != nil && s.Services
}

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

// Sessions returns the live sessions, sorted by node name.
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

// Reach returns Session.Reach of each connected node that has one.
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

// Dial opens a conn through the session of r.Node. If r names no node, Dial takes a random node of
// r.Among. The choice is random so that no node can attract all conns by having few conns or by
// answering fast. If the node is draining, full or gone, Dial tries the next one. If every node is
// draining, full or gone, and at least one is full, the request waits at the first full node.
func (d *Directory) Dial(ctx context.Context, r Request) (net.Conn, error) {
	if r.Node != "" {
		s := d.Lookup(r.Node)
		if s == nil {
			d.await(ctx, r.Node, nil)
			s = d.Lookup(r.Node)
		}
		if s == nil {
			return nil, d.noSuchNode("node %s is not connected", r.Node)
		}
		return s.Dialer.Dial(ctx, r)
	}
	err := error(nil)
	waits := !r.NoWait
	r.NoWait = true
	var full *Session // the first session that is at a limit
	sessions := d.shuffled(r.Among)
	if len(sessions) == 0 {
		d.await(ctx, "", r.Among)
		sessions = d.shuffled(r.Among)
	}
	for _, s := range sessions {
		r.Node = s.Node
		var c net.Conn
		if c, err = s.Dialer.Dial(ctx, r); err == nil {
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
		return full.Dialer.Dial(ctx, r)
	case err == nil:
		err = d.noSuchNode("no node %sis connected", among(r.Among))
	}
	return nil, err
}

// noSuchNode returns a NoSuchNode refusal and counts it.
func (d *Directory) noSuchNode(format string, args ...any) *Refusal {
	if d.Counters != nil {
		d.Counters.Refuse(NoSuchNode)
	}
	return Refusef(NoSuchNode, format, args...)
}

// among returns the text about a selector for an error; "" if it chooses every node.
func among(s Selector) string {
	if len(s) == 0 {
		return ""
	}
	return "of " + strings.Join(s, ", ") + " "
}

// shuffled returns the sessions of the nodes that among chooses, in random order. Sessions that
// are leaving come last.
func (d *Directory) shuffled(among Selector) []*Session {
	d.mu.RLock()
	sessions := make([]*Session, 0, len(d.sessions))
	for n, s := range d.sessions {
		if among.Chooses(n) {
			sessions = append(sessions, s)
		}
	}
	d.mu.RUnlock()
	// The iteration order of a map is not random enough: only its start is random.
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
