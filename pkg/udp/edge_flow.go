package udp

import (
	"container/list"
	"context"
	"errors"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

// edgeConn is the edge's end of one conn, with the flows that it carries. tunnel.Splice owns it.
type edgeConn struct {
	*wire

	// Set once.
	edge   *Edge
	caller *callerFlows
	target string          // the target of flows that name no target
	ctx    context.Context // the context of dials; done when the conn has ended
	cancel context.CancelFunc
	drain  chan struct{} // closed by Edge.Run when the edge is about to stop

	running sync.WaitGroup // sweep, the dials, and the goroutine of each flow

	// Owned by the goroutine that writes.
	sender *sender
	train  *train[*edgeFlow]
	oob    []byte    // control messages of a train
	now    time.Time // the time of all frames of one Write; zero: the clock was not read yet

	mu       sync.Mutex // guards the following
	flows    map[flowID]*edgeFlow
	order    list.List // of *edgeFlow, in the order in which victimLocked looks at them
	opening  int       // flows that are being dialled
	draining bool      // no flow is opened
	over     bool      // the conn has ended
	// closing are the sockets of flows that have ended. Closing a socket waits until receive has handled a
	// datagram, so unlock closes the sockets after it has released mu.
	closing []*net.UDPConn
}

// edgeFlow is the datagrams between one caller and one target, at the edge.
type edgeFlow struct {
	// Set once.
	conn   *edgeConn
	id     flowID
	target string
	caller string
	began  time.Time

	// last is when the last datagram came or went, in nanoseconds since began. Goroutines change it without
	// a lock, so a change does not move the flow in edgeConn.order.
	last atomic.Int64

	ended     atomic.Bool // the socket is about to be closed: receive returns even if datagrams wait
	answered  atomic.Bool // the target has sent a datagram
	confirmed atomic.Bool // the caller has sent a datagram after that, see table

	share share // guarded by queue.mu

	// Guarded by edgeConn.mu.
	socket  *endSocket    // nil while the target is being dialled
	ready   bool          // the goroutine that writes may send, since nothing is pending any more
	pending [][]byte      // datagrams that wait for the socket
	waiting int           // bytes of pending, with pendingCost for each
	drops   receiveDrops  // counts what the kernel dropped at socket
	element *list.Element // nil: the flow has ended
	failed  Reason        // why datagrams that were not sent are dropped
}

// Close implements net.Conn. It waits until no goroutine of the conn is left.
func (c *edgeConn) Close() error {
	c.wire.Reset() //nolint:errcheck // it never fails
	c.running.Wait()
	return nil
}

// handle handles a frame of the cloud.
func (c *edgeConn) handle(f frame) error {
	switch f.kind {
	case kindDatagram:
		c.datagram(f.flow, f.payload)
	case kindOpen:
		o, err := parseOpening(f.payload)
		if err != nil {
			return err
		}
		c.train.flush() // a flow that must make room may have datagrams in the train
		c.open(f.flow, o)
	case kindEnd:
		c.train.flush() // the flow may have datagrams in the train
		c.mu.Lock()
		if flow := c.flows[f.flow]; flow != nil {
			c.endLocked(flow)
		}
		c.unlock()
	}
	return nil
}

// unlock releases mu, and then closes the sockets of the flows that endLocked has ended.
func (c *edgeConn) unlock() {
	closing := c.closing
	c.closing = nil
	c.mu.Unlock()
	for _, s := range closing {
		s.Close()
	}
}

// flushed implements wire.flush: the frames of a Write have been handled.
func (c *edgeConn) flushed() {
	c.train.flush()
	c.now = time.Time{}
}

// datagram sends a datagram to the target of a flow.
func (c *edgeConn) datagram(id flowID, p []byte) {
	c.mu.Lock()
	f := c.flows[id]
	if f == nil {
		c.mu.Unlock()
		c.edge.counters.Drop(DropUnknown, 1)
		c.out.control(kindEnd, id, nil) // the cloud opens a new flow for the next datagram
		return
	}
	if !f.ready {
		fits := f.waiting+len(p)+pendingCost <= maxPending
		if fits {
			f.addPendingLocked(p)
		}
		c.mu.Unlock()
		if !fits {
			c.edge.counters.Drop(DropOpening, 1)
		}
		return
	}
	c.mu.Unlock()
	if c.now.IsZero() { // read the clock once for all frames of a Write; flushed resets now
		c.now = time.Now()
	}
	f.touch(c.now)
	if f.answered.Load() && !f.confirmed.Load() {
		f.confirmed.Store(true)
	}
	c.train.add(f, p)
}

// addPendingLocked adds a copy of p to pending. The caller holds edgeConn.mu, or nobody else knows the flow.
func (f *edgeFlow) addPendingLocked(p []byte) {
	f.pending, f.waiting = append(f.pending, append([]byte(nil), p...)), f.waiting+len(p)+pendingCost
}

func (f *edgeFlow) touch(now time.Time) { f.last.Store(int64(now.Sub(f.began))) }

// idle returns the time since the last datagram in either direction.
func (f *edgeFlow) idle() time.Duration { return time.Since(f.began) - time.Duration(f.last.Load()) }

func (c *edgeConn) sendToTarget(f *edgeFlow, p []byte, segment int) error {
	var control []byte
	if segment > 0 {
		c.oob = appendSegment(c.oob[:0], segment)
		control = c.oob
	}
	return f.send(c.sender, p, control)
}

func (f *edgeFlow) send(by *sender, p, control []byte) error {
	err := by.send(f.socket, p, control)
	if !mayBeReport(err) {
		return err
	}
	again := by.send(f.socket, p, control)
	if !errors.Is(again, err) && !f.reported(err) { // if both are the same, err was about this datagram
		f.conn.end(f)
	}
	return again
}

// reported counts an earlier datagram that did not arrive. It returns false if the flow must end, so
// that the next flow tries another address of the target.
func (f *edgeFlow) reported(err error) (goOn bool) {
	e := f.conn.edge
	if errors.Is(err, syscall.EMSGSIZE) { // the kernel sends the next datagram of this length in fragments
		e.counters.Drop(DropTooLong, 1)
		return true
	}
	f.refused(err)
	if !errors.Is(err, syscall.ECONNREFUSED) || f.answered.Load() || isAddress(f.target) {
		return true
	}
	e.refusedBy(f.socket.conn.RemoteAddr().(*net.UDPAddr).AddrPort())
	return time.Since(f.began) < e.refused
}

// refused counts and logs a datagram that the target's machine has refused.
func (f *edgeFlow) refused(err error) {
	f.conn.edge.counters.Drop(DropRefused, 1)
	f.conn.edge.logRefused(f, err)
}

func (c *edgeConn) sentToTarget(_ *edgeFlow, n, bytes int, err error) {
	if err != nil {
		c.edge.counters.Drop(notSent(err), uint64(n)) //nolint:gosec // a count
		return
	}
	c.edge.counters.ToTarget.add(n, bytes)
}

// mayBeReport reports whether err may be the report (ICMP) of a machine on the path about an earlier
// datagram. The kernel returns each report once, as the error of the next call on the socket. If this
// call should send a datagram, the kernel has not sent it.
func mayBeReport(err error) bool {
	errno, ok := errors.AsType[syscall.Errno](err)
	if !ok {
		return false
	}
	switch errno {
	case syscall.EAGAIN, syscall.ENOBUFS, syscall.ENOMEM, // no room
		syscall.EPERM,               // a firewall of this machine
		syscall.EINVAL, syscall.EIO, // see train.flush
		syscall.EBADF, syscall.ENOTSOCK: // no socket
		return false
	}
	return true
}

// open opens a flow and sends its first datagram. If the target is an address, open dials it at once. A
// name is resolved in another goroutine, so that the other flows do not wait.
func (c *edgeConn) open(id flowID, o opening) {
	f := &edgeFlow{conn: c, id: id, target: o.addr, caller: o.caller, began: time.Now(), failed: DropLost}
	if f.target == "" {
		f.target = c.target
	}
	if c.edge.single && f.target != c.target {
		c.edge.counters.Drop(DropDenied, 1)
		err := tunnel.Refusef(tunnel.Denied, "a flow of this conn names another target")
		c.edge.logDial(f, err)
		c.out.control(kindEnd, id, refusalOf(err).encode())
		return
	}
	wait := !isAddress(f.target)
	if wait {
		f.addPendingLocked(o.datagram)
	}
	switch why, err := c.insert(f, wait); {
	case err != nil:
		c.edge.counters.Drop(why, 1)
		c.out.control(kindEnd, id, refusalOf(err).encode())
	case wait:
		c.running.Go(func() { c.guard(func() { c.dial(f) }) })
	case c.dial(f):
		c.train.add(f, o.datagram)
	default:
		c.edge.counters.Drop(f.failed, 1)
	}
}

// isAddress reports whether the host of a target is an IP address.
func isAddress(target string) bool {
	_, err := netip.ParseAddrPort(target)
	return err == nil
}

// guard runs f. A panic ends this conn and no other.
func (c *edgeConn) guard(f func()) {
	run := func() error { f(); return nil }
	if tunnel.Guard(c.edge.log, c.edge.core, "the conn ends", run) != nil {
		c.wire.over()
	}
}

// insert adds a flow that has no socket yet. If it cannot, it returns why.
func (c *edgeConn) insert(f *edgeFlow, wait bool) (Reason, error) {
	e := c.edge
	limit := e.limit.Load()
	full := e.flows.Add(1) > limit
	if most := max(1, limit/e.share); c.caller.flows.Add(1) > most {
		limit, full = most, true
	}
	if full {
		e.core.Limited(tunnel.LimitFlows)
		if n, ok := e.warnFlows.Allow(); ok {
			e.log.Warn("too many flows: a limit is reached, see docs/limits.md",
				"limit", tunnel.LimitFlows, "caller", f.caller, "skipped", n)
		}
		if !c.evict() {
			c.oneLess()
			return DropFlows, tunnel.Refusef(tunnel.Overloaded, "limit %v: there are %d flows", tunnel.LimitFlows, limit)
		}
	}
	c.mu.Lock()
	defer c.unlock()
	old := c.flows[f.id]
	switch {
	case c.draining:
		c.oneLess()
		return DropDraining, tunnel.Refusef(tunnel.Draining, "the edge is about to stop")
	case c.over:
		c.oneLess()
		return DropLost, tunnel.Refusef(tunnel.Gone, "the conn has ended")
	case wait && c.opening >= maxOpening:
		c.oneLess()
		return DropOpening, tunnel.Refusef(tunnel.Overloaded, "%d flows wait for the names of their targets", maxOpening)
	case old != nil: // the cloud has used all ids
		c.endLocked(old)
	}
	c.opening++
	c.flows[f.id], f.element = f, c.order.PushBack(f)
	e.counters.Flows.Add(1)
	e.counters.Opened.Add(1)
	return 0, nil
}

// evict ends a flow of this conn to make room for another flow. It returns false if no flow may be ended.
func (c *edgeConn) evict() bool {
	c.mu.Lock()
	defer c.unlock()
	f := c.victimLocked()
	if f == nil {
		return false
	}
	c.edge.counters.Evicted.Add(1)
	c.out.control(kindEnd, f.id, nil)
	c.endLocked(f)
	return true
}

// victimLocked returns a flow that may be ended to make room: the oldest fresh flow, or a flow that has
// been idle for evictIdle; nil: there is none. It looks only at a few flows, and moves those that it
// does not choose to the back of the list. The caller holds mu.
func (c *edgeConn) victimLocked() *edgeFlow {
	const looks = 32
	for range min(looks, c.order.Len()) {
		front := c.order.Front()
		f := front.Value.(*edgeFlow)
		if !f.confirmed.Load() || f.idle() >= evictIdle {
			return f
		}
		c.order.MoveToBack(front)
	}
	return nil
}

// dial opens the socket of a flow, and sends the datagrams that wait for the socket. It returns false
// if the flow has failed or ended.
func (c *edgeConn) dial(f *edgeFlow) bool {
	socket, err := c.edge.policy.DialUDP(c.ctx, f.target, c.edge.refusedAt)
	if err != nil {
		c.fail(f, err)
		return false
	}
	raw, err := socket.SyscallConn()
	if err != nil {
		socket.Close()
		c.fail(f, err)
		return false
	}
	growReceive(raw, flowBuffer)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.opening--
	if f.element == nil { // the flow has ended meanwhile
		socket.Close()
		return false
	}
	f.socket, f.drops.raw = &endSocket{conn: socket, raw: raw}, raw
	c.running.Go(func() { c.guard(f.receive) })
	return c.sendPendingLocked(f)
}

// sendPendingLocked sends, in order, the datagrams that have waited for the socket of a flow. Then it
// sets ready, so that the goroutine that writes sends. It returns false if the flow has ended. The caller
// holds mu; sendPendingLocked releases mu while it sends.
func (c *edgeConn) sendPendingLocked(f *edgeFlow) bool {
	own := c.sender
	if len(f.pending) > 0 { // the caller is not the goroutine that owns c.sender
		own = newSender()
	}
	for len(f.pending) > 0 {
		pending := f.pending
		f.pending, f.waiting = nil, 0
		c.mu.Unlock()
		for _, p := range pending {
			c.sentToTarget(f, 1, len(p), f.send(own, p, nil))
		}
		c.mu.Lock()
	}
	f.ready = f.element != nil
	return f.ready
}

// fail ends a flow whose target could not be dialled, and tells the cloud why.
func (c *edgeConn) fail(f *edgeFlow, err error) {
	c.mu.Lock()
	c.opening--
	f.failed = DropUnreachable
	if tunnel.CodeOf(err) == tunnel.Denied {
		f.failed = DropDenied
	}
	if f.element != nil {
		c.endLocked(f)
	}
	c.unlock()
	c.edge.logDial(f, err)
	c.out.control(kindEnd, f.id, refusalOf(err).encode())
}

// receive sends or queues the target's datagrams for the cloud, until the socket is closed.
func (f *edgeFlow) receive() {
	c := f.conn
	handle := func(p []byte) bool {
		if f.ended.Load() { // after endLocked, and before the socket was closed
			c.edge.counters.Drop(DropUnknown, 1)
			return false
		}
		now := time.Now()
		f.touch(now)
		if !f.answered.Load() {
			f.answered.Store(true)
		}
		if len(p) > maxDatagram { // the cloud would reset the conn
			c.edge.counters.Drop(DropTooLong, 1)
		} else if why, ok := c.out.send(&f.share, f.id, p, now); !ok {
			c.edge.counters.Drop(why, 1)
		}
		return true
	}
	failed := func(err error) (goOn bool) {
		if f.ended.Load() || errors.Is(err, syscall.EBADF) || errors.Is(err, syscall.ENOTSOCK) {
			return false
		}
		return !mayBeReport(err) || f.reported(err)
	}
	f.socket.receive(&c.edge.buffers, handle, failed) //nolint:errcheck // the socket was closed, or is of no more use
	c.end(f)                                          // unless it has ended, the socket is of no use
}

// end ends a flow, unless it has ended, and tells the cloud.
func (c *edgeConn) end(f *edgeFlow) {
	c.mu.Lock()
	defer c.unlock()
	if f.element != nil {
		c.out.control(kindEnd, f.id, nil)
		c.endLocked(f)
	}
}

// endLocked ends a flow that has not ended. The caller holds mu, and releases it by unlock.
func (c *edgeConn) endLocked(f *edgeFlow) {
	delete(c.flows, f.id)
	c.order.Remove(f.element)
	f.element = nil
	e := c.edge
	if f.socket != nil {
		e.counters.Drop(DropReceive, f.drops.more())
		f.ended.Store(true)
		c.closing = append(c.closing, f.socket.conn)
	}
	e.counters.Drop(f.failed, uint64(len(f.pending)))
	f.pending = nil
	e.counters.Flows.Add(-1)
	c.oneLess()
}

// oneLess counts a flow of this conn that has ended, or has not begun.
func (c *edgeConn) oneLess() {
	c.edge.flows.Add(-1)
	c.caller.flows.Add(-1)
}

// endAll implements wire.ended: the conn has ended, and so have its flows.
func (c *edgeConn) endAll() {
	c.edge.forget(c)
	c.cancel()
	c.mu.Lock()
	defer c.unlock()
	c.over = true
	for _, f := range c.flows {
		c.endLocked(f)
	}
}

// sweep ends idle flows, until the conn has ended. When the edge is about to stop, it ends the conn
// after the flows have been idle for drainIdle.
func (c *edgeConn) sweep() {
	idle, drain := c.edge.idle, c.drain
	ticker := time.NewTicker(idle / sweeps)
	defer ticker.Stop()
	for {
		select {
		case <-ticker.C:
		case <-drain:
			drain, idle = nil, min(drainIdle, idle)
			ticker.Reset(drainInterval)
			c.mu.Lock()
			c.draining = true
			c.mu.Unlock()
		case <-c.ctx.Done():
			return
		}
		if c.endIdle(idle) == 0 && drain == nil {
			c.out.end()
			return
		}
		c.out.trim()
	}
}

// endIdle ends the flows that have been idle, or may not go on, tells the cloud, and returns how many flows are left.
func (c *edgeConn) endIdle(idle time.Duration) (left int) {
	over := c.edge.keeps != nil && c.target != "" && !c.edge.keeps(c.target)
	c.mu.Lock()
	defer c.unlock()
	for _, f := range c.flows {
		if over || f.idle() >= idle {
			c.out.control(kindEnd, f.id, nil)
			c.endLocked(f)
			continue
		}
		if f.idle() < c.edge.idle/sweeps && f.socket != nil { // the flow was in use since the last sweep
			c.edge.counters.Drop(DropReceive, f.drops.more())
		}
	}
	return len(c.flows)
}
