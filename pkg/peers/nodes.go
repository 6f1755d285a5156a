package peers

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"tunnel.example/tunnel/pkg/stream"
	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

const (
	// tellPause is how long changes are gathered into one message.
	tellPause = 20 * time.Millisecond
	// tellBatch is how many nodes one message may name. A name has at most 253 bytes and an
	// instance at most 36, so a batch fits conn.MaxMessage.
	tellBatch = 200
	// tellReach is how many bytes of reach one message may hold. The reach of any edge fits
	// tellReach. A full batch with tellReach bytes of reach fits conn.MaxMessage.
	tellReach = stream.MaxReach
	// sameTime is the difference in age within which two sessions count as equally old. An age is
	// slightly out of date on arrival. Of two sessions that are equally old, neither may end the
	// other.
	sameTime = time.Second
)

// held is a session of a node with another replica.
type held struct {
	since    time.Time // when the session began, by this replica's clock
	instance string    // instance of the edge; "" for a konnectivity agent, which has none
	reach    string    // addresses that the edge says it reaches
	services bool      // the edge serves Services of the cluster
}

// before reports whether h takes precedence over another session of the node. An edge's session
// precedes an agent's. Otherwise the later session precedes.
func (h held) before(other held) bool {
	if agent := h.instance == ""; agent != (other.instance == "") {
		return !agent
	}
	return h.since.After(other.since)
}

// publish notes that this replica has joined the replica at the other end of s. The function that it
// returns tells that replica the nodes of this replica, until s ends.
func (p *Peers) publish(s *tunnel.Session) (run func(), err error) {
	id := s.Instance
	p.mu.Lock()
	defer p.mu.Unlock()
	switch by := p.joined[id]; {
	case id == p.id:
		return nil, stream.ErrSelf
	case by != nil && by.Remote != s.Remote:
		return nil, stream.ErrTwice
	}
	p.joined[id] = s
	return func() {
		defer func() { // runs also when tell panics
			p.mu.Lock()
			defer p.mu.Unlock()
			if p.joined[id] == s {
				delete(p.joined, id)
			}
		}()
		p.tell(s)
	}, nil
}

// tell sends all nodes of this replica over s, then each change, until s has ended.
func (p *Peers) tell(s *tunnel.Session) {
	told := make(map[tunnel.NodeName]*tunnel.Session)
	full, left := true, p.left
	for {
		changed := p.dir.Changed()
		var news pb.Nodes
		if tunnel.IsClosed(p.left) {
			news.Leaving, left = true, nil
		}
		now := p.dir.Sessions()
		there := make(map[tunnel.NodeName]bool, len(now))
		for _, session := range now {
			there[session.Node] = true
			if told[session.Node] != session {
				told[session.Node] = session
				news.Held = append(news.Held, heldOf(session))
			}
		}
		for n := range told {
			if !there[n] {
				delete(told, n)
				news.Gone = append(news.Gone, string(n))
			}
		}
		if full || news.Leaving || len(news.Held)+len(news.Gone) > 0 {
			post(s, &news, full)
			full = false
		}
		select {
		case <-changed:
		case <-left:
		case <-s.Done():
			return
		}
		select {
		case <-time.After(tellPause):
		case <-s.Done():
			return
		}
	}
}

// heldOf describes a session of this replica for the other replicas.
func heldOf(s *tunnel.Session) *pb.Held {
	return &pb.Held{
		Node: string(s.Node), Reach: s.Reach, Instance: s.Instance, Services: s.Services,
		AgeMs: uint64(max(0, time.Since(s.Since).Milliseconds())), //nolint:gosec // not negative
	}
}

// post sends news in messages of limited length.
func post(s *tunnel.Session, news *pb.Nodes, full bool) {
	for {
		part := &pb.Nodes{Full: full, Leaving: news.Leaving}
		n := 0
		for size := 0; n < min(tellBatch, len(news.Held)) && size+len(news.Held[n].GetReach()) <= tellReach; n++ {
			size += len(news.Held[n].GetReach())
		}
		part.Held, news.Held = news.Held[:n], news.Held[n:]
		m := min(tellBatch-n, len(news.Gone))
		part.Gone, news.Gone = news.Gone[:m], news.Gone[m:]
		part.More = len(news.Held)+len(news.Gone) > 0
		s.Send(stream.NodesMessage(part)) //nolint:errcheck // Send fails only when the session has ended
		if !part.More {
			return
		}
		full = false
	}
}

// longestInstance bounds the instance that another replica claims, in bytes. It is longer than any
// instance that an edge may have.
const longestInstance = 512

