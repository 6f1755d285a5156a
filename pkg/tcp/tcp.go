// Package tcp is the front door for TCP ports. It connects each caller of a port of the cloud to a
// target behind an edge, byte for byte.
//
//	door := tcp.New([]tcp.Listener{
//		{Listen: "127.0.0.1:6443", Target: "127.0.0.1:6443"},                 // any connected node, at random
//		{Listen: "127.0.0.1:2222", Node: "edge1", Target: "127.0.0.1:22"},    // a named node
//		{Listen: "10.0.0.5:502", Node: "plc", Target: "192.168.0.9:502", Allow: office},
//	}, directory, log)
//	err := door.Run(ctx)
//
// The cloud runs a [FrontDoor], the edge an [Edge]. Both modules have the same name, so the edge's
// module handles the open requests of the cloud's.
//
// A conn behaves like one TCP connection: half-closes and resets pass through in both directions.
// If the target cannot be reached, the client gets a reset.
//
// The front door owns its listeners, the client's connection and, once Dial has returned, the
// tunnel's conn. It identifies callers by their source address alone. Listener.Allow lists the
// sources that may connect; a listener without Allow must be on loopback. Behind a balancer that speaks
// the PROXY protocol (Listener.ProxyFrom), the source is the balancer's caller. The same protocol tells
// targets who calls (Listener.SendProxy). The package has no TLS and no idle timeout: an idle
// connection stays open.
//
// [FrontDoor.Prepare] changes the listeners while the front door runs: change.go.
package tcp

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/balancer"
	"tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/tunnel"
)

// name is the name of both modules, and the category of their messages.
const name = "tcp"

const (
	// dialTimeout is how long a dial through the tunnel may take, including the edge's own dial.
	dialTimeout = 10 * time.Second
)

// Listener is one port of the front door.
type Listener struct {
	Listen string          // host:port; also the key in [mode.cloud.tcp]
	Node   tunnel.NodeName // empty: any connected node that Among selects, at random
	Among  tunnel.Selector // empty: all nodes
	Target string          // host:port, dialled by the edge
	Allow  auth.Sources    // sources that may connect; empty: loopback only, and then Listen must be loopback

	ProxyFrom auth.Sources     // balancers that send a PROXY header; see package balancer
	SendProxy balancer.Version // version of the PROXY header that the target gets before the caller's bytes; 0: none
}

// FrontDoor is the cloud's module.
type FrontDoor struct {
	// Counters counts panics, and what became of each caller. New sets it; the caller may replace it before Run.
	Counters *tunnel.Counters
	// Sink is told of each conn. The caller may set it before Run.
	Sink tunnel.Sink
	// Sockets opens the listeners; nil: nobody can take them over. The caller may set it before Run.
	Sockets *listen.Sockets

	// Set once.
	dialer tunnel.Dialer
	log    *slog.Logger
	grace  time.Duration // how long conns may continue after Run's ctx is done
	// listen opens a listener; tests replace it.
	listen func(ctx context.Context, network, addr string) (net.Listener, error)

	// changing is held from Prepare to Commit or Abort, and while Run opens the listeners. A goroutine that
	// needs both locks changing before mu.
	changing sync.Mutex

	mu        sync.Mutex // guards the following
	listeners []Listener
	up        bool        // all listeners are open
	stopped   bool        // Run is stopping or has stopped: no listener may be opened
	open      []*door     // in the order of listeners; nil unless up
	start     func(*door) // makes a door accept; nil unless up
}

var (
	_ tunnel.Module = (*FrontDoor)(nil)
	_ tunnel.Module = (*Edge)(nil)
)

// New returns a front door with these listeners. It dials targets through dialer.
func New(listeners []Listener, dialer tunnel.Dialer, log *slog.Logger) *FrontDoor {
	return &FrontDoor{
		listeners: listeners,
		dialer:    dialer,
		Counters:  new(tunnel.Counters),
		log:       log,
		grace:     tunnel.GracePeriod,
		listen:    new(net.ListenConfig).Listen,
	}
}

// Name implements tunnel.Module.
func (f *FrontDoor) Name() string { return name }

// Ready returns nil while all listeners are open.
func (f *FrontDoor) Ready() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.up {
		return errors.New("tcp listeners are not open")
	}
	return nil
}

