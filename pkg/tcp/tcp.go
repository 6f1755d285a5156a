// Package tcp is the front door for TCP ports: what connects to a port of the cloud
// is connected to a target behind an edge, byte for byte.
//
//	door := tcp.New([]tcp.Listener{
//		{Listen: "127.0.0.1:6443", Target: "127.0.0.1:6443"},                 // any connected node, by chance
//		{Listen: "127.0.0.1:2222", Node: "edge1", Target: "127.0.0.1:22"},    // a named node
//		{Listen: "10.0.0.5:502", Node: "plc", Target: "192.168.0.9:502", Allow: office},
//	}, directory, log)
//	err := door.Run(ctx)
//
// The cloud runs a [FrontDoor], the edge an [Edge]. They are modules of one name, so
// that the open request of one is handled by the other.
//
// A conn behaves like one TCP connection: half-closes and resets pass through both
// ways, and a target that cannot be had is a reset for the client.
//
// The front door owns its listeners and the client's conn; the tunnel's conn is its
// own from Dial on. It knows its callers by their source address alone. Who may pass
// is Listener.Allow; a listener without one must be on loopback. It has no TLS, no
// PROXY protocol and no idle timeout: a quiet connection is a connection.
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

	"tunnel/pkg/auth"
	"tunnel/pkg/listen"
	"tunnel/pkg/tunnel"
)

// name is the name of both modules, and the category of their messages.
const name = "tcp"

const (
	// dialTimeout bounds a dial through the tunnel, the edge's own dial included.
	dialTimeout = 10 * time.Second
	// Accept is tried again after backoffFirst, then twice that, up to backoffMost.
	backoffFirst = 5 * time.Millisecond
	backoffMost  = time.Second
)

// Listener is one port of the front door.
type Listener struct {
	Listen string          // host:port; also the key in [mode.cloud.tcp]
	Node   tunnel.NodeName // empty: any connected node of Among, by chance
	Among  tunnel.Selector // empty: all
	Target string          // host:port, as the edge sees it
	Allow  auth.Sources    // who may connect; empty: loopback, and then Listen must be loopback
}

// FrontDoor is the cloud's module.
type FrontDoor struct {
	// Counters counts panics; New makes one, and it may be replaced before Run.
	Counters *tunnel.Counters

	// Set once.
	listeners []Listener
	dialer    tunnel.Dialer
	log       *slog.Logger
	grace     time.Duration
	listen    func(ctx context.Context, network, addr string) (net.Listener, error)

	mu   sync.Mutex // guards the following
	up   bool
	open []net.Listener // in the order of listeners, while up
}

var (
	_ tunnel.Module = (*FrontDoor)(nil)
	_ tunnel.Module = (*Edge)(nil)
)

// New returns a front door with these listeners, which dials through dialer.
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

// Routes implements tunnel.Module. The cloud handles no message: an edge may not open.
func (f *FrontDoor) Routes() map[string]tunnel.Handler { return nil }

// Ready returns nil while all listeners are open.
func (f *FrontDoor) Ready() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.up {
		return errors.New("tcp listeners are not open")
	}
	return nil
}

// Addrs returns the addresses that the listeners have, in the order of New's, or nil
// while they are not open.
func (f *FrontDoor) Addrs() []net.Addr {
	f.mu.Lock()
	defer f.mu.Unlock()
	var addrs []net.Addr
	for _, ln := range f.open {
		addrs = append(addrs, ln.Addr())
	}
	return addrs
}

