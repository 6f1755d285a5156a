package https

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/hello"
	"tunnel.example/tunnel/pkg/tunnel"
)

// dialTimeout bounds dialling a target, including its TLS handshake. It is below the 15 s after
// which a caller must have learned that its node does not answer.
const dialTimeout = 10 * time.Second

// decision says how a connection is handled.
type decision struct {
	mode   Mode            // Passthrough or Terminate; Auto means that the front door closes the connection
	node   tunnel.NodeName // with Passthrough: the node. With Auto: the node that the SNI names; "": none
	reason string          // with Auto: why the front door closes the connection, and what to do
	alert  byte            // with Auto: the TLS alert for the caller
}

// decide decides how a connection that started with h is handled.
func (f *FrontDoor) decide(h hello.Hello) decision {
	if f.cfg.Mode == Terminate {
		return decision{mode: Terminate}
	}
	node, err := tunnel.ParseNodeName(h.ServerName)
	if err == nil && f.nodes.Holds(node) {
		return decision{mode: Passthrough, node: node}
	}
	switch {
	case f.cfg.terminates():
		return decision{mode: Terminate}
	case f.cfg.Mode == Passthrough && h.ServerName == "":
		return decision{
			reason: `it has no SNI, and tls = "passthrough" in [mode.cloud.https] terminates nothing`,
			alert:  alertMissingExtension,
		}
	case h.ServerName == "":
		return decision{
			reason: "it has no SNI, and this cloud cannot terminate TLS: " +
				"set clientca, cert and key in [mode.cloud.https], " +
				"or give kube-apiserver --kubelet-certificate-authority",
			alert: alertMissingExtension,
		}
	default:
		f.cfg.Counters.Refuse(tunnel.NoSuchNode) // no dial follows that would count it
		f.cfg.Counters.Doors[tunnel.DoorHTTPS].Failed(tunnel.NoSuchNode)
		return decision{
			node:   node,
			reason: fmt.Sprintf("its SNI %q is not a connected node", h.ServerName),
			alert:  alertUnrecognizedName,
		}
	}
}

// passthroughCounter counts the connections that are passed through.
type passthroughCounter struct {
	mu     sync.Mutex             // guards the following
	counts map[passthroughKey]int // never 0
}

// passthroughKey is a range of sources and a node.
type passthroughKey struct {
	sources netip.Prefix // the zero prefix: all strangers together
	node    tunnel.NodeName
}

// strangersTogether is how many times the limit of one source all strangers together may have connections to one node.
// With the defaults that is half of the node's conns, so callers in allowfrom always get some.
const strangersTogether = 8

// admit counts a connection from a to node, and returns true. It returns false, and counts nothing, if one of these has
// as many connections to node as it may have:
//   - the source of a, which is an IPv4 address or an IPv6 /64: limit;
//   - the IPv6 /56 of a: twice limit; its /48: four times;
//   - all strangers together: strangersTogether times limit.
//
// The caller calls release when the connection has ended.
func (p *passthroughCounter) admit(a netip.Addr, node tunnel.NodeName, limit int) (release func(), ok bool) {
	type bound struct {
		key  passthroughKey
		most int
	}
	source := auth.Group(a)
	bounds := []bound{{passthroughKey{node: node}, strangersTogether * limit}, {passthroughKey{source, node}, limit}}
	if source.Addr().Is6() {
		for i, bits := range []int{56, 48} {
			wide, _ := source.Addr().Prefix(bits) // a valid length of IPv6
			bounds = append(bounds, bound{passthroughKey{wide, node}, 2 << i * limit})
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, b := range bounds {
		if p.counts[b.key] >= b.most {
			return nil, false
		}
	}
	if p.counts == nil {
		p.counts = make(map[passthroughKey]int)
	}
	for _, b := range bounds {
		p.counts[b.key]++
	}
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		for _, b := range bounds {
			if p.counts[b.key]--; p.counts[b.key] == 0 {
				delete(p.counts, b.key)
			}
		}
	}, true
}

// trusts reports whether the operator listed the source a in allowfrom. A network of all addresses
// does not count: it names no particular source.
func (f *FrontDoor) trusts(a netip.Addr) bool {
	for _, p := range f.lists.Load().AllowFrom {
		if p.Bits() > 0 && p.Contains(a) {
			return true
		}
	}
	return false
}

// pass splices c, which came from source, to a target of node. If it returns an error, c has not
// been used; otherwise c has ended.
func (f *FrontDoor) pass(live context.Context, c *clientConn, source netip.Addr, node tunnel.NodeName,
	target string, log *slog.Logger) error {
	visit := f.cfg.Sink.Arrived(&f.cfg.Counters.Doors[tunnel.DoorHTTPS])
	who := func() tunnel.Event { return passed(c, node) }
	if !f.trusts(source) {
		limit := f.lists.Load().ConnsPerAddress
		release, ok := f.passthroughs.admit(source, node, limit)
		if !ok {
			f.cfg.Counters.Limited(tunnel.LimitConnsPerAddress)
			f.warn(denyConnsPerAddress, "https connection denied",
				"frontend", c.LocalAddr().String(), "node", string(node),
				"err", fmt.Sprintf("%s: its address has %d connections to the node, or all addresses that are not in allowfrom "+
					"have %d: put the address into allowfrom of [mode.cloud.https] if it may have more",
					c.RemoteAddr(), limit, strangersTogether*limit))
			return tunnel.Refusef(tunnel.Overloaded,
				"limit connsperaddress: %d connections from one address to node %s are open, or %d from all strangers",
				limit, node, strangersTogether*limit)
		}
		defer release()
	}
	ctx, cancel := context.WithTimeout(live, dialTimeout)
	defer cancel()
	conn, err := f.dialer.Dial(ctx, tunnel.Request{
		Node:     node,
		Category: Name,
		Network:  "tcp",
		Addr:     target,
		Caller:   c.RemoteAddr().String(),
		Trace:    visit.Trace(),
	})
	if err != nil {
		err = dialError(ctx, err)
		visit.Failed(err, who) // not Refused: the caller still gets an answer, and that answer is counted
		c.passTold = true
		return err
	}
	visit.Opened(who)
	sent, received, err := tunnel.Splice(live, c, conn)
	log.Debug("https connection passed through", "node", string(node), "remote", c.RemoteAddr().String(),
		"bytes", sent+received, "dur", visit.Since(), "err", err)
	visit.Ended(sent, received, err, who)
	return nil
}

// passed describes a connection that is, or should have been, passed through. The front door knows only the address of
// the caller: the caller and the kubelet authenticate each other.
func passed(c *clientConn, node tunnel.NodeName) tunnel.Event {
	remote := c.RemoteAddr().String()
	return tunnel.Event{
		Kind: tunnel.EventHTTPS, Node: node, Caller: remote, Remote: remote, Door: c.LocalAddr().String(), Target: c.target,
	}
}

// dialError turns our own timeout into a refusal, as if the edge had refused.
func dialError(ctx context.Context, err error) error {
	if ctx.Err() == context.DeadlineExceeded && tunnel.CodeOf(err) != tunnel.Overloaded {
		return tunnel.Refusef(tunnel.Timeout, "no answer within %v: %v", dialTimeout, err)
	}
	return err
}
