package relay

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/services"
	pb "tunnel.example/tunnel/pkg/services/servicesv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

const (
	// These bound peers that have not proven yet which node they are.
	maxNearStrangers  = 256
	maxNearPerSource  = 64
	nearHandshakeTime = 2 * time.Second
	nearStrangerBytes = 64 << 10
	// nearRequestTime is how long a node may take to send its request, and to read the answer.
	nearRequestTime = 2 * time.Second
	// maxNearServed bounds the conns of all other edges together. maxNearPerNode bounds the conns of one other edge. Each
	// conn takes some 130 KiB.
	maxNearServed  = 2048
	maxNearPerNode = 512
)

// Name implements tunnel.Module.
func (n *Near) Name() string { return "services-near" }

// Status says how many conns and edges there are.
func (n *Near) Status() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	reached, paused := 0, 0
	for _, p := range n.peers {
		if p.pause > 0 {
			paused++
		} else {
			reached++
		}
	}
	return fmt.Sprintf("conns of other edges: %d; edges of this site: %d reached, %d by the cloud after a failure",
		n.callers.live(), reached, paused)
}

// Run implements tunnel.Module. It serves other edges until ctx is done. Then their conns may continue for
// tunnel.GracePeriod. If the listener cannot be opened, or breaks, Run returns an error.
func (n *Near) Run(ctx context.Context) error {
	opened, err := n.cfg.Sockets.Listen(ctx, listen.Edges, nearListenConfig(), "tcp", n.cfg.Listen.String())
	if err != nil {
		return fmt.Errorf("listening on %s, near in [mode.edge.services]: %w", n.cfg.Listen, err)
	}
	ln := listen.NewListener(listen.Steady(opened, n.log), listen.ListenerConfig{
		Max: maxNearStrangers, MaxPerSource: maxNearPerSource, Timeout: n.handshakeTime, Bytes: nearStrangerBytes,
		Counters: n.relay.cfg.Counters, OverMax: tunnel.LimitStrangers,
		OverMaxPerSource: tunnel.LimitStrangersPerAddress, TooLate: tunnel.LimitHandshakeTimeout,
	})
	n.addr = opened.Addr()
	close(n.listened)
	defer context.AfterFunc(ctx, func() { ln.Close() })()
	connCtx, endConns := tunnel.Grace(ctx, n.grace)
	defer endConns()
	var conns, dismissing sync.WaitGroup
	dismissCtx, stopDismissing := context.WithCancel(connCtx)
	dismissing.Go(func() { n.dismiss(dismissCtx) })
	defer dismissing.Wait()
	defer stopDismissing()
	defer conns.Wait()
	err = listen.Accept(ctx, ln, func(c net.Conn) {
		conns.Go(func() {
			//nolint:errcheck // Guard logs a panic
			tunnel.Guard(n.log, n.relay.cfg.Counters, "the conn of another edge ends", func() error {
				n.accepted(connCtx, c.(*listen.Conn)) //nolint:forcetypeassert // Listener returns no others
				return nil
			})
		})
	})
	if err != nil {
		ln.Close()
		endConns()
		return fmt.Errorf("accepting on %s, near in [mode.edge.services]: %w", n.cfg.Listen, err)
	}
	return nil
}

// Drain makes this edge refuse further conns of other edges, which then ask the cloud. Open conns continue.
func (n *Near) Drain() { n.callers.drain() }

// Conns returns how many conns other edges have here.
func (n *Near) Conns() int64 { return int64(n.callers.live()) }

// nearListenConfig returns the configuration of the listener for other edges.
func nearListenConfig() net.ListenConfig {
	lc := net.ListenConfig{KeepAliveConfig: nearKeepAlive(), Control: boundSilence}
	lc.SetMultipathTCP(false) // accepted connections would not inherit what boundSilence sets
	return lc
}