// Idle reports whether the front door has no listener, and so nothing to do.
func (f *FrontDoor) Idle() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.listeners) == 0
}

// Addrs returns the addresses of the open listeners in the order of their configuration, or nil while
// they are closed.
func (f *FrontDoor) Addrs() []net.Addr {
	f.mu.Lock()
	defer f.mu.Unlock()
	var addrs []net.Addr
	for _, d := range f.open {
		addrs = append(addrs, d.ln.Addr())
	}
	return addrs
}

// Run opens all listeners, or none if one fails, and serves until ctx is done. Then it closes the
// listeners at once, and resets the conns that are left after tunnel.GracePeriod. It returns when
// the last conn has ended.
func (f *FrontDoor) Run(ctx context.Context) error {
	f.changing.Lock()
	opened := sync.OnceFunc(f.changing.Unlock)
	defer opened()
	f.mu.Lock()
	listeners := f.listeners
	f.mu.Unlock()
	open, err := f.openAll(ctx, listeners)
	if err != nil {
		return err
	}

	connCtx, endConns := tunnel.Grace(ctx, f.grace)
	defer endConns()
	var conns sync.WaitGroup
	g, gctx := errgroup.WithContext(ctx)
	serve := func(p *port, c net.Conn) {
		conns.Go(func() {
			serve := func() error { p.serve(connCtx, c); return nil }
			if tunnel.Guard(p.log, f.Counters, "the connection ends", serve) != nil {
				tunnel.Reset(c)
			}
		})
	}
	// While up is true, the goroutine below keeps g from ending. So start may add a goroutine to g at any time.
	start := func(d *door) {
		g.Go(func() error {
			defer d.ln.Close()
			return d.accept(gctx, serve)
		})
	}
	g.Go(func() error {
		<-gctx.Done()
		f.closeDoors()
		return nil
	})
	f.openDoors(open, start)
	opened()
	if err = g.Wait(); err != nil {
		endConns() // ctx is not done, so nothing else would end them
	}
	conns.Wait()
	return err
}

// openDoors starts to accept at all listeners.
func (f *FrontDoor) openDoors(open []*door, start func(*door)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.open, f.up, f.start = open, true, start
	for _, d := range open {
		start(d)
	}
}

// closeDoors closes all listeners.
func (f *FrontDoor) closeDoors() {
	f.mu.Lock()
	defer f.mu.Unlock()
	closeAll(f.open)
	f.open, f.up, f.start, f.stopped = nil, false, nil, true
}

// port serves the callers of one line of the configuration. It never changes.
type port struct {
	Listener
	line      Listener // the line as configured; the embedded Listener has the default of Allow filled in
	dialer    tunnel.Dialer
	balancers *balancer.Balancers
	log       *slog.Logger
	counts    *tunnel.DoorCounters
	sink      *tunnel.Sink

	// One warning a minute each, so that one kind of failure does not hide another: caller not
	// allowed, dial failed, limit reached.
	warnDenied, warnFailed, warnFull tunnel.Limiter
}

func newPort(f *FrontDoor, l Listener) *port {
	line := l
	if len(l.Allow) == 0 {
		l.Allow = auth.Sources{
			netip.MustParsePrefix("127.0.0.0/8"),
			netip.MustParsePrefix("::1/128"),
		}
	}
	return &port{
		Listener: l,
		line:     line,
		dialer:   f.dialer,
		counts:   &f.Counters.Doors[tunnel.DoorTCP],
		sink:     &f.Sink,
		balancers: balancer.New(balancer.Config{
			From: l.ProxyFrom, Key: strconv.Quote(l.Listen), Table: "[mode.cloud.tcpproxyfrom]",
			Counters: f.Counters, Log: f.log,
		}),
		log: f.log.With("frontend", l.Listen, "target", l.Target),
	}
}

