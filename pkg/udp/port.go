package udp

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/tunnel"
)

const (
	// receiveBuffer is the size of the receive buffer that a port asks the kernel for, in bytes.
	receiveBuffer = 4 << 20
	// drainIdle is how long a flow must be idle to end while its port drains.
	drainIdle = 2 * time.Second
	// drainInterval is how often a draining port looks for idle flows.
	drainInterval = 100 * time.Millisecond
	// sweeps is how often a port looks for idle flows during one idle time.
	sweeps = 12
)

// port serves one open socket.
type port struct {
	// Set once.
	addr     *net.UDPAddr // the configured address: its port is 0 if the kernel chooses; nil in some tests
	socket   *net.UDPConn
	out      *endSocket    // the same socket, for sending
	v6       bool          // the socket is one of IPv6
	dialer   tunnel.Dialer // nil: router dials
	router   Router        // chooses the target of each flow; nil: all flows have the target of the line
	counters *Counters
	core     *tunnel.Counters
	software string
	log      *slog.Logger
	sink     *tunnel.Sink    // is told of each flow
	conns    context.Context // the context of the muxes; done when the grace period is over
	endConns context.CancelFunc
	running  sync.WaitGroup // the muxes
	gone     chan struct{}  // closed when the port has ended
	drops    receiveDrops
	lull     lull          // one goroutine receives for all muxes
	keep     time.Duration // see keepConn
	late     time.Duration // see newQueue

	// One warning a minute each, so that one kind of failure does not hide another: caller not
	// allowed, dial failed, limit reached, flow refused by the edge, no room for a flow.
	warnDenied, warnFailed, warnFull, warnFlow, warnFlows tunnel.Limiter

	mu sync.Mutex // guards the following, and the flows
	Listener
	line     Listener           // the line as configured; the embedded Listener has the default of Allow filled in
	leave    context.CancelFunc // makes the port drain and end; nil: the port has not started
	table    *table
	current  map[string]*mux // by target, the mux of new flows; nil: the next flow makes a mux
	muxes    map[*mux]struct{}
	openers  map[netip.Prefix]int // how many muxes the callers of a source have opened
	retryAt  map[string]time.Time // by target, the earliest time of the next dial
	lookups  lookups              // questions to the router; without one, nobody counts them
	draining bool                 // no new flow is opened

	// events are the events of flows that have ended. sweep gives them to the audit, which may wait for a disk: the
	// goroutine that receives must not wait.
	events []tunnel.Event
	missed int // how many events were lost because events was full
}

// receiveWhile waits until this process owns the socket, and then receives. It returns when the socket is closed, or
// when another process has taken it over. The flows can then still send.
func (p *port) receiveWhile(ctx context.Context, sockets *listen.Sockets) error {
	select {
	case <-sockets.Serving():
	case <-ctx.Done():
		return nil
	}
	received := make(chan struct{})
	var waiting sync.WaitGroup
	waiting.Go(func() {
		select {
		case <-sockets.Left():
			p.socket.SetReadDeadline(time.Unix(1, 0))
		case <-received:
		}
	})
	defer waiting.Wait()
	defer close(received)
	return p.receive()
}

// receive reads datagrams and sends or queues them for the node, until the socket is closed. A panic does not
// end it.
func (p *port) receive() error {
	for {
		panicked := true
		err := tunnel.Guard(p.log, p.core, "the datagram is dropped", func() error {
			err := p.receiveAll()
			panicked = false
			return err
		})
		if !panicked {
			return err
		}
	}
}

func (p *port) receiveAll() error {
	known := controls{v6: p.v6}
	b, control := new(buffer), make([]byte, controlRoom)
	for failures := 0; ; {
		n, cn, _, caller, err := p.socket.ReadMsgUDPAddrPort(b[:], control)
		switch {
		case errors.Is(err, net.ErrClosed), errors.Is(err, os.ErrDeadlineExceeded):
			return nil
		case err != nil && listen.Transient(err): // such as a lack of memory, which may pass
			if failures++; failures == maxFailures {
				p.log.Warn("a UDP port receives nothing for now", "frontend", p.frontend(), "err", err)
			}
			time.Sleep(min(time.Duration(failures)*time.Millisecond, time.Second))
			continue
		case err != nil:
			return fmt.Errorf("receiving datagrams at %q: %w", p.frontend(), err)
		}
		failures = 0
		c := known.of(control[:cn])
		for rest, more := b[:n], true; more; {
			one := rest
			if c.segment > 0 && c.segment < len(rest) {
				one = rest[:c.segment]
			}
			rest = rest[len(one):]
			more = len(rest) > 0
			if why, ok := p.forward(caller, c, one); !ok {
				p.counters.Drop(why, 1)
			}
		}
	}
}

// maxFailures is how many errors in a row, with no datagram between, end a flow of an edge; a port logs them.
const maxFailures = 100