// accepted serves a connection from a peer: after the TLS handshake it is known which node the peer is.
func (n *Near) accepted(ctx context.Context, raw *listen.Conn) {
	defer raw.Close()
	tunnel.ResetOnDeath(raw)
	var node tunnel.NodeName
	conf := n.tls()
	conf.VerifyConnection = func(state tls.ConnectionState) (err error) {
		node, err = n.verify(state)
		return err
	}
	c := &nearConn{Conn: tls.Server(wholeTLS{raw}, conf), tcp: raw.TCPConn, silence: n.silence}
	if err := c.HandshakeContext(ctx); err != nil {
		n.counts.strangers.Add(1)
		n.log.Debug("a peer has not proven to be the edge of a node", "remote", raw.RemoteAddr(), "err", err)
		return
	}
	start := time.Now()
	ctx, leave, refusal := n.callers.enter(ctx, node, n.knows)
	defer leave()
	if refusal == nil {
		raw.Met()
	} else { // the peer keeps its place among the strangers, for as long as it takes to hear the refusal
		raw.Extend(2 * n.requestTime)
	}
	target, sent, received, err := n.serve(ctx, node, c, refusal)
	n.log.Debug("conn of another edge ended", "caller", node, "remote", raw.RemoteAddr(), "target", target,
		"bytes", sent+received, "dur", time.Since(start), "err", err)
}

// serve answers the request of a node: with refusal, if it is not nil. If the answer is nearOpened, serve forwards the
// conn until it ends.
func (n *Near) serve(
	ctx context.Context, node tunnel.NodeName, c *nearConn, refusal error,
) (line string, sent, received int64, err error) {
	c.SetDeadline(time.Now().Add(n.requestTime)) //nolint:errcheck // it fails only if the conn has ended
	if line, err = readLine(c); err != nil {
		c.Reset() //nolint:errcheck // the conn is given up
		if refusal != nil {
			n.counts.answered(refusal)
		}
		return "", 0, 0, err
	}
	var to net.Conn
	if err = refusal; err == nil {
		to, err = n.dialOwn(ctx, node, line)
	}
	n.counts.answered(err)
	c.SetDeadline(time.Now().Add(n.requestTime)) //nolint:errcheck // as above
	if _, werr := io.WriteString(c, answerLine(err)); werr != nil && err == nil {
		tunnel.Reset(to)
		err = werr
	}
	if err != nil {
		c.SetLinger(-1) //nolint:errcheck // as above; else the answer could be lost
		c.Close()       //nolint:errcheck // as above
		return line, 0, 0, err
	}
	c.SetDeadline(time.Time{}) //nolint:errcheck // as above
	c.carry()
	sent, received, err = tunnel.Splice(ctx, c, to)
	return line, sent, received, err
}

// dialOwn connects to the endpoint that another edge asks for. It permits what the cloud would permit: an endpoint on
// this node, of a Service that edges relay. Then Edge.serve decides, as it does for a conn through the cloud.
func (n *Near) dialOwn(ctx context.Context, node tunnel.NodeName, line string) (net.Conn, error) {
	t, err := services.ParseTarget(line)
	if err != nil {
		return nil, tunnel.Refusef(tunnel.Denied, "%v", err)
	}
	at, ok := n.relay.ownEndpoint(t)
	if !ok {
		return nil, tunnel.Refusef(tunnel.Denied, "%s is no endpoint on node %s, as far as its edge knows",
			t, n.relay.cfg.Node)
	}
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
	defer cancel()
	return n.edge.serve(ctx, tunnel.Request{
		Category: name, Network: t.Network(), Addr: at.String(), Caller: "node " + string(node),
	})
}

// ownEndpoint returns the address of an endpoint on this node. ok is false if the endpoint is on another node, or if
// edges do not relay its Service for callers on other nodes.
func (r *Relay) ownEndpoint(t services.Target) (at netip.AddrPort, ok bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	namespace, service, _ := services.CutService(services.ServiceOf(t.Endpoint))
	s, e := r.state.Service(namespace, service), r.state.Endpoint(t.Endpoint)
	hasPort := slices.ContainsFunc(e.GetPorts(), func(p *pb.Port) bool {
		return p.GetProtocol() == t.Protocol && p.GetPort() == uint32(t.Port)
	})
	if e == nil || services.Home(e) != string(r.cfg.Node) || !hasPort || len(s.GetClusterIps()) == 0 ||
		s.GetHeadless() || s.GetOtherProxy() || s.GetExternalName() != "" || services.NodeLocal(s) {
		return at, false
	}
	addr, ok := addressOf(r.state, e)
	at = netip.AddrPortFrom(addr, t.Port)
	_, own := r.plan.own[address{at, t.Protocol}]
	return at, ok && own // with own, Edge.serve does not wait for a newer state
}

