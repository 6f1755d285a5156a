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

	"tunnel.example/tunnel/pkg/konnectivity"
	"tunnel.example/tunnel/pkg/tunnel"
)

// Strategy is a way to find nodes that reach an address. The names are those of Konnectivity's
// --proxy-strategies.
type Strategy string

// The strategies, in their default order.
const (
	DestHost     Strategy = "destHost"     // nodes with exactly that name or address
	CIDR         Strategy = "cidr"         // nodes with the narrowest network that contains the address
	DefaultRoute Strategy = "defaultRoute" // nodes that declare a default route
	Default      Strategy = "default"      // any connected node
)

// Strategies returns all strategies in their default order.
func Strategies() []Strategy { return []Strategy{DestHost, CIDR, DefaultRoute, Default} }

// fallback reports whether the strategy finds nodes that do not declare the address.
func (s Strategy) fallback() bool { return s == DefaultRoute || s == Default }

// chooser finds the nodes that reach an address, and dials through one of them.
type chooser struct {
	// Set once.
	source        Source // what each node reaches
	allNodesKnown bool   // source has every node of the cluster, connected or not
	dialer        tunnel.Dialer
	nodes         tunnel.Nodes
	services      func(addr string) ([]Endpoint, error) // see Config.Services

	rules atomic.Pointer[rules] // stored by newChooser, then by setRules; never nil
	table atomic.Pointer[table] // stored by newChooser, then by run; nil: not known yet
}

// rules say how to find nodes. They do not change: setRules replaces them.
type rules struct {
	strategies []Strategy      // in the order in which they are tried; at least one
	among      tunnel.Selector // nodes that Default may choose
}

func newChooser(cfg Config, dialer tunnel.Dialer, nodes tunnel.Nodes) (*chooser, error) {
	c := &chooser{
		source: cfg.Identifiers, allNodesKnown: cfg.Kubernetes, dialer: dialer, nodes: nodes,
		services: cfg.Services,
	}
	if err := c.setRules(cfg.Strategies, cfg.Among); err != nil {
		return nil, err
	}
	c.refresh()
	return c, nil
}

// setRules replaces the rules for the next dials.
func (c *chooser) setRules(strategies []Strategy, among tunnel.Selector) error {
	if len(strategies) == 0 {
		strategies = Strategies()
	}
	for _, s := range strategies {
		if !slices.Contains(Strategies(), s) {
			return fmt.Errorf("strategy %q is not known: write some of %v", s, Strategies())
		}
	}
	c.rules.Store(&rules{strategies, among})
	return nil
}

// refresh makes a new table from the source, if the source is known.
func (c *chooser) refresh() {
	if c.source.Known() {
		c.table.Store(newTable(c.source.Identifiers()))
	}
}

// settle is the pause between two new tables. After an outage every node changes, and one new table
// then covers many changes.
const settle = 50 * time.Millisecond

// run keeps the table up to date until ctx is done.
func (c *chooser) run(ctx context.Context, guard func(what string, do func() error) error) error {
	for {
		changed := c.source.Changed()
		//nolint:errcheck // the next change tries again
		guard("the table of the nodes' addresses stays as it is", func() error { c.refresh(); return nil })
		select {
		case <-changed:
		case <-ctx.Done():
			return nil
		}
		if c.table.Load() == nil {
			continue // no dial succeeds before the first table
		}
		select {
		case <-time.After(settle):
		case <-ctx.Done():
			return nil
		}
	}
}

// errNoNode has the words of Konnectivity's server, since users search for them.
var errNoNode = errors.New("No agent available") //nolint:staticcheck // Konnectivity's server writes the capital letter

