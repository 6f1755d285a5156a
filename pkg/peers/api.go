package peers

import (
	"context"
	"net"
	"slices"
	"strings"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

// An open with the node ownNode and the module categoryAPI is for the API of the replica itself. No node may be
// named ownNode (tunnel.NodeName.MayJoin). A replica of a release without the API finds no such node, and refuses.
const (
	ownNode     tunnel.NodeName = "localhost"
	categoryAPI string          = "api"
)

// Replica is another replica that has joined this one.
type Replica struct {
	ID       string
	Remote   string    // its address, as this replica sees it
	Since    time.Time // when it joined
	Software string    // the version that it says it runs
	Nodes    int       // how many nodes it holds
	Leaving  bool      // it is about to stop

	link *tunnel.Session
}

// Dial opens a conn to the API of the replica, over its session with this one.
func (r Replica) Dial(ctx context.Context) (net.Conn, error) {
	return r.link.Dialer.Dial(ctx, tunnel.Request{
		Node: ownNode, Category: categoryAPI, Network: "tcp", Addr: net.JoinHostPort(categoryAPI, "0"),
	})
}

// Others returns the replicas that have joined this one, sorted by address and id.
func (p *Peers) Others() []Replica {
	p.mu.Lock()
	var all []Replica
	for _, r := range p.replicas {
		if r.link == nil {
			continue
		}
		all = append(all, Replica{
			ID: r.id, Remote: r.link.Remote, Since: r.link.Since, Software: r.link.Software,
			Nodes: len(r.nodes), Leaving: r.leaves, link: r.link,
		})
	}
	p.mu.Unlock()
	slices.SortFunc(all, func(a, b Replica) int { return strings.Compare(a.Remote+a.ID, b.Remote+b.ID) })
	return all
}

// Way returns the replica that a dial to a node tries first. If here is true, that is this replica, and other is
// empty. ok is false if no replica holds the node.
func (p *Peers) Way(n tunnel.NodeName) (other Replica, here, ok bool) {
	own := p.dir.Lookup(n)
	if own != nil && !p.hasLeft(own) {
		return Replica{}, true, true
	}
	others := p.Others()
	for _, link := range p.holders(n) {
		if i := slices.IndexFunc(others, func(r Replica) bool { return r.link == link }); i >= 0 {
			return others[i], false, true
		}
	}
	return Replica{}, own != nil, own != nil
}

// serve dials for an open of another replica: a target through a node of this replica, or this replica's API.
// It does not use p.Dial, which could relay a request a second time.
func (p *Peers) serve(ctx context.Context, r tunnel.Request) (net.Conn, error) {
	if r.Node == ownNode && r.Category == categoryAPI && p.cfg.API != nil {
		return p.cfg.API(ctx)
	}
	return p.dir.Dial(ctx, r)
}
