package peers

import (
	"context"
	"net/netip"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

// replica is what another replica has told this one. Peers.mu guards it.
type replica struct {
	id     string
	link   *tunnel.Session // the session that the replica has opened with this one; nil: lost
	lost   *time.Timer     // timer that forgets the replica; nil while link is set
	addrs  []netip.Addr    // its addresses for clients, at most two
	nodes  map[tunnel.NodeName]held
	coming map[tunnel.NodeName]held // the next full list of nodes, of which messages are still missing; nil: none
	leaves bool                     // the replica is about to stop: no edge and no name should lead to it
}

// ID implements stream.Replicas.
func (p *Peers) ID() string { return p.id }

// Counters implements stream.Replicas.
func (p *Peers) Counters() *tunnel.Counters { return p.counters }

// Joined implements stream.Replicas.
func (p *Peers) Joined() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var ids []string
	for id, r := range p.replicas {
		if r.link != nil {
			ids = append(ids, id)
		}
	}
	return ids
}

// Staying implements stream.Replicas.
func (p *Peers) Staying() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	var ids []string
	for id, r := range p.replicas {
		if r.link != nil && !r.leaves {
			ids = append(ids, id)
		}
	}
	return ids
}

// Attach implements stream.Replicas.
func (p *Peers) Attach(id string, addrs []string, s *tunnel.Session) (replaced *tunnel.Session) {
	var reach []netip.Addr
	for _, text := range addrs {
		a, err := netip.ParseAddr(text)
		if err == nil && a.Zone() == "" && len(reach) < 2 { // a zone may hold anything, even a line break
			reach = append(reach, a.Unmap())
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	r := p.replicas[id]
	if r == nil {
		r = &replica{id: id}
		p.replicas[id] = r
	}
	if r.lost != nil {
		r.lost.Stop()
		r.lost = nil
	}
	replaced = r.link
	r.link, r.addrs = s, reach
	p.changed.Notify()
	for _, c := range p.links {
		c.HurryUp() // since the new replica has reached this one, the client for its address can probably join it
	}
	return replaced
}

// Detach implements stream.Replicas.
func (p *Peers) Detach(s *tunnel.Session) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	r := p.ofLocked(s)
	if r == nil {
		return false
	}
	r.link, r.coming = nil, nil
	if p.ended {
		delete(p.replicas, r.id)
	} else {
		r.lost = time.AfterFunc(forgetReplica, func() { p.forget(r) })
	}
	p.changed.Notify()
	return true
}

// ofLocked returns the replica whose session is s, or nil if s has ended or was replaced. The
// caller holds mu.
func (p *Peers) ofLocked(s *tunnel.Session) *replica {
	for _, r := range p.replicas {
		if r.link == s {
			return r
		}
	}
	return nil
}

// Leave implements stream.Replicas.
func (p *Peers) Leave() {
	close(p.left)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.changed.Notify()
}

// NodesMoved implements stream.Replicas. Sessions of konnectivity agents do not count: agents cannot be told to
// move. NodesMoved counts ten times a second, and not at each change: thousands of edges may move at once.
func (p *Peers) NodesMoved(ctx context.Context) int {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		left := p.onlyHere()
		if left == 0 {
			return 0
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return left
		}
	}
}

// onlyHere returns how many edges have a session with this replica, and none with another replica that is
// connected and not about to stop.
func (p *Peers) onlyHere() (n int) {
	sessions := p.dir.Sessions()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range sessions {
		if !s.Agent && !p.staysLocked(s.Node) {
			n++
		}
	}
	return n
}

// staysLocked reports whether a replica that is connected and not about to stop holds n. The caller holds mu.
func (p *Peers) staysLocked(n tunnel.NodeName) bool {
	for _, r := range p.replicas {
		if _, ok := r.nodes[n]; ok && r.link != nil && !r.leaves {
			return true
		}
	}
	return false
}

// forget removes a replica that has not come back.
func (p *Peers) forget(r *replica) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if r.link != nil || p.replicas[r.id] != r {
		return
	}
	delete(p.replicas, r.id)
	p.changed.Notify()
	p.log.Info("another replica is gone for good", "replica", r.id, "nodes", len(r.nodes))
}

// forgetLost removes the lost replicas, and makes Detach remove a replica at once from now on.
// Connected replicas stay: the server has yet to end their sessions, and the conns between them
// and this replica.
func (p *Peers) forgetLost() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended = true
	for id, r := range p.replicas {
		if r.lost != nil {
			r.lost.Stop()
			delete(p.replicas, id)
		}
	}
}

// sessions returns the sessions that other replicas have opened with this one.
func (p *Peers) sessions() []*tunnel.Session {
	p.mu.Lock()
	defer p.mu.Unlock()
	var all []*tunnel.Session
	for _, r := range p.replicas {
		if r.link != nil {
			all = append(all, r.link)
		}
	}
	return all
}