// candidates returns the connected nodes that a strategy finds, in random order. If nodes declare the
// address but none of them is connected, candidates returns these nodes in away.
func (c *chooser) candidates(t *table, s Strategy, host string) (connected, away []tunnel.NodeName) {
	var found []tunnel.NodeName
	switch s {
	case DestHost:
		found = t.host(host)
	case CIDR:
		found = t.narrowestNetwork(host)
	case DefaultRoute:
		found = t.defaults
	case Default:
		return []tunnel.NodeName{""}, nil // "" lets the dialer choose a random node
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

// contenders returns the nodes that claim an address, as their own or for their pods, sorted, if two or
// more do. It applies only to Nodes of Kubernetes, which should not share addresses. The chooser cannot
// know which claim is right.
func (c *chooser) contenders(t *table, host string) (nodes []tunnel.NodeName) {
	if !c.allNodesKnown {
		return nil
	}
	strategies := c.rules.Load().strategies
	if slices.Contains(strategies, CIDR) {
		nodes = t.allNetworks(host)
	}
	if len(nodes) > 0 || slices.Contains(strategies, DestHost) {
		nodes = append(nodes, t.host(host)...)
	}
	slices.Sort(nodes)
	if nodes = slices.Compact(nodes); len(nodes) < 2 {
		return nil
	}
	return nodes
}

// refused returns the nodes, sorted, that claim the name host although they may not have it. It returns none if
// a node owns the name. A dial to such a name fails, because the caller could reach an unexpected machine.
func (c *chooser) refused(t *table, host string) []tunnel.NodeName {
	if !slices.Contains(c.rules.Load().strategies, DestHost) || len(t.host(host)) > 0 {
		return nil
	}
	return slices.Sorted(slices.Values(t.refused[canonical(host)]))
}

// dial opens a conn to addr, host:port, within DialTimeout.
//
// The strategies are tried in order, and the connected nodes that each finds in random order. A node that
// cannot serve now (mayRetryElsewhere) passes the dial on to the next. Any other answer is final. If all
// tried nodes are at a limit, the dial waits at the first of them, unless whenFull is noWait.
//
// If a connected node declares the address, fallback strategies are skipped, unless that node has
// just left. Private addresses are used more than once, so another node might reach a different
// machine, or answer with its own policy. If every node of the cluster is known (allNodesKnown), two more
// rules apply. After the first strategy that finds an owner, no other strategy is tried, even while the
// owner is not connected. And a dial to an address that two nodes claim is refused.
//
// o.node gets the node that was asked last.
func (c *chooser) dial(ctx context.Context, addr string, o *opening, whenFull patience) (net.Conn, error) {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, tunnel.Refusef(tunnel.Unreachable, "%q is not host:port", addr)
	}
	t := c.table.Load()
	if t == nil {
		return nil, tunnel.Refusef(tunnel.NoSuchNode, "%v: the cluster's Nodes have not been read yet", errNoNode)
	}
	if refusal := c.refuseClaims(t, host); refusal != nil {
		return nil, refusal
	}
	ctx, cancel := context.WithTimeout(ctx, konnectivity.DialTimeout)
	defer cancel()
	a := attempt{allNodesKnown: c.allNodesKnown, last: tunnel.Refusef(tunnel.NoSuchNode, "%v", errNoNode)}
	rules := c.rules.Load()
	for _, s := range rules.strategies {
		if a.skips(s) {
			continue
		}
		connected, away := c.candidates(t, s, host)
		a.ownersAway(away)
		for _, node := range connected {
			r := tunnel.Request{
				Node: node, Among: rules.among, Category: name, Network: "tcp", Addr: addr, Caller: o.caller, NoWait: true,
				ByPods: o.door == doorMirror, Chosen: &o.node, Trace: o.visit.Trace(),
			}
			conn, err := c.dialer.Dial(ctx, r)
			if err == nil {
				return conn, nil
			}
			if ctx.Err() != nil || !mayRetryElsewhere(err) {
				return nil, explainAway(a.away, err)
			}
			a.failed(s, r, err)
		}
	}
	// Every node that was tried has refused at once, because of NoWait. If a node was at a limit,
	// the dial now waits at that node.
	if a.full == nil || whenFull == noWait {
		return nil, explainAway(a.away, a.last)
	}
	a.full.NoWait = false
	conn, refusal := c.dialer.Dial(ctx, *a.full)
	if refusal != nil {
		return nil, explainAway(a.away, refusal)
	}
	return conn, nil
}

// patience says what a dial does if all nodes that may serve it are at a limit.
type patience bool

const (
	wait   patience = true
	noWait patience = false // it fails
)

// refuseClaims returns the refusal of a dial to a host that two nodes claim, or that only a node claims which
// may not have the host. It returns nil if the host may be dialled.
func (c *chooser) refuseClaims(t *table, host string) error {
	if nodes := c.contenders(t, host); nodes != nil {
		return tunnel.Refusef(tunnel.Denied, "nodes %s and %s both claim %s "+
			"(status.addresses or podCIDRs of their Nodes), so the dial is refused: "+
			"correct one of them, or dial the node by its name", nodes[0], nodes[1], host)
	}
	if nodes := c.refused(t, host); len(nodes) > 0 {
		who := fmt.Sprintf("node %s claims", nodes[0])
		if len(nodes) > 1 {
			who = fmt.Sprintf("nodes %s and %s both claim", nodes[0], nodes[1])
		}
		return tunnel.Refusef(tunnel.Denied, "%s %s, which does not count: it is not the Node's name; "+
			"have kube-apiserver prefer InternalIP (--kubelet-preferred-address-types)", who, host)
	}
	return nil
}

// attempt is what one dial has learned from the nodes that it has tried. One goroutine owns it.
type attempt struct {
	allNodesKnown bool // see chooser; set once

	ownerKnown bool              // a node owns the address for certain: no fallbacks
	away       []tunnel.NodeName // owners that are not connected, from the first strategy that found any
	full       *tunnel.Request   // the first request that a limit has refused; nil: none
	last       error             // the answer to the caller if no node serves the dial
}

// skips reports whether strategy s is left out because a node owns the address.
func (a *attempt) skips(s Strategy) bool { return a.ownerKnown && (a.allNodesKnown || s.fallback()) }

// ownersAway notes owners of the address that are not connected, as a strategy has found them. Owners from
// later strategies do not count.
func (a *attempt) ownersAway(away []tunnel.NodeName) {
	if len(a.away) == 0 && !a.ownerKnown {
		a.away, a.ownerKnown = away, a.allNodesKnown && len(away) > 0
	}
}

// failed notes that a node has refused the request r with err. Strategy s has found the node.
func (a *attempt) failed(s Strategy, r tunnel.Request, err error) {
	code := tunnel.CodeOf(err)
	if a.full == nil && code == tunnel.Overloaded {
		a.full = &r
	}
	switch {
	case code != tunnel.NoSuchNode:
		a.last = err
	case r.Node != "" && !slices.Contains(a.away, r.Node):
		a.away = append(a.away, r.Node) // the node has just left
	}
	left := code == tunnel.NoSuchNode || code == tunnel.Gone
	a.ownerKnown = a.ownerKnown || !s.fallback() && (a.allNodesKnown || !left)
}

// explainAway adds to the error of a dial that the nodes in away own the address and are not connected. Without
// them, the answer of another node would mislead the caller.
func explainAway(away []tunnel.NodeName, err error) error {
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
	case tunnel.Denied: // the policy of another node is not the cause
		return tunnel.Refusef(tunnel.NoSuchNode, "%v: %s; through another node: %s", errNoNode, who, text)
	}
	return tunnel.Refusef(code, "%s; through another node: %s", who, text)
}

// mayRetryElsewhere reports whether another node may serve a dial that has failed with err: the
// failed node has not dialled, or has left before it answered.
func mayRetryElsewhere(err error) bool {
	switch tunnel.CodeOf(err) {
	case tunnel.NoSuchNode, tunnel.Draining, tunnel.Overloaded, tunnel.Gone, tunnel.WrongSession:
		return true
	}
	return false
}