// Run opens every listener, or none, and serves until ctx is done. Then the
// listeners close at once, and conns may go on for tunnel.GracePeriod before they are
// reset. It returns when the last conn has ended.
func (f *FrontDoor) Run(ctx context.Context) error {
	open, err := f.openAll(ctx)
	if err != nil {
		return err
	}
	f.setOpen(open, true)

	conns, endConns := tunnel.Grace(ctx, f.grace)
	defer endConns()
	var live sync.WaitGroup
	g, gctx := errgroup.WithContext(ctx)
	for i, ln := range open {
		g.Go(func() error {
			p := newPort(f, f.listeners[i])
			return p.accept(gctx, ln, func(c net.Conn) {
				live.Go(func() {
					if tunnel.Guard(p.log, f.Counters, "the connection ends", func() error { p.serve(conns, c); return nil }) != nil {
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
		endConns() // ctx goes on, so nothing else would end them
	}
	live.Wait()
	return err
}

func (f *FrontDoor) setOpen(open []net.Listener, up bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.open, f.up = open, up
}

// openAll opens every listener. All that are in the way of that are reported in one
// error, and then nothing stays open.
func (f *FrontDoor) openAll(ctx context.Context) ([]net.Listener, error) {
	var open []net.Listener
	var errs []error
	for _, l := range f.listeners {
		ln, err := f.openOne(ctx, l)
		if err != nil {
			errs = append(errs, fmt.Errorf("listening on %q of [mode.cloud.tcp]: %w", l.Listen, err))
			continue
		}
		open = append(open, ln)
	}
	if err := errors.Join(errs...); err != nil {
		closeAll(open)
		return nil, err
	}
	return open, nil
}

func (f *FrontDoor) openOne(ctx context.Context, l Listener) (net.Listener, error) {
	// Resolved here, so that the address that is checked is the one that is opened.
	addr, err := net.ResolveTCPAddr("tcp", l.Listen)
	if err != nil {
		return nil, fmt.Errorf("%w; write an address and a port, such as 127.0.0.1:6443", err)
	}
	if len(l.Allow) == 0 && !addr.IP.IsLoopback() {
		return nil, fmt.Errorf("anybody who reaches this address could reach %s on the edge; "+
			"say who may connect with %q = [\"10.0.0.0/8\"] under [mode.cloud.tcpallow], or listen on 127.0.0.1", l.Target, l.Listen)
	}
	network := "tcp"
	if addr.IP.To4() != nil {
		network = "tcp4" // else 0.0.0.0 would open every IPv6 address too
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

// port is an open listener at work.
type port struct {
	Listener
	dialer tunnel.Dialer
	log    *slog.Logger

	// Of warnings, one a minute each, so that one kind of trouble does not hide another.
	denied, failed, full, tired tunnel.Limiter
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

// accept gives every conn that may come in to serve, until ctx is done.
func (p *port) accept(ctx context.Context, ln net.Listener, serve func(net.Conn)) error {
	backoff := backoffFirst
	for {
		c, err := ln.Accept()
		switch {
		case err == nil:
			backoff = backoffFirst
		case ctx.Err() != nil:
			return nil
		case listen.Transient(err):
			if n, ok := p.tired.Allow(); ok {
				p.log.Warn("cannot accept, trying again", "err", err, "skipped", n)
			}
			select {
			case <-time.After(backoff):
			case <-ctx.Done():
			}
			backoff = min(2*backoff, backoffMost)
			continue
		default:
			return fmt.Errorf("accepting on %q of [mode.cloud.tcp]: %w", p.Listen, err)
		}
		if !p.permits(c.RemoteAddr()) {
			tunnel.Reset(c)
			if n, ok := p.denied.Allow(); ok {
				p.log.Warn("caller denied by [mode.cloud.tcpallow]", "caller", c.RemoteAddr(), "allow", p.Allow, "skipped", n)
			}
			continue
		}
		serve(c)
	}
}

func (p *port) permits(peer net.Addr) bool {
	a, ok := peer.(*net.TCPAddr)
	return ok && p.Allow.Permits(a.AddrPort().Addr())
}

// serve connects c to the target until both have ended, or ctx is done.
func (p *port) serve(ctx context.Context, c net.Conn) {
	start := time.Now()
	caller := c.RemoteAddr() // not in a logger of the conn's own: making one costs, and it seldom writes
	tunnel.ResetOnDeath(c)
	target, err := p.dial(ctx, caller.String())
	if err != nil {
		tunnel.Reset(c)
		p.log.Debug("conn refused", "caller", caller, "node", p.Node, "dur", time.Since(start), "err", err)
		if tunnel.CodeOf(err) == tunnel.Overloaded {
			if n, ok := p.full.Allow(); ok {
				p.log.Warn("conn refused: a limit is reached, see docs/limits.md", "node", p.Node, "err", err, "skipped", n)
			}
		} else if n, ok := p.failed.Allow(); ok {
			p.log.Warn("the target cannot be reached", "node", p.Node, "err", err, "skipped", n)
		}
		return
	}
	p.log.Debug("conn opened", "caller", caller, "node", p.Node, "dur", time.Since(start))
	in, out, err := tunnel.Splice(ctx, c, target)
	p.log.Debug("conn ended", "caller", caller, "node", p.Node, "bytes", in+out, "dur", time.Since(start), "err", err)
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
