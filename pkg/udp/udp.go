// Package udp is the front door for UDP ports. It passes the datagrams of each caller of a port of the
// cloud to a target behind an edge, and the target's datagrams back.
//
//	door := udp.New([]udp.Listener{
//		{Listen: "127.0.0.1:5353", Node: "edge1", Target: "127.0.0.1:53"},
//		{Listen: "0.0.0.0:51820", Node: "edge1", Target: "127.0.0.1:51820", Allow: office},
//	}, directory, udp.Config{Log: log})
//	err := door.Run(ctx)
//
// The cloud runs a [FrontDoor], the edge an [Edge]. Both modules have the same name, so the edge's
// module handles the open requests of the cloud's. A [Forwarder] is one socket whose flows have
// different targets, with a conn for each target. Package relay serves Services by it.
//
// The datagrams between one caller and one target are a flow. The edge has a socket for each flow, so
// the target sees a port for each caller. One conn for each port of the cloud carries all flows of the
// port as frames:
//
//	caller ──▶ port ── table: which flow ──▶ mux ── queue ──▶ conn ──▶ edgeConn ── flow's socket ──▶ target
//	caller ◀── port ◀──────────────────────── mux ◀───────── conn ◀── queue ◀──── flow's goroutine ◀── target
//
// A datagram that comes alone passes by an empty queue: the goroutine that has received it writes it to the conn.
// The datagrams of a flow arrive in order, and none arrives twice. If a buffer is full, the package drops
// the datagram and counts it in [Counters] with its [Reason]; it never waits for room. A flow ends after a
// minute without a datagram. If the conn is lost, all its flows end, and the next datagram of each caller
// opens a new flow.
//
// The files:
//
//   - udp.go: starting and stopping the front door; change.go: changing it while it runs
//   - port.go: one of its ports; forward.go: a port whose flows have different targets
//   - table.go: the flows of a port, and which flow makes room for which
//   - mux.go: the cloud's end of a conn; edge.go and edge_flow.go: the edge's end
//   - frame.go: the format of frames; queue.go: frames that wait; wire.go: frames for tunnel.Splice
//   - train.go: many datagrams by one system call; control.go: the address to which a caller has sent
//
// Lock order, outermost first: port.mu → queue.mu; Edge.mu; edgeConn.mu → queue.mu.
//
// The front door identifies callers by their source address alone, which nobody proves. Listener.Allow
// lists the sources that may send; a listener without Allow must be on loopback. The package does not
// pass on ICMP errors, DSCP or ECN, and does not answer for a target that is silent.
//
// [FrontDoor.Prepare] and [FrontDoor.SetLimits] change the front door while it runs: change.go.
package udp

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

// name is the name of both modules, the category of their messages, and the network of their requests.
const name = "udp"

// Listener is one port of the front door.
type Listener struct {
	Listen string          // host:port; also the key in [mode.cloud.udp]
	Node   tunnel.NodeName // empty: a connected node that Among selects, at random; one for all flows at a time
	Among  tunnel.Selector // empty: all nodes
	Target string          // host:port, dialled by the edge
	Allow  auth.Sources    // sources that may send; empty: loopback only, and then Listen must be loopback
}

// Config is what a front door needs beside its listeners.
type Config struct {
	Limits   Limits
	Counters *Counters        // nil: not counted
	Core     *tunnel.Counters // counts panics and limits; nil: not counted
	Sink     tunnel.Sink      // is told of each flow
	Software string           // the version of this program, for a log line
	Sockets  *listen.Sockets  // opens the sockets; nil: nobody can take them over
	Log      *slog.Logger

	late time.Duration // see newQueue; only tests set it
}

func (c Config) orDefault() Config {
	if c.Counters == nil {
		c.Counters = new(Counters)
	}
	if c.Core == nil {
		c.Core = new(tunnel.Counters)
	}
	return c
}

