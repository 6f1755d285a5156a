package egress

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"sync/atomic"
	"time"

	"tunnel/pkg/konnectivity"
	"tunnel/pkg/tunnel"
)

// Strategy is a way to find nodes that reach an address. The names are Konnectivity's
// (--proxy-strategies).
type Strategy string

// The strategies, in the order in which they are asked unless configured otherwise.
const (
	DestHost     Strategy = "destHost"     // a node that answers to exactly that name or address
	CIDR         Strategy = "cidr"         // the nodes with the narrowest network that holds the address
	DefaultRoute Strategy = "defaultRoute" // a node that says it reaches everything
	Default      Strategy = "default"      // any node
)

// Strategies returns all of them in that order.
func Strategies() []Strategy { return []Strategy{DestHost, CIDR, DefaultRoute, Default} }

// guesses reports whether what a strategy finds is said by nobody to reach the very address.
func (s Strategy) guesses() bool { return s == DefaultRoute || s == Default }

// chooser dials an address through a node that reaches it.
type chooser struct {
	// Set once.
	strategies []Strategy
	among      tunnel.Selector
	source     Source
	whole      bool // source names every node that there is, connected or not
	dialer     tunnel.Dialer
	nodes      tunnel.Nodes

	table atomic.Pointer[table] // replaced by run, and by newChooser before it; nil: not known yet
}

func newChooser(cfg Config, dialer tunnel.Dialer, nodes tunnel.Nodes) (*chooser, error) {
	c := &chooser{strategies: cfg.Strategies, among: cfg.Among, source: cfg.Identifiers, whole: cfg.Kubernetes, dialer: dialer, nodes: nodes}
	if len(c.strategies) == 0 {
		c.strategies = Strategies()
	}
	for _, s := range c.strategies {
		if !slices.Contains(Strategies(), s) {
			return nil, fmt.Errorf("strategy %q is not known: write some of %v", s, Strategies())
		}
	}
	c.look()
	return c, nil
}

// look takes what the source says.
func (c *chooser) look() {
	if c.source.Known() {
		c.table.Store(newTable(c.source.Identifiers()))
	}
}

// settle is how long changes of identifiers are gathered before they count: after an
// outage every node changes.
const settle = 50 * time.Millisecond

// run keeps the table as the source says until ctx is done.
func (c *chooser) run(ctx context.Context, guard func(what string, do func() error) error) error {
	for {
		changed := c.source.Changed()
		guard("the table of what nodes reach stays as it is", func() error { c.look(); return nil }) //nolint:errcheck // the next change tries again
		select {
		case <-changed:
		case <-ctx.Done():
			return nil
		}
		select {
		case <-time.After(settle):
		case <-ctx.Done():
			return nil
		}
	}
}

// errNoNode is what Konnectivity's server says, which people search for.
var errNoNode = errors.New("No agent available") //nolint:staticcheck // see above

// candidates returns the connected nodes that a strategy finds, in a random order. Where the
// address is somebody's and none of them is connected, it returns who is away.
func (c *chooser) candidates(t *table, s Strategy, host string) (connected, away []tunnel.NodeName) {
	var found []tunnel.NodeName
	switch s {
	case DestHost:
		found = t.host(host)
	case CIDR:
		found = t.network(host)
	case DefaultRoute:
		found = t.defaults
	case Default:
		return []tunnel.NodeName{""}, nil // any: the dialer takes one by chance
	}
	for _, n := range found {
		if c.nodes.Holds(n) {
			connected = append(connected, n)
		} else if s != DefaultRoute {
			away = append(away, n)
		}
	}
	if len(connected) > 0 {
		away = nil
	}
	rand.Shuffle(len(connected), func(i, j int) { connected[i], connected[j] = connected[j], connected[i] })
	return connected, away
}

// claimants returns the nodes that claim an address, as their own or as their pods', sorted, if
// there are two or more and each should have addresses of its own: Nodes should. Nobody can tell
// which of them is right.
func (c *chooser) claimants(t *table, host string) (nodes []tunnel.NodeName) {
	if !c.whole {
		return nil
	}
	if slices.Contains(c.strategies, CIDR) {
		nodes = t.holders(host)
	}
	if len(nodes) > 0 || slices.Contains(c.strategies, DestHost) {
		nodes = append(nodes, t.host(host)...)
	}
	slices.Sort(nodes)
	if nodes = slices.Compact(nodes); len(nodes) < 2 {
		return nil
	}
	return nodes
}

// refused returns the nodes, sorted, that claim a name which is none of theirs and nobody else's
// own. It leads to none of them, nor to any other node: what is there would be a surprise.
func (c *chooser) refused(t *table, host string) []tunnel.NodeName {
	if !slices.Contains(c.strategies, DestHost) || len(t.host(host)) > 0 {
		return nil
	}
	return slices.Sorted(slices.Values(t.refused[canonical(host)]))
}

