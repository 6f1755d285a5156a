package peers

import (
	"cmp"
	"context"
	"maps"
	"math/rand/v2"
	"net"
	"slices"

	"tunnel.example/tunnel/pkg/tunnel"
)

// Dial implements tunnel.Dialer. It dials through this replica's own session of the node, else
// through a replica that holds the node. If one replica refuses because the node has just left,
// Dial tries the next. A retry is safe, since nothing has been sent yet.
func (p *Peers) Dial(ctx context.Context, r tunnel.Request) (net.Conn, error) {
	if r.Node == "" {
		return p.dialAny(ctx, r)
	}
	var ways []tunnel.Dialer
	for _, link := range p.holders(r.Node) {
		ways = append(ways, link.Dialer)
	}
	if s := p.dir.Lookup(r.Node); s != nil {
		at := 0 // this replica's own session comes first, unless the edge has moved
		if p.hasLeft(s) {
			at = len(ways) // the edge has moved to another replica: its session there comes first
		}
		ways = slices.Insert(ways, at, s.Dialer)
	}
	var refusal error
	// All ways lead to one node. An open that reaches a limit waits at the first way: a conn by another
	// way would end when that replica ends.
	for _, way := range ways {
		c, err := way.Dial(ctx, r)
		if err == nil || !elsewhere(ctx, err) {
			return c, err
		}
		refusal = err
	}
	if refusal == nil {
		return p.dir.Dial(ctx, r) // counts the refusal and writes its text
	}
	return nil, refusal
}

// dialAny dials a random node of this replica, else a random node of another replica. If every
// node tried has reached a limit, dialAny waits for a node of this replica. If this replica has
// no such node, dialAny waits for a node of another replica. If no replica has such a node, dialAny waits for
// a node that this replica expects to connect.
func (p *Peers) dialAny(ctx context.Context, r tunnel.Request) (net.Conn, error) {
	waits, again := !r.NoWait, r
	r.NoWait = true
	var refusal error
	if p.dir.Any(r.Among) {
		c, err := p.dir.Dial(ctx, r)
		if err == nil || !elsewhere(ctx, err) {
			return c, err
		}
		refusal = err
	}
	var full func() (net.Conn, error) // dials a node at a limit again, and waits for room; nil: no node is at a limit
	if tunnel.CodeOf(refusal) == tunnel.Overloaded {
		full = func() (net.Conn, error) { return p.dir.Dial(ctx, again) }
	}
	for _, link := range p.sessions() {
		nodes := slices.DeleteFunc(p.nodesOf(link), func(n tunnel.NodeName) bool { return !r.Among.Chooses(n) })
		rand.Shuffle(len(nodes), func(i, j int) { nodes[i], nodes[j] = nodes[j], nodes[i] })
		for _, n := range nodes[:min(3, len(nodes))] {
			r.Node = n
			c, err := link.Dialer.Dial(ctx, r)
			if err == nil || !elsewhere(ctx, err) {
				return c, err
			}
			if full == nil && tunnel.CodeOf(err) == tunnel.Overloaded {
				again.Node = n
				full = func() (net.Conn, error) { return link.Dialer.Dial(ctx, again) }
			}
			refusal = cmp.Or(refusal, err)
		}
	}
	switch {
	case full != nil && waits:
		return full()
	case refusal == nil:
		return p.dir.Dial(ctx, again) // waits for an expected node, or counts the refusal and writes its text
	}
	return nil, refusal
}

// elsewhere reports whether a dial that failed with err may succeed through another session.
func elsewhere(ctx context.Context, err error) bool {
	if ctx.Err() != nil {
		return false
	}
	switch tunnel.CodeOf(err) {
	case tunnel.NoSuchNode, tunnel.Draining, tunnel.Gone, tunnel.Overloaded:
		return true
	}
	return false
}

// nodesOf returns the nodes of the replica whose session is link.
func (p *Peers) nodesOf(link *tunnel.Session) []tunnel.NodeName {
	p.mu.Lock()
	defer p.mu.Unlock()
	if r := p.ofLocked(link); r != nil {
		return slices.Collect(maps.Keys(r.nodes))
	}
	return nil
}
