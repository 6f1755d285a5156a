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
// sources that may connect; a listener without Allow must be on loopback. The package has no TLS,
// no PROXY protocol and no idle timeout: an idle connection stays open.
package tcp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/tunnel"
)

// name is the name of both modules, and the category of their messages.
const name = "tcp"

const (
	// dialTimeout bounds a dial through the tunnel, including the edge's own dial.
	dialTimeout = 10 * time.Second
)

// Listener is one port of the front door.
type Listener struct {
	Listen string          // host:port; also the key in [mode.cloud.tcp]
	Node   tunnel.NodeName // empty: any connected node that Among selects, at random
	Among  tunnel.Selector // empty: all nodes
	Target string          // host:port, dialled by the edge
	Allow  auth.Sources    // sources that may connect; empty: loopback only, and then Listen must be loopback
}

// FrontDoor is the cloud's module.
type FrontDoor struct {
	// Counters counts panics. New sets it; the caller may replace it before Run.
	Counters *tunnel.Counters

	// Set once.
	listeners []Listener
	dialer    tunnel.Dialer
	log       *slog.Logger
	grace     time.Duration // how long conns may go on after Run's ctx is done
	// listen opens a listener; tests replace it.
	listen func(ctx context.Context, network, addr string) (net.Listener, error)

	mu   sync.Mutex     // guards the following
	up   bool           // all listeners are open
	open []net.Listener // in the order of listeners; nil unless up
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

// Addrs returns the addresses of the open listeners in the order that New got them, or nil while
// they are closed.
func (f *FrontDoor) Addrs() []net.Addr {
	f.mu.Lock()
	defer f.mu.Unlock()
	var addrs []net.Addr
	for _, ln := range f.open {
		addrs = append(addrs, ln.Addr())
	}
	return addrs
}

// Run opens all listeners, or none if one fails, and serves until ctx is done. Then it closes the
// listeners at once, and resets the conns that are left after tunnel.GracePeriod. It returns when
// the last conn has ended.
func (f *FrontDoor) Run(ctx context.Context) error {
	open, err := f.openAll(ctx)
	if err != nil {
		return err
	}
	f.setOpen(open, true)

	connCtx, endConns := tunnel.Grace(ctx, f.grace)
	defer endConns()
	var conns sync.WaitGroup
	g, gctx := errgroup.WithContext(ctx)
	for i, ln := range open {
		g.Go(func() error {
			p := newPort(f, f.listeners[i])
			return p.accept(gctx, ln, func(c net.Conn) {
				conns.Go(func() {
					serve := func() error { p.serve(connCtx, c); return nil }
					if tunnel.Guard(p.log, f.Counters, "the connection ends", serve) != nil {
						tunnel.Reset(c)
					}
				})
			})
		})
	}
	g.Go(func() error {
		<-gctx.Done()
		f.setOpen(nil, false)
		closeAll(open)
		return nil
	})
	if err = g.Wait(); err != nil {
		endConns() // ctx is not done, so nothing else would end them
	}
	conns.Wait()
	return err
}

func (f *FrontDoor) setOpen(open []net.Listener, up bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.open, f.up = open, up
}

// openAll opens all listeners. If any of them fails, it closes the others and returns all failures
// in one error.
func (f *FrontDoor) openAll(ctx context.Context) ([]net.Listener, error) {
	var open []net.Listener
	var errs []error
	for _, l := range f.listeners {
		ln, err := f.openOne(ctx, l)
		if err != nil {
			errs = append(errs, fmt.Errorf("listening on %q of [mode.cloud.tcp]: %w", l.Listen, err))
			continue
		}
		open = append(open, listen.Steady(ln, f.log))
	}
	if err := errors.Join(errs...); err != nil {
		closeAll(open)
		return nil, err
	}
	return open, nil
}

func (f *FrontDoor) openOne(ctx context.Context, l Listener) (net.Listener, error) {
	// Resolved here, so that the address checked below is the address that is opened.
	addr, err := net.ResolveTCPAddr("tcp", l.Listen)
	if err != nil {
		return nil, fmt.Errorf("%w; write an address and a port, such as 127.0.0.1:6443", err)
	}
	if len(l.Allow) == 0 && !addr.IP.IsLoopback() {
		return nil, fmt.Errorf("anybody who reaches this address could reach %s on the edge; "+
			"say who may connect with %q = [\"10.0.0.0/8\"] under [mode.cloud.tcpallow], or listen on 127.0.0.1",
			l.Target, l.Listen)
	}
	network := "tcp"
	if addr.IP.To4() != nil {
		network = "tcp4" // otherwise 0.0.0.0 would also open every IPv6 address
	}
	ln, err := f.listen(ctx, network, addr.String())
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("%w; stop what listens there (ss -ltnp shows it), or choose another port", err)
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return nil, fmt.Errorf("%w; this machine has no such address", err)
	case errors.Is(err, syscall.EACCES):
		return nil, fmt.Errorf("%w; ports below 1024 need CAP_NET_BIND_SERVICE, choose a higher one", err)
	}
	return ln, err
}