// forward sends or queues a datagram of a caller, or returns why it is dropped.
func (p *port) forward(caller netip.AddrPort, c *control, datagram []byte) (why Reason, ok bool) {
	switch {
	case len(datagram) > maxDatagram:
		return DropTooLong, false // the edge would reset the conn
	case caller.Port() == 0:
		return DropDenied, false // nobody can answer, and the sender may have any address
	}
	now := time.Now()
	f, why, ok := p.flowOf(caller, c, datagram, now)
	if f == nil {
		return why, ok
	}
	if why, ok = f.mux.out.send(&f.share, f.id, datagram, now); !ok {
		p.mu.Lock()
		defer p.mu.Unlock()
		f.sent -= int64(len(datagram))
	}
	return why, ok
}

// flowOf returns the open flow of a datagram, and counts the datagram as sent. If there is no such flow, it opens one,
// queues the datagram, and returns nil. If it cannot, it also returns nil, and ok is false; why is the reason.
func (p *port) flowOf(
	caller netip.AddrPort, c *control, datagram []byte, now time.Time,
) (f *flow, why Reason, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f, target := p.table.flows[flowKey{caller, c.local}], p.Target
	if p.router != nil {
		if f, target, why, ok = p.routeLocked(f, caller, c, now); !ok {
			return nil, why, false
		}
	}
	if f == nil {
		why, ok = p.forwardFirstLocked(caller, c, target, datagram, now)
		return nil, why, ok
	}
	p.table.touch(f, true, now)
	f.sent += int64(len(datagram))
	return f, 0, true
}

// forwardFirstLocked opens a flow to a target and queues its first datagram. If it cannot, it returns why. The caller
// holds mu.
func (p *port) forwardFirstLocked(
	caller netip.AddrPort, c *control, target string, datagram []byte, now time.Time,
) (why Reason, ok bool) {
	f, why, ok := p.openLocked(caller, c, target, now)
	if !ok {
		return why, false
	}
	shown := netip.AddrPortFrom(caller.Addr().Unmap().WithZone(""), caller.Port()) // a zone may have any name
	open := opening{caller: shown.String(), datagram: datagram}.encode()
	if why, ok = f.mux.out.add(&f.share, kindOpen, f.id, open, now); !ok {
		f.refusal = tunnel.Refusef(tunnel.Overloaded, "the first datagram was dropped: %s", why)
		p.forgetLocked(f) // without an end: the edge does not know the flow
		return why, false
	}
	p.counters.Opened.Add(1)
	p.showLocked(f)
	p.table.touch(f, true, now)
	f.sent += int64(len(datagram))
	return 0, true
}

// openLocked makes a flow to a target. If it cannot, it returns why. The caller holds mu.
func (p *port) openLocked(
	caller netip.AddrPort, c *control, target string, now time.Time,
) (f *flow, why Reason, ok bool) {
	switch {
	case !p.Allow.Permits(caller.Addr()):
		p.denyLocked(caller)
		return nil, DropDenied, false
	case p.draining:
		return nil, DropDraining, false
	case p.current[target] == nil && now.Before(p.retryAt[target]):
		return nil, DropUnreachable, false
	case p.current[target] == nil && !p.roomForMuxLocked(caller.Addr()):
		return nil, DropFlows, false
	}
	victim, limit, ok := p.table.room(caller.Addr(), now)
	if victim != nil || !ok {
		p.core.Limited(limit)
		if n, log := p.warnFlows.Allow(); log {
			p.log.Warn("too many flows: a limit is reached, see docs/limits.md",
				"target", p.Target, "limit", limit, "caller", caller, "skipped", n)
		}
	}
	if !ok {
		return nil, DropFlows, false
	}
	if victim != nil {
		p.counters.Evicted.Add(1)
		p.endLocked(victim)
	}
	m := p.currentLocked(target, caller.Addr())
	m.lastID++
	for m.flows[m.lastID] != nil { // after 2^32 flows, an old one may still live
		m.lastID++
	}
	f = &flow{key: flowKey{caller, c.local}, reply: c.reply, mux: m, id: m.lastID, since: now, routed: now}
	m.flows[f.id], m.emptyAt = f, time.Time{}
	p.table.insert(f, now)
	p.counters.Flows.Add(1)
	return f, 0, true
}

// currentLocked returns the mux of new flows to a target. If there is no such mux, it starts one for a caller. The
// caller holds mu.
func (p *port) currentLocked(target string, caller netip.Addr) *mux {
	if p.current[target] == nil {
		m := newMux(p, target)
		m.opener = p.table.sourceOf(caller)
		p.current[target] = m
		p.muxes[m] = struct{}{}
		p.openers[m.opener]++
		p.running.Go(func() {
			p.guard("the conn ends", func() { m.run(p.conns) })
			m.wire.Reset() //nolint:errcheck // it never fails
		})
	}
	return p.current[target]
}

// endLocked ends a flow at this side and at the edge. The caller holds mu.
func (p *port) endLocked(f *flow) {
	f.mux.out.control(kindEnd, f.id, nil)
	p.removeLocked(f)
}

// removeLocked ends a flow only at this side. The caller holds mu.
func (p *port) removeLocked(f *flow) {
	p.forgetLocked(f)
	if f.mux.retired && len(f.mux.flows) == 0 {
		f.mux.out.end()
	}
}