// admits reports whether c may be served. Otherwise it resets c.
func (p *port) admits(c net.Conn) bool {
	if p.permits(c.RemoteAddr()) {
		return true
	}
	tunnel.Reset(c)
	if balancer.IsCheck(c) { // a balancer's check only wants to connect
		return false
	}
	p.counts.Failed(tunnel.Denied)
	if n, ok := p.warnDenied.Allow(); ok {
		p.log.Warn("caller denied by [mode.cloud.tcpallow]",
			"caller", c.RemoteAddr(), "allow", p.Allow, "skipped", n)
		from := c.RemoteAddr().String()
		p.sink.Deny(tunnel.Event{
			Kind: tunnel.EventTCP, Result: tunnel.Denied.String(), Node: p.Node, Caller: from, Remote: from,
			Door: p.Listen, Target: p.Target, Err: "the caller is not in [mode.cloud.tcpallow]", Skipped: n,
		})
	}
	return false
}

// permits reports whether Allow contains the address of peer.
func (p *port) permits(peer net.Addr) bool {
	a, ok := peer.(*net.TCPAddr)
	return ok && p.Allow.Permits(a.AddrPort().Addr())
}

// serve connects c to the target until both have ended, or until ctx is done.
func (p *port) serve(ctx context.Context, c net.Conn) {
	visit := p.sink.Arrived(p.counts)
	caller := c.RemoteAddr() // no logger per conn: creating one is expensive, and few conns log anything
	tunnel.ResetOnDeath(c)
	from, err := p.from(c)
	if err != nil {
		tunnel.Reset(c)
		p.logRefused(caller, p.Node, &visit, err)
		return
	}
	target, node, err := p.dial(ctx, caller.String(), visit.Trace())
	if err != nil {
		tunnel.Reset(c)
		p.logRefused(caller, *node, &visit, err)
		return
	}
	p.logOpened(caller, *node, &visit)
	sent, received, err := tunnel.Splice(ctx, from, target)
	p.logEnded(caller, *node, &visit, sent, received, err)
}

// The arguments of log calls take hundreds of bytes of stack. In functions of their own, they free the stack when the
// call returns, and not only when the conn ends.

func (p *port) logOpened(caller net.Addr, node tunnel.NodeName, v *tunnel.Visit) {
	p.log.Debug("conn opened", "caller", caller, "node", node, "dur", v.Since())
	v.Opened(func() tunnel.Event { return p.event(caller, node) })
}

func (p *port) logEnded(caller net.Addr, node tunnel.NodeName, v *tunnel.Visit, sent, received int64, err error) {
	p.log.Debug("conn ended", "caller", caller, "node", node, "bytes", sent+received, "dur", v.Since(), "err", err)
	v.Ended(sent, received, err, func() tunnel.Event { return p.event(caller, node) })
}

func (p *port) logRefused(caller net.Addr, node tunnel.NodeName, v *tunnel.Visit, err error) {
	p.log.Debug("conn refused", "caller", caller, "node", node, "dur", v.Since(), "err", err)
	v.Refused(err, func() tunnel.Event { return p.event(caller, node) })
	if tunnel.CodeOf(err) == tunnel.Overloaded {
		if n, ok := p.warnFull.Allow(); ok {
			p.log.Warn("conn refused: a limit is reached, see docs/limits.md",
				"node", node, "err", err, "skipped", n)
		}
	} else if n, ok := p.warnFailed.Allow(); ok {
		p.log.Warn("the target cannot be reached", "node", node, "err", err, "skipped", n)
	}
}

// event describes a caller for its visit.
func (p *port) event(caller net.Addr, node tunnel.NodeName) tunnel.Event {
	from := caller.String()
	return tunnel.Event{
		Kind: tunnel.EventTCP, Node: node, Caller: from, Remote: from, Door: p.Listen, Target: p.Target,
	}
}

// dial opens a conn for a caller. node is the node that was dialled last.
func (p *port) dial(
	ctx context.Context, caller string, trace *tunnel.TraceContext,
) (c net.Conn, node *tunnel.NodeName, err error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	r := tunnel.Request{
		Node:     p.Node,
		Among:    p.Among,
		Category: name,
		Network:  "tcp",
		Addr:     p.Target,
		Caller:   caller,
		Trace:    trace,
	}
	node = &p.Node
	if p.Node == "" {
		r.Chosen = new(tunnel.NodeName)
		node = r.Chosen
	}
	c, err = p.dialer.Dial(ctx, r)
	return c, node, err
}