// Learn implements stream.Replicas.
func (p *Peers) Learn(from *tunnel.Session, news *pb.Nodes) (bool, error) {
	now := time.Now()
	claims := make(map[tunnel.NodeName]held, len(news.GetHeld()))
	for _, h := range news.GetHeld() {
		n, err := tunnel.ParseNodeName(h.GetNode())
		if err != nil {
			return false, fmt.Errorf("nodes: %w", err)
		}
		age := time.Duration(min(h.GetAgeMs(), uint64((1<<62)/time.Millisecond))) * time.Millisecond
		instance := h.GetInstance()
		claims[n] = held{
			since: now.Add(-age), instance: instance[:min(len(instance), longestInstance)], reach: h.GetReach(),
			services: h.GetServices(),
		}
	}
	changed, err := p.learn(from, news, claims)
	if err != nil {
		return false, err
	}
	for n, claim := range claims {
		p.yield(n, claim)
		p.dir.Unexpect(n)
	}
	return changed, nil
}

// learn stores what one message of another replica says: which nodes it holds, and whether it is about to stop. learn
// reports whether the message changes what Staying returns.
func (p *Peers) learn(
	from *tunnel.Session, news *pb.Nodes, claims map[tunnel.NodeName]held,
) (changed bool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	r := p.ofLocked(from)
	if r == nil {
		return false, nil // the replica has opened a newer session, by which it tells all nodes again
	}
	if news.GetFull() {
		r.coming = make(map[tunnel.NodeName]held, len(claims))
	}
	into := r.nodes
	if into == nil && r.coming == nil {
		return false, errors.New("nodes: a change came before the full list")
	}
	if r.coming != nil {
		into = r.coming
	}
	maps.Copy(into, claims)
	for _, n := range news.GetGone() {
		delete(into, tunnel.NodeName(n))
	}
	changed = r.leaves != news.GetLeaving()
	r.leaves = news.GetLeaving()
	if news.GetMore() {
		return changed, nil
	}
	if r.coming != nil {
		p.log.Info("another replica has sent its list of nodes",
			"replica", r.id, "nodes", len(into), "remote", from.Remote)
		r.nodes, r.coming = r.coming, nil
	}
	p.changed.Notify()
	return changed, nil
}

// yield ends this replica's session of a node if another process has joined as the node at another
// replica, and later. Either the edge was restarted, or two edges use one name. A session of the same
// process stays, since it may have conns that are still ending. The session of a konnectivity agent
// at another replica ends no session of this replica, and yield ends no agent's session.
func (p *Peers) yield(n tunnel.NodeName, claim held) {
	ours := p.dir.Lookup(n)
	if ours == nil || ours.Agent || ours.Instance == claim.instance || !newer(claim, ours) {
		return
	}
	ours.Close(stream.ErrJoinedElsewhere)
}

// newer reports whether another replica's claim takes precedence over this replica's session.
func newer(claim held, ours *tunnel.Session) bool {
	mine := held{since: ours.Since.Add(sameTime)}
	if !ours.Agent {
		mine.instance = "an edge's"
	}
	return claim.before(mine)
}

// hasLeft reports whether the edge of s, a session of this replica, has opened another session with
// another replica instead. It also returns true if s is a konnectivity agent's and another replica
// has a session with an edge of the same node.
func (p *Peers) hasLeft(s *tunnel.Session) bool {
	if s.All {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, r := range p.replicas {
		if h, ok := r.nodes[s.Node]; ok && r.link != nil && newer(h, s) {
			return true
		}
	}
	return false
}

// holders returns the sessions of the connected replicas that hold n, in order of precedence.
func (p *Peers) holders(n tunnel.NodeName) []*tunnel.Session {
	type holder struct {
		link *tunnel.Session
		held held
	}
	p.mu.Lock()
	var all []holder
	for _, r := range p.replicas {
		if h, ok := r.nodes[n]; ok && r.link != nil {
			all = append(all, holder{r.link, h})
		}
	}
	p.mu.Unlock()
	slices.SortFunc(all, func(a, b holder) int {
		switch {
		case a.held.before(b.held):
			return -1
		case b.held.before(a.held):
			return 1
		}
		return 0
	})
	links := make([]*tunnel.Session, len(all))
	for i, h := range all {
		links[i] = h.link
	}
	return links
}

// Holds implements tunnel.Nodes. A node is held if it can be reached through any replica.
func (p *Peers) Holds(n tunnel.NodeName) bool {
	return p.dir.Holds(n) || len(p.holders(n)) > 0
}

// ServesServices reports whether n has a session with any replica now, and if so whether its edge serves Services of
// the cluster.
func (p *Peers) ServesServices(n tunnel.NodeName) (connected, serves bool) {
	connected, serves = p.dir.ServesServices(n)
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, r := range p.replicas {
		if h, ok := r.nodes[n]; ok && r.link != nil {
			connected, serves = true, serves || h.services
		}
	}
	return connected, serves
}

// Connected implements tunnel.Nodes.
func (p *Peers) Connected() []tunnel.NodeName {
	set := make(map[tunnel.NodeName]bool)
	for _, n := range p.dir.Connected() {
		set[n] = true
	}
	p.mu.Lock()
	for _, r := range p.replicas {
		if r.link != nil {
			for n := range r.nodes {
				set[n] = true
			}
		}
	}
	p.mu.Unlock()
	return slices.Sorted(maps.Keys(set))
}

// Reach returns what each node says it reaches. If this replica has a session of the node, that
// session counts; otherwise the session at another replica that takes precedence.
func (p *Peers) Reach() map[tunnel.NodeName]string {
	all := make(map[tunnel.NodeName]string)
	best := make(map[tunnel.NodeName]held)
	p.mu.Lock()
	for _, r := range p.replicas {
		for n, h := range r.nodes {
			if b, ok := best[n]; r.link != nil && (!ok || h.before(b)) {
				best[n], all[n] = h, h.reach
			}
		}
	}
	p.mu.Unlock()
	maps.Copy(all, p.dir.Reach())
	return all
}

// Changed returns a channel that is closed when a node has come or gone at any replica. To miss
// no change, call Changed before reading the nodes.
func (p *Peers) Changed() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.changed.Next()
}

