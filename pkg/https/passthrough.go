package https

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"tunnel/pkg/auth"
	"tunnel/pkg/tunnel"
)

// dialTimeout bounds the dialling of a target, its TLS handshake included. It is
// below the 15 s after which a caller must know that its node does not answer.
const dialTimeout = 10 * time.Second

// decision is what becomes of a connection.
type decision struct {
	what   Mode            // Auto: it is closed
	node   tunnel.NodeName // Passthrough: to here
	reason string          // closed: why, and what to do
	alert  byte            // closed: how the caller is told
}

// decide says what becomes of a connection that started with h.
func (f *FrontDoor) decide(h hello) decision {
	if f.cfg.Mode == Terminate {
		return decision{what: Terminate}
	}
	node, err := tunnel.ParseNodeName(h.serverName)
	if err == nil && f.nodes.Holds(node) {
		return decision{what: Passthrough, node: node}
	}
	switch {
	case f.cfg.terminates():
		return decision{what: Terminate}
	case f.cfg.Mode == Passthrough && h.serverName == "":
		return decision{reason: `it has no SNI, and tls = "passthrough" in [mode.cloud.https] terminates nothing`, alert: alertMissingExtension}
	case h.serverName == "":
		return decision{reason: "it has no SNI and there is nothing to terminate it with: set clientca, cert and key in [mode.cloud.https], or give kube-apiserver --kubelet-certificate-authority", alert: alertMissingExtension}
	default:
		f.cfg.Counters.Refuse(tunnel.NoSuchNode) // nobody dials, so nobody else counts it
		return decision{reason: fmt.Sprintf("its SNI %q is not a connected node", h.serverName), alert: alertUnrecognizedName}
	}
}

// passed counts the connections that are passed through.
type passed struct {
	most int // of one source to one node; set once

	mu    sync.Mutex
	count map[passedKey]int // only those that are not 0
}

type passedKey struct {
	source netip.Prefix // see auth.Group
	node   tunnel.NodeName
}

// admit counts one more connection from a to node, unless that is one too many.
// release is called once, when the connection has ended.
func (p *passed) admit(a netip.Addr, node tunnel.NodeName) (release func(), ok bool) {
	key := passedKey{auth.Group(a), node}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.count[key] >= p.most {
		return nil, false
	}
	if p.count == nil {
		p.count = make(map[passedKey]int)
	}
	p.count[key]++
	return func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.count[key]--; p.count[key] == 0 {
			delete(p.count, key)
		}
	}, true
}

// trusts reports whether the operator named the source a in allowfrom. A network of all
// addresses names nobody.
func (f *FrontDoor) trusts(a netip.Addr) bool {
	for _, p := range f.cfg.AllowFrom {
		if p.Bits() > 0 && p.Contains(a) {
			return true
		}
	}
	return false
}

// pass splices c, which came from source, to a target of node. An error means that
// nothing has been done with c; otherwise it has ended.
func (f *FrontDoor) pass(live context.Context, c *clientConn, source netip.Addr, node tunnel.NodeName, target string, log *slog.Logger) error {
	start := time.Now()
	if !f.trusts(source) {
		release, ok := f.passed.admit(source, node)
		if !ok {
			f.cfg.Counters.Limited(tunnel.LimitConnsPerAddress)
			f.warn(denyPassed, "https connection denied", "frontend", c.LocalAddr().String(), "node", string(node),
				"err", fmt.Sprintf("%s: its address has %d connections to the node: put it into allowfrom of [mode.cloud.https] if it may have more", c.RemoteAddr(), f.passed.most))
			return tunnel.Refusef(tunnel.Overloaded, "limit connsperaddress: %d connections from one address to node %s are open", f.passed.most, node)
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
	})
	if err != nil {
		return dialError(ctx, err)
	}
	in, out, err := tunnel.Splice(live, c, conn)
	log.Debug("https connection passed through", "node", string(node), "bytes", in+out, "dur", time.Since(start), "err", err)
	return nil
}

// dialError makes a timeout of our own a refusal like that of the other side.
func dialError(ctx context.Context, err error) error {
	if ctx.Err() == context.DeadlineExceeded && tunnel.CodeOf(err) != tunnel.Overloaded {
		return tunnel.Refusef(tunnel.Timeout, "no answer within %v: %v", dialTimeout, err)
	}
	return err
}