// dial opens a conn to addr, host:port. The first strategy that finds a connected node
// decides; what a node refuses because it cannot serve just now is asked of the next. When all
// that are asked are at a limit, the first one is asked again, and the dial waits there. Nobody
// guesses while a node is connected that reaches the address: private addresses are there
// more than once, and another node would dial somebody else's, or say what its own policy is.
// Where every node is known, nobody guesses for one that is away, either; and what two nodes
// claim is nobody's.
func (c *chooser) dial(ctx context.Context, addr, caller string) (net.Conn, error) {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, tunnel.Refusef(tunnel.Unreachable, "%q is not host:port", addr)
	}
	t := c.table.Load()
	if t == nil {
		return nil, tunnel.Refusef(tunnel.NoSuchNode, "%v: the cluster's Nodes have not been read yet", errNoNode)
	}
	if nodes := c.claimants(t, host); nodes != nil {
		return nil, tunnel.Refusef(tunnel.Denied, "nodes %s and %s both claim %s (status.addresses or podCIDRs of their Nodes), so nobody is asked: correct one of them, or dial the node by its name", nodes[0], nodes[1], host)
	}
	if nodes := c.refused(t, host); len(nodes) > 0 {
		who := fmt.Sprintf("node %s claims", nodes[0])
		if len(nodes) > 1 {
			who = fmt.Sprintf("nodes %s and %s both claim", nodes[0], nodes[1])
		}
		return nil, tunnel.Refusef(tunnel.Denied, "%s %s, which does not count: it is not the Node's name; have kube-apiserver prefer InternalIP (--kubelet-preferred-address-types)", who, host)
	}
	ctx, cancel := context.WithTimeout(ctx, konnectivity.DialTimeout)
	defer cancel()
	last := error(tunnel.Refusef(tunnel.NoSuchNode, "%v", errNoNode))
	var away []tunnel.NodeName // whose address it is; the first strategy knows best
	owned := false             // it is somebody's of whom that is certain
	var full *tunnel.Request   // the first that a limit has refused
	for _, s := range c.strategies {
		if owned && (c.whole || s.guesses()) {
			continue
		}
		connected, others := c.candidates(t, s, host)
		if len(away) == 0 && !owned {
			away, owned = others, c.whole && len(others) > 0
		}
		for _, node := range connected {
			r := tunnel.Request{Node: node, Among: c.among, Category: name, Network: "tcp", Addr: addr, Caller: caller, NoWait: true}
			conn, err := c.dialer.Dial(ctx, r)
			if err == nil {
				return conn, nil
			}
			if full == nil && tunnel.CodeOf(err) == tunnel.Overloaded {
				full = &r
			}
			if ctx.Err() != nil || !elsewhere(err) {
				return nil, without(away, err)
			}
			code := tunnel.CodeOf(err)
			switch {
			case code != tunnel.NoSuchNode:
				last = err
			case node != "" && !slices.Contains(away, node):
				away = append(away, node) // it has left a moment ago
			}
			left := code == tunnel.NoSuchNode || code == tunnel.Gone
			owned = owned || !s.guesses() && (c.whole || !left)
		}
	}
	if full == nil {
		return nil, without(away, last)
	}
	full.NoWait = false
	conn, refusal := c.dialer.Dial(ctx, *full)
	if refusal != nil {
		return nil, without(away, refusal)
	}
	return conn, nil
}

// without says of a failure that the address belongs to nodes that are not connected: what
// another node has to say about it would lead astray.
func without(away []tunnel.NodeName, err error) error {
	if len(away) == 0 {
		return err
	}
	text, code := err.Error(), tunnel.CodeOf(err)
	if r, ok := errors.AsType[*tunnel.Refusal](err); ok {
		text = r.Text
	}
	who := fmt.Sprintf("%s is not connected", away[0])
	if len(away) > 1 {
		who = fmt.Sprintf("%s and %d more are not connected", away[0], len(away)-1)
	}
	switch code {
	case tunnel.NoSuchNode:
		return tunnel.Refusef(code, "%s: %s", text, who)
	case tunnel.Denied: // that node's policy is not what is in the way
		return tunnel.Refusef(tunnel.NoSuchNode, "%v: %s; by way of another node: %s", errNoNode, who, text)
	}
	return tunnel.Refusef(code, "%s; by way of another node: %s", who, text)
}

// elsewhere reports whether another node may do better: this one was not asked, or has gone
// before it answered.
func elsewhere(err error) bool {
	switch tunnel.CodeOf(err) {
	case tunnel.NoSuchNode, tunnel.Draining, tunnel.Overloaded, tunnel.Gone, tunnel.WrongSession:
		return true
	}
	return false
}
