package udp

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

const (
	// DefaultEdgeFlows is how many flows an edge has at once. Each takes a descriptor and a local port;
	// Linux has 28,232 local ports by default (net.ipv4.ip_local_port_range).
	DefaultEdgeFlows = 16 << 10
	// edgeIdleTime is how long a flow of an edge lives without a datagram. The cloud ends an idle flow
	// earlier, so no datagram arrives for a flow that the edge has ended.
	edgeIdleTime = idleTime + 15*time.Second
	// flowBuffer is the size of the receive buffer that the edge asks for, for the socket of each flow,
	// in bytes. The kernel uses memory only for datagrams that wait in the buffer.
	flowBuffer = 4 << 20
	// maxOpening is how many flows of one conn may wait at once until their targets' names are resolved.
	maxOpening = 64
	// maxPending is how many bytes of one flow may wait until its target's name is resolved.
	maxPending = 16 << 10
	// pendingCost is how many bytes a waiting datagram counts beside its own bytes. So maxPending also
	// limits empty datagrams.
	pendingCost = 64
	// refusedTime ends a flow of this age if its target has a name, has refused a datagram, and has never
	// answered. The next flow tries another address of the name.
	refusedTime = 5 * time.Second
	// maxRefused is how many addresses an edge remembers because they have refused a datagram.
	maxRefused = 1 << 10
)

// A Policy decides which targets the edge may send to, and opens sockets that are connected to them.
// *auth.Policy is one.
type Policy interface {
	// DialUDP returns a socket that is connected to addr, a host:port. An error is a *tunnel.Refusal.
	// Only a name in addr makes it wait. Of several addresses of a name, DialUDP prefers the one for
	// which refusedAt, the time of its last refusal, returns the earliest time.
	DialUDP(ctx context.Context, addr string, refusedAt func(netip.AddrPort) time.Time) (*net.UDPConn, error)
}

// EdgeConfig is what an Edge needs beside its policy.
type EdgeConfig struct {
	Flows    int              // flows at once, over all conns; 0: DefaultEdgeFlows
	Counters *Counters        // nil: not counted
	Core     *tunnel.Counters // counts panics and limits; nil: not counted
	Log      *slog.Logger
	// OneTarget is true if each conn has a target, and its flows may not name another target.
	OneTarget bool
	// Keeps is asked every six seconds whether the flows of a conn to a target may go on; nil: they may.
	Keeps func(target string) bool
	// Share is the part of Flows that all conns of one Request.Caller may have: 4 is a quarter; 0: all of them.
	Share int

	late time.Duration // see newQueue; only tests set it
}

// Edge is the edge's module: it sends the datagrams of flows to their targets, and returns the
// targets' datagrams.
type Edge struct {
	// Set once.
	policy   Policy
	counters *Counters
	core     *tunnel.Counters
	log      *slog.Logger
	single   bool // see EdgeConfig.OneTarget
	keeps    func(string) bool
	share    int64         // see EdgeConfig.Share
	late     time.Duration // see newQueue
	idle     time.Duration // see edgeIdleTime; tests replace it
	refused  time.Duration // see refusedTime; tests replace it
	buffers  buffers

	flows atomic.Int64 // how many flows all conns have
	limit atomic.Int64 // how many flows all conns may have

	// One warning a minute each: a target is not permitted or cannot be reached; nothing listens there;
	// a limit is reached.
	warnDial, warnRefused, warnFlows tunnel.Limiter

	mu       sync.Mutex // guards the following
	conns    map[*edgeConn]struct{}
	draining bool
	callers  map[string]*callerFlows      // by Request.Caller: those with conns
	refusals map[netip.AddrPort]time.Time // when an address of a name has last refused a flow's datagram
}

var _ tunnel.Routed = (*Edge)(nil)

// NewEdge returns the module. policy decides which targets are permitted.
func NewEdge(policy Policy, cfg EdgeConfig) *Edge {
	if cfg.Counters == nil {
		cfg.Counters = new(Counters)
	}
	if cfg.Core == nil {
		cfg.Core = new(tunnel.Counters)
	}
	e := &Edge{
		policy: policy, counters: cfg.Counters, core: cfg.Core, log: cfg.Log, single: cfg.OneTarget, keeps: cfg.Keeps,
		share: int64(max(cfg.Share, 1)), late: cfg.late, idle: edgeIdleTime, refused: refusedTime,
		conns: make(map[*edgeConn]struct{}), callers: make(map[string]*callerFlows),
		refusals: make(map[netip.AddrPort]time.Time),
	}
	e.SetFlows(cfg.Flows)
	return e
}

// SetFlows changes how many flows may be open at once; 0: DefaultEdgeFlows. Open flows continue.
func (e *Edge) SetFlows(n int) { e.limit.Store(int64(cmp.Or(n, DefaultEdgeFlows))) }

// Name implements tunnel.Module.
func (e *Edge) Name() string { return name }