func closeAll(open []net.Listener) {
	for _, ln := range open {
		ln.Close()
	}
}

// port serves one open listener.
type port struct {
	Listener
	dialer tunnel.Dialer
	log    *slog.Logger

	// One warning a minute each, so that one kind of failure does not hide another: caller not
	// allowed, dial failed, limit reached.
	warnDenied, warnFailed, warnFull tunnel.Limiter
}

func newPort(f *FrontDoor, l Listener) *port {
	if len(l.Allow) == 0 {
		l.Allow = auth.Sources{
			netip.MustParsePrefix("127.0.0.0/8"),
			netip.MustParsePrefix("::1/128"),
		}
	}
	return &port{
		Listener: l,
		dialer:   f.dialer,
		log:      f.log.With("frontend", l.Listen, "target", l.Target),
	}
}

// accept gives each permitted connection to serve, until ctx is done.
func (p *port) accept(ctx context.Context, ln net.Listener, serve func(net.Conn)) error {
	for {
		c, err := ln.Accept()
		switch {
		case err == nil:
		case ctx.Err() != nil:
			return nil
		default:
			return fmt.Errorf("accepting on %q of [mode.cloud.tcp]: %w", p.Listen, err)
		}
		if !p.permits(c.RemoteAddr()) {
			tunnel.Reset(c)
			if n, ok := p.warnDenied.Allow(); ok {
				p.log.Warn("caller denied by [mode.cloud.tcpallow]",
					"caller", c.RemoteAddr(), "allow", p.Allow, "skipped", n)
			}
			continue
		}
		serve(c)
	}
}

// permits reports whether Allow contains the address of peer.
func (p *port) permits(peer net.Addr) bool {
	a, ok := peer.(*net.TCPAddr)
	return ok && p.Allow.Permits(a.AddrPort().Addr())
}

// serve connects c to the target until both have ended, or until ctx is done.
func (p *port) serve(ctx context.Context, c net.Conn) {
	start := time.Now()
	caller := c.RemoteAddr() // no logger per conn: creating one is expensive, and few conns log anything
	tunnel.ResetOnDeath(c)
	target, err := p.dial(ctx, caller.String())
	if err != nil {
		tunnel.Reset(c)
		p.logRefused(caller, start, err)
		return
	}
	p.logOpened(caller, start)
	in, out, err := tunnel.Splice(ctx, c, target)
	p.logEnded(caller, start, in+out, err)
}

// The arguments of log calls take hundreds of bytes of stack. In functions of their own, they do not
// take them for as long as the conn lives.

func (p *port) logOpened(caller net.Addr, start time.Time) {
	p.log.Debug("conn opened", "caller", caller, "node", p.Node, "dur", time.Since(start))
}

func (p *port) logEnded(caller net.Addr, start time.Time, bytes int64, err error) {
	p.log.Debug("conn ended", "caller", caller, "node", p.Node, "bytes", bytes, "dur", time.Since(start), "err", err)
}

func (p *port) logRefused(caller net.Addr, start time.Time, err error) {
	p.log.Debug("conn refused", "caller", caller, "node", p.Node, "dur", time.Since(start), "err", err)
	if tunnel.CodeOf(err) == tunnel.Overloaded {
		if n, ok := p.warnFull.Allow(); ok {
			p.log.Warn("conn refused: a limit is reached, see docs/limits.md",
				"node", p.Node, "err", err, "skipped", n)
		}
	} else if n, ok := p.warnFailed.Allow(); ok {
		p.log.Warn("the target cannot be reached", "node", p.Node, "err", err, "skipped", n)
	}
}

func (p *port) dial(ctx context.Context, caller string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	return p.dialer.Dial(ctx, tunnel.Request{
		Node:     p.Node,
		Among:    p.Among,
		Category: name,
		Network:  "tcp",
		Addr:     p.Target,
		Caller:   caller,
	})
}