// Addrs returns the addresses of the replica that holds n: this replica if it holds n.
func (p *Peers) Addrs(n tunnel.NodeName) []netip.Addr {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.dir.Holds(n) {
		return p.ownLocked()
	}
	var best holding
	for _, r := range p.replicas {
		h, ok := r.nodes[n]
		if this := (holding{r, h}); ok && this.before(best) {
			best = this
		}
	}
	if best.replica == nil {
		return nil
	}
	return p.addrsOfLocked(best.replica)
}

// holding is a session of a node with a replica to which the node's name may lead. The replica may be lost, since it
// may soon come back.
type holding struct {
	replica *replica // nil: there is no session
	held    held
}

// before reports whether the name of the node leads to h rather than to other. A connected replica precedes a lost one.
// Of two connected or two lost replicas, the session decides.
func (h holding) before(other holding) bool {
	if other.replica == nil {
		return true
	}
	if connected := h.replica.link != nil; connected != (other.replica.link != nil) {
		return connected
	}
	return h.held.before(other.held)
}

// addrsOfLocked returns the addresses that lead to the nodes of r: the addresses of r itself. If r has told none or is
// about to stop, they are the addresses that lead to this replica's own nodes, since a replica with these addresses
// relays. The caller holds mu.
func (p *Peers) addrsOfLocked(r *replica) []netip.Addr {
	if len(r.addrs) == 0 || r.leaves {
		return p.ownLocked()
	}
	return r.addrs
}

// ownLocked returns the addresses that lead to this replica's nodes: its own addresses, or the
// addresses of another replica when this replica is about to stop. The caller holds mu.
func (p *Peers) ownLocked() []netip.Addr {
	if !tunnel.IsClosed(p.left) {
		return p.cfg.Addrs
	}
	best := ""
	for id, r := range p.replicas {
		if r.link != nil && !r.leaves && len(r.addrs) > 0 && (best == "" || id < best) {
			best = id
		}
	}
	if best == "" {
		return p.cfg.Addrs
	}
	return p.replicas[best].addrs
}

// All returns the addresses that lead to each node that any replica holds.
func (p *Peers) All() map[tunnel.NodeName][]netip.Addr {
	all := make(map[tunnel.NodeName][]netip.Addr)
	best := make(map[tunnel.NodeName]holding)
	p.mu.Lock()
	for _, r := range p.replicas {
		addrs := p.addrsOfLocked(r)
		for n, h := range r.nodes {
			if this := (holding{r, h}); this.before(best[n]) {
				best[n], all[n] = this, addrs
			}
		}
	}
	own := p.ownLocked()
	p.mu.Unlock()
	for _, n := range p.dir.Connected() {
		all[n] = own
	}
	return all
}

// Hears reports whether All includes the nodes of the replica that clients reach at a.
func (p *Peers) Hears(a netip.Addr) bool {
	if slices.Contains(p.cfg.Addrs, a) {
		return true
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, r := range p.replicas {
		if r.nodes != nil && slices.Contains(r.addrs, a) {
			return true
		}
	}
	return false
}