// Routes implements tunnel.Routed.
func (e *Edge) Routes() map[string]tunnel.Handler {
	return map[string]tunnel.Handler{
		tunnel.TypeOpen: func(_ context.Context, in *tunnel.Incoming) error { return in.Serve(e.Open) },
	}
}

// Run implements tunnel.Module. When ctx is done, no flow is opened, and each conn ends when its flows
// have been idle for two seconds. The sessions own the conns and wait for them.
func (e *Edge) Run(ctx context.Context) error {
	<-ctx.Done()
	e.mu.Lock()
	defer e.mu.Unlock()
	e.draining = true
	for c := range e.conns {
		close(c.drain)
	}
	return nil
}

// Open implements tunnel.DialFunc: it returns the edge's end of a conn. If the request has no target,
// each flow names its own target, see EdgeConfig.OneTarget. If the request has a target, Open tries it
// once. So the cloud learns before the first datagram why the edge cannot reach the target.
func (e *Edge) Open(ctx context.Context, r tunnel.Request) (net.Conn, error) {
	if r.Network != tunnel.NetworkUDP {
		return nil, tunnel.Refusef(tunnel.Denied, "network %q of a conn for datagrams is not %q", r.Network,
			tunnel.NetworkUDP)
	}
	if r.Addr == "" && e.single {
		return nil, tunnel.Refusef(tunnel.Denied, "a conn for datagrams needs a target here")
	}
	if r.Addr != "" {
		socket, err := e.policy.DialUDP(ctx, r.Addr, e.refusedAt)
		if err != nil {
			return nil, err
		}
		socket.Close()
	}
	return e.newConn(ctx, r)
}

// newConn returns the end of a conn, and starts the goroutine that ends its idle flows.
func (e *Edge) newConn(ctx context.Context, r tunnel.Request) (net.Conn, error) {
	// Do not use ctx itself: it is the context of the dial, and is done when the conn is open.
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	c := &edgeConn{
		edge: e, target: r.Addr, ctx: ctx, cancel: cancel, drain: make(chan struct{}),
		sender: newSender(), flows: make(map[flowID]*edgeFlow),
	}
	c.order.Init()
	c.train = newTrain(c.sendToTarget, c.sentToTarget, canSegment())
	out := newQueue(e.counters, &e.counters.ToCaller, e.late)
	c.wire = &wire{name: addr(r.Addr), out: out, ended: c.endAll, flush: c.flushed}
	c.wire.in.handle = c.handle

	e.mu.Lock()
	defer e.mu.Unlock()
	if e.draining {
		cancel()
		return nil, tunnel.Refusef(tunnel.Draining, "the edge is about to stop")
	}
	e.conns[c] = struct{}{}
	if e.callers[r.Caller] == nil {
		e.callers[r.Caller] = &callerFlows{name: r.Caller}
	}
	c.caller = e.callers[r.Caller]
	c.caller.conns++
	c.running.Go(func() { c.guard(c.sweep) })
	return c, nil
}

// forget removes a conn that has ended.
func (e *Edge) forget(c *edgeConn) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.conns, c)
	if c.caller.conns--; c.caller.conns == 0 {
		delete(e.callers, c.caller.name)
	}
}

// callerFlows counts the flows of one caller.
type callerFlows struct {
	name  string       // set once
	flows atomic.Int64 // of all its conns
	conns int          // guarded by Edge.mu
}

// refusedAt returns when an address has last refused a datagram; zero: never, or it was forgotten.
func (e *Edge) refusedAt(to netip.AddrPort) time.Time {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.refusals[to]
}

// refusedBy notes that an address has refused a datagram.
func (e *Edge) refusedBy(to netip.AddrPort) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.refusals) >= maxRefused {
		clear(e.refusals)
	}
	e.refusals[netip.AddrPortFrom(to.Addr().Unmap(), to.Port())] = time.Now()
}

// logDial logs why a flow was not opened.
func (e *Edge) logDial(f *edgeFlow, err error) {
	if n, ok := e.warnDial.Allow(); ok {
		text := "the target of a flow cannot be reached"
		if tunnel.CodeOf(err) == tunnel.Denied {
			text = "a flow that the cloud asked for is denied"
		}
		e.log.Warn(text, "target", f.target, "caller", f.caller, "err", err, "skipped", n)
	}
}

// logRefused logs that a target's machine has refused a datagram.
func (e *Edge) logRefused(f *edgeFlow, err error) {
	if n, ok := e.warnRefused.Allow(); ok {
		e.log.Warn("the target does not take datagrams: does a program listen there?",
			"target", f.target, "caller", f.caller, "err", err, "skipped", n)
	}
}

// refusalOf returns err in the form of an ending, the payload of an end frame.
func refusalOf(err error) ending {
	e := ending{code: tunnel.CodeOf(err), text: err.Error()}
	if r, ok := errors.AsType[*tunnel.Refusal](err); ok {
		e.text = r.Text // not r.Detail, which the cloud must not learn
	}
	return e
}