// FrontDoor is the cloud's module.
type FrontDoor struct {
	// Set once.
	dialer tunnel.Dialer
	cfg    Config        // mu guards Limits
	grace  time.Duration // how long flows may continue after Run's ctx is done; tests replace it
	idle   time.Duration // see idleTime; tests replace it
	keep   time.Duration // see keepConn; tests replace it

	// changing is held from Prepare to Commit or Abort, and while Run opens the sockets. A goroutine that
	// needs both locks changing before mu.
	changing sync.Mutex

	mu        sync.Mutex // guards the following
	listeners []Listener
	up        bool        // all sockets are open
	stopped   bool        // Run is stopping or has stopped: no socket may be opened
	open      []*port     // in the order of listeners; nil unless up
	leaving   []*port     // removed ports that still have flows
	start     func(*port) // makes a port receive; nil unless up
	// conns is the context of the ports' conns, also of ports that a change opens; nil unless up.
	conns context.Context
}

var (
	_ tunnel.Module = (*FrontDoor)(nil)
	_ tunnel.Module = (*Edge)(nil)
)

// New returns a front door with these listeners. It dials targets through dialer.
func New(listeners []Listener, dialer tunnel.Dialer, cfg Config) *FrontDoor {
	return &FrontDoor{
		listeners: listeners, dialer: dialer, cfg: cfg.orDefault(),
		grace: tunnel.GracePeriod, idle: idleTime, keep: keepConn,
	}
}

// Name implements tunnel.Module.
func (f *FrontDoor) Name() string { return name }

// Ready returns nil while all sockets are open.
func (f *FrontDoor) Ready() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.up {
		return errors.New("udp sockets are not open")
	}
	return nil
}

// Addrs returns the addresses of the open sockets in the order that New got them, or nil while they
// are closed.
func (f *FrontDoor) Addrs() []net.Addr {
	f.mu.Lock()
	defer f.mu.Unlock()
	var addrs []net.Addr
	for _, p := range f.open {
		addrs = append(addrs, p.socket.LocalAddr())
	}
	return addrs
}

// Idle reports whether the front door has no listener, and so nothing to do.
func (f *FrontDoor) Idle() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.listeners) == 0
}

// Run opens all sockets, or none if one fails, and serves until ctx is done. Then it opens no flow.
// Flows end when they have been idle for two seconds, and all of them after tunnel.GracePeriod. Run
// returns when the last flow has ended.
func (f *FrontDoor) Run(ctx context.Context) error {
	conns, endConns := tunnel.Grace(ctx, f.grace)
	defer endConns()
	f.changing.Lock()
	opened := sync.OnceFunc(f.changing.Unlock)
	defer opened()
	f.mu.Lock()
	listeners := f.listeners
	f.mu.Unlock()
	ports, err := f.openAll(ctx, conns, listeners)
	if err != nil {
		return err
	}

	g, gctx := errgroup.WithContext(ctx)
	// While up is true, the last goroutine below keeps g from ending. So start may add a goroutine to g at any time.
	start := func(p *port) {
		var pctx context.Context
		pctx, p.leave = context.WithCancel(gctx)
		g.Go(func() error { return p.receiveWhile(pctx, f.cfg.Sockets) })
		g.Go(func() error {
			p.sweep(pctx)
			p.closeSocket()
			p.close()
			f.left(p)
			return nil
		})
	}
	g.Go(func() error {
		<-gctx.Done()
		f.setClosed()
		if ctx.Err() == nil {
			endConns() // a port has failed: nothing else would end the conns
		}
		return nil
	})
	f.mu.Lock()
	f.open, f.up, f.start, f.conns = ports, true, start, conns
	for _, p := range ports {
		start(p)
	}
	f.mu.Unlock()
	opened()
	return g.Wait()
}

func (f *FrontDoor) setClosed() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.open, f.up, f.start, f.conns, f.stopped = nil, false, nil, nil, true
}

// openAll opens all sockets, or none. conns is the context of the ports' conns.
func (f *FrontDoor) openAll(ctx, conns context.Context, listeners []Listener) ([]*port, error) {
	return listen.OpenAll(listeners, func(l Listener) (*port, error) {
		addr, err := resolve(l)
		if err != nil {
			return nil, listenError(l, err)
		}
		p, err := f.openPort(ctx, conns, l, addr)
		if err != nil {
			return nil, listenError(l, err)
		}
		return p, nil
	}, closeUnstarted)
}

