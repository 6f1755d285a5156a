package stream

import (
	"context"
	"maps"
	"math/rand/v2"
	"net"
	"slices"

	"tunnel/pkg/tunnel"
)

// Dial implements tunnel.Dialer: through our own session of the node, else through the
// replica that holds it. What is refused there because the node has just left is asked
// of the next, since nothing has been sent yet.
func (p *Peers) Dial(ctx context.Context, r tunnel.Request) (net.Conn, error) {
	if r.Node == "" {
		return p.dialAny(ctx, r)
	}
	var ways []tunnel.Dialer
	for _, link := range p.holders(r.Node) {
		ways = append(ways, link)
	}
	if s := p.dir.Lookup(r.Node); s != nil {
		at := 0 // our own first,
		if p.hasLeft(s) {
			at = len(ways) // unless the edge has turned to another replica
		}
		ways = slices.Insert(ways, at, tunnel.Dialer(s))
	}
	var refusal error
	var full tunnel.Dialer // the first way on which a limit is reached
	waits := !r.NoWait
	for _, way := range ways {
		r.NoWait = !waits || len(ways) > 1
		c, err := way.Dial(ctx, r)
		if err == nil || !elsewhere(ctx, err) {
			return c, err
		}
		if full == nil && r.NoWait && tunnel.CodeOf(err) == tunnel.Overloaded {
			full = way
		}
		refusal = err
	}
	if full != nil && waits {
		r.NoWait = false
		return full.Dial(ctx, r)
	}
	if refusal == nil {
		return p.dir.Dial(ctx, r) // counts and words the refusal
	}
	return nil, refusal
}

// dialAny takes a node of ours by chance, else one of another replica. When all are at a
// limit, it waits for one of ours, or for one of another replica.
func (p *Peers) dialAny(ctx context.Context, r tunnel.Request) (net.Conn, error) {
	waits, again := !r.NoWait, r
	r.NoWait = true
	c, refusal := p.dir.Dial(ctx, r)
	if refusal == nil || !elsewhere(ctx, refusal) {
		return c, refusal
	}
	var full func() (net.Conn, error) // dials where a limit is reached, and waits
	if tunnel.CodeOf(refusal) == tunnel.Overloaded {
		full = func() (net.Conn, error) { return p.dir.Dial(ctx, again) }
	}
	for _, link := range p.sessions() {
		p.mu.Lock()
		nodes := slices.Collect(maps.Keys(link.replica.nodes))
		p.mu.Unlock()
		nodes = slices.DeleteFunc(nodes, func(n tunnel.NodeName) bool { return !r.Among.Chooses(n) })
		rand.Shuffle(len(nodes), func(i, j int) { nodes[i], nodes[j] = nodes[j], nodes[i] })
		for _, n := range nodes[:min(3, len(nodes))] {
			r.Node = n
			c, err := link.Dial(ctx, r)
			if err == nil || !elsewhere(ctx, err) {
				return c, err
			}
			if full == nil && tunnel.CodeOf(err) == tunnel.Overloaded {
				again.Node = n
				full = func() (net.Conn, error) { return link.Dial(ctx, again) }
			}
		}
	}
	if full != nil && waits {
		return full()
	}
	return nil, refusal
}

// elsewhere reports whether what was refused may work by another way.
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

// relayModule answers the requests of a replica that we have joined. It asks our own
// directory, so a request goes no further than here.
type relayModule struct{ dir *tunnel.Directory }

func (relayModule) Name() string              { return categoryRelay }
func (relayModule) Run(context.Context) error { return nil }

func (m relayModule) Routes() map[string]tunnel.Handler {
	return map[string]tunnel.Handler{
		tunnel.TypeOpen: func(_ context.Context, from *tunnel.Session, msg *tunnel.Message) error {
			return from.Serve(msg, m.dir.Dial)
		},
	}
}