// remembers reports whether the state has a node. After a restart of the cloud, a Node may be there while its edge has
// not come back yet.
func (n *Near) remembers(node tunnel.NodeName) bool {
	n.relay.mu.RLock()
	defer n.relay.mu.RUnlock()
	return n.relay.state.Node(string(node)) != nil
}

// knows reports whether the state has a node, and the node's edge serves Services.
func (n *Near) knows(node tunnel.NodeName) bool {
	n.relay.mu.RLock()
	defer n.relay.mu.RUnlock()
	return n.relay.state.Node(string(node)).GetEdge()
}

// dismiss ends the conns of nodes that are deleted, each time the state has changed, until ctx is done.
func (n *Near) dismiss(ctx context.Context) {
	for {
		n.relay.mu.Lock()
		changed := n.relay.changed.Next()
		n.relay.mu.Unlock()
		n.callers.dismiss(n.remembers)
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

// nearCallers counts the conns that other edges have here.
type nearCallers struct {
	mu       sync.Mutex // guards the following
	draining bool       // no further conn begins
	total    int
	of       map[tunnel.NodeName]*nearCaller
}

type nearCaller struct {
	conns int
	ctx   context.Context //nolint:containedctx // of the node's conns
	end   context.CancelFunc
}

// enter counts a conn of a node, and returns the context of the conn. The context ends when the node is dismissed. The
// caller must call leave, even after a refusal.
func (a *nearCallers) enter(
	ctx context.Context, node tunnel.NodeName, knows func(tunnel.NodeName) bool,
) (_ context.Context, leave func(), refusal error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.of == nil {
		a.of = make(map[tunnel.NodeName]*nearCaller)
	}
	caller := a.of[node]
	switch {
	case a.draining:
		return ctx, func() {}, tunnel.Refusef(tunnel.Draining, "this edge takes no further conns")
	case !knows(node): // under mu, so that dismiss comes before it or finds the conn
		return ctx, func() {}, tunnel.Refusef(tunnel.Denied,
			"node %s is not known here as one whose edge serves Services", node)
	case a.total >= maxNearServed, caller != nil && caller.conns >= maxNearPerNode:
		return ctx, func() {}, tunnel.Refusef(tunnel.Overloaded, "too many conns of other edges")
	case caller == nil:
		caller = new(nearCaller)
		caller.ctx, caller.end = context.WithCancel(ctx)
		a.of[node] = caller
	}
	a.total++
	caller.conns++
	return caller.ctx, func() { a.leave(node, caller) }, nil
}

func (a *nearCallers) leave(node tunnel.NodeName, caller *nearCaller) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.total--
	if caller.conns--; caller.conns > 0 {
		return
	}
	caller.end()
	if a.of[node] == caller {
		delete(a.of, node)
	}
}

// drain refuses further conns.
func (a *nearCallers) drain() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.draining = true
}

// dismiss ends the conns of nodes for which remembers returns false.
func (a *nearCallers) dismiss(remembers func(tunnel.NodeName) bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for node, caller := range a.of {
		if !remembers(node) {
			caller.end()
			delete(a.of, node)
		}
	}
}

// live returns how many conns there are.
func (a *nearCallers) live() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.total
}

// nearCounters count what the shortcut does.
type nearCounters struct {
	failed    atomic.Uint64 // attempts to reach another edge
	strangers atomic.Uint64 // peers that did not prove to be the edge of a node
	opened    atomic.Uint64 // conns of other edges
	refused   byCode        // conns of other edges
}

// answered counts the answer to a request of another edge.
func (c *nearCounters) answered(err error) {
	if err == nil {
		c.opened.Add(1)
		return
	}
	c.refused.add(tunnel.CodeOf(err))
}