func listenError(l Listener, err error) error {
	return fmt.Errorf("listening on %q of [mode.cloud.udp]: %w", l.Listen, err)
}

// closeSockets closes the sockets of ports that have not started.
func closeSockets(ports []*port) {
	for _, p := range ports {
		closeUnstarted(p)
	}
}

// closeUnstarted closes the socket of a port that has not started.
func closeUnstarted(p *port) {
	p.closeSocket()
	p.endConns() // releases the context
}

// openPort opens a port at addr, which resolve has returned.
func (f *FrontDoor) openPort(ctx, conns context.Context, l Listener, addr *net.UDPAddr) (*port, error) {
	socket, err := openOne(ctx, f.cfg.Sockets, addr)
	if err != nil {
		return nil, err
	}
	p := f.newPort(l, socket, conns)
	p.addr = addr
	return p, nil
}

func (f *FrontDoor) newPort(l Listener, socket *net.UDPConn, conns context.Context) *port {
	f.mu.Lock()
	limits := f.cfg.Limits
	f.mu.Unlock()
	p := newPort(l, socket, conns, &f.cfg, limits)
	p.dialer, p.keep, p.table.idle = f.dialer, f.keep, f.idle
	p.Allow = allowOrLoopback(l)
	return p
}

// newPort returns the port of a socket. conns is the context of its conns.
func newPort(l Listener, socket *net.UDPConn, conns context.Context, cfg *Config, limits Limits) *port {
	p := &port{
		Listener: l, line: l, socket: socket, keep: keepConn, gone: make(chan struct{}),
		counters: cfg.Counters, core: cfg.Core, software: cfg.Software, sink: &cfg.Sink, late: cfg.late,
		log:   cfg.Log.With("frontend", l.Listen),
		table: newTable(limits), current: make(map[string]*mux), muxes: make(map[*mux]struct{}),
		openers: make(map[netip.Prefix]int),
		retryAt: make(map[string]time.Time),
	}
	p.conns, p.endConns = context.WithCancel(conns)
	p.v6 = wantLocal(socket, socket.LocalAddr().(*net.UDPAddr).AddrPort())
	if raw, err := socket.SyscallConn(); err == nil { // it fails only for a closed socket
		growReceive(raw, receiveBuffer)
		receiveTrains(raw)
		p.out = &endSocket{conn: socket, raw: raw}
		p.drops.raw = raw
		p.drops.more() // ignore earlier drops: the process that had the socket before has counted them
		p.counters.watch(&p.drops)
	}
	return p
}

// resolve returns the address of a listener. The address that is checked here is the address that is
// opened.
func resolve(l Listener) (*net.UDPAddr, error) {
	addr, err := net.ResolveUDPAddr("udp", l.Listen)
	if err != nil {
		return nil, fmt.Errorf("%w; write an address and a port, such as 127.0.0.1:5353", err)
	}
	if len(l.Allow) == 0 && !addr.IP.IsLoopback() {
		return nil, fmt.Errorf("anybody who reaches this address could reach %s on the edge; "+
			"say who may send with %q = [\"10.0.0.0/8\"] under [mode.cloud.udpallow], or listen on 127.0.0.1",
			l.Target, l.Listen)
	}
	return addr, nil
}

func openOne(ctx context.Context, sockets *listen.Sockets, addr *net.UDPAddr) (*net.UDPConn, error) {
	network := "udp"
	if addr.IP.To4() != nil {
		network = "udp4" // otherwise 0.0.0.0 would also open every IPv6 address
	}
	c, err := sockets.OpenPacket(listen.Name{Network: network, Address: addr.String()}, func() (net.PacketConn, error) {
		return new(net.ListenConfig).ListenPacket(ctx, network, addr.String())
	})
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("%w; stop what listens there (ss -lunp shows it), or choose another port", err)
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return nil, fmt.Errorf("%w; this machine has no such address", err)
	case errors.Is(err, syscall.EACCES):
		return nil, fmt.Errorf("%w; ports below 1024 need CAP_NET_BIND_SERVICE, choose a higher one", err)
	case err != nil:
		return nil, err
	}
	return c.(*net.UDPConn), nil
}