// forgetLocked removes a flow from the tables. The caller holds mu.
func (p *port) forgetLocked(f *flow) {
	if f.ended {
		return
	}
	p.table.remove(f)
	delete(f.mux.flows, f.id)
	if len(f.mux.flows) == 0 {
		f.mux.emptyAt = time.Now()
	}
	p.counters.Flows.Add(-1)
	p.noteLocked(f)
}

// retireLocked makes new flows use another mux than m. The conn of m ends with its last flow. The caller holds mu.
func (p *port) retireLocked(m *mux) {
	m.retired = true
	if p.current[m.to.Target] == m {
		delete(p.current, m.to.Target)
	}
	if len(m.flows) == 0 {
		m.out.end()
	}
}

// dropLocked removes the flows of a mux whose conn has ended: the next datagram of each opens a new
// flow. The caller holds mu.
func (p *port) dropLocked(m *mux) {
	m.retired = true
	if p.current[m.to.Target] == m {
		delete(p.current, m.to.Target)
	}
	delete(p.muxes, m)
	if p.openers[m.opener]--; p.openers[m.opener] == 0 {
		delete(p.openers, m.opener)
	}
	for _, f := range m.flows {
		f.lost = true
		p.forgetLocked(f)
	}
}

// failed notes that the conn of m could not be opened.
func (p *port) failed(m *mux, err error) {
	p.mu.Lock()
	m.failure = err
	p.retryAt[m.to.Target] = time.Now().Add(retryTime)
	p.mu.Unlock()
	m.out.abort(err, DropUnreachable)
	if p.conns.Err() == nil {
		m.logFailed(err)
	}
}

// dial opens a conn to the target of the line to. node is the node that was dialled last.
func (p *port) dial(ctx context.Context, to Listener) (c net.Conn, node tunnel.NodeName, err error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	if p.router != nil {
		c, err = p.router.Dial(ctx, to.Target)
		return c, "", err
	}
	node = to.Node
	r := tunnel.Request{
		Node:     to.Node,
		Among:    to.Among,
		Category: name,
		Network:  tunnel.NetworkUDP,
		Addr:     to.Target,
		Caller:   to.Listen,
	}
	if to.Node == "" {
		r.Chosen = &node
	}
	c, err = p.dialer.Dial(ctx, r)
	return c, node, err
}

// sweep ends idle flows and conns without flows, until ctx is done. Then the port drains: sweep
// returns when all flows have been idle for drainIdle, or the grace period is over. A panic ends neither sweep nor the
// process: sweep looks again at the next tick.
func (p *port) sweep(ctx context.Context) {
	ticker := time.NewTicker(p.table.idle / sweeps)
	defer ticker.Stop()
	for ctx.Err() == nil {
		select {
		case <-ticker.C:
			p.guard("idle flows end later", func() {
				p.endIdle(p.table.idle)
				p.closeUnused()
			})
			p.handOver()
		case <-ctx.Done():
		}
	}
	p.mu.Lock()
	p.draining = true
	p.mu.Unlock()
	ticker.Reset(drainInterval)
	for left := 1; ; {
		p.guard("idle flows end later", func() { left = p.endIdle(min(drainIdle, p.table.idle)) })
		if left == 0 {
			return
		}
		select {
		case <-ticker.C:
		case <-p.conns.Done():
			return
		}
	}
}

// guard runs f. A panic of f is logged and counted. what says in the log what the panic costs.
func (p *port) guard(what string, f func()) {
	run := func() error { f(); return nil }
	tunnel.Guard(p.log, p.core, what, run) //nolint:errcheck // it is logged
}

// endIdle ends the flows that have been idle, and returns how many flows are left.
func (p *port) endIdle(idle time.Duration) (left int) {
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	for f := p.table.idleFor(idle, now); f != nil; f = p.table.idleFor(idle, now) {
		p.endLocked(f)
	}
	return len(p.table.flows)
}

// closeUnused closes conns that have had no flow for keepConn, and frees memory of idle queues.
func (p *port) closeUnused() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for m := range p.muxes {
		m.out.trim()
		if len(m.flows) == 0 && !m.emptyAt.IsZero() && time.Since(m.emptyAt) >= p.keep {
			p.retireLocked(m)
		}
	}
	maps.DeleteFunc(p.retryAt, func(_ string, at time.Time) bool { return time.Now().After(at) })
}

// closeSocket closes the socket: the port receives no more datagrams.
func (p *port) closeSocket() {
	p.counters.forget(&p.drops)
	p.socket.Close()
}

// close ends all conns after the socket was closed, and waits for them.
func (p *port) close() {
	p.mu.Lock()
	for m := range p.muxes {
		p.retireLocked(m)
		m.out.end()
	}
	p.mu.Unlock()
	p.running.Wait()
	p.handOver()
}

// allowOrLoopback returns the sources that may use a listener. Without a list, only callers on this machine may.
func allowOrLoopback(l Listener) auth.Sources {
	if len(l.Allow) > 0 {
		return l.Allow
	}
	return auth.Sources{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128")}
}
