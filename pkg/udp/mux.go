package udp

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

const (
	// dialTimeout is how long a dial through the tunnel may take.
	dialTimeout = 10 * time.Second
	// retryTime is how long a port waits after a failed dial before it dials again. Meanwhile it drops
	// datagrams.
	retryTime = time.Second
	// keepConn is how long a conn without flows stays open.
	keepConn = 60 * time.Second
)

// mux is one conn of a port to a node, with the flows that it carries.
type mux struct {
	// Set once.
	port *port
	to   Listener // the port's line when the mux was made
	log  *slog.Logger
	wire *wire
	out  *queue

	// Guarded by port.mu.
	flows   map[flowID]*flow
	opener  netip.Prefix // the source of the caller whose flow was the first
	lastID  flowID
	retired bool            // no new flow uses it
	emptyAt time.Time       // since when the mux has no flow; zero: it has a flow
	node    tunnel.NodeName // the node that was dialled last; before the first dial, the node of the port's line
	isOpen  bool            // the conn was opened
	failure error           // why the conn could not be opened

	// Owned by the goroutine that writes to wire.
	sender *sender
	train  *train[*flow]
	oob    []byte    // control messages of a train
	now    time.Time // the time of all frames of one Write; zero: the clock was not read yet
}

// newMux returns a mux for a target, by p's line now. The caller holds p.mu.
func newMux(p *port, target string) *mux {
	out := newQueue(p.counters, &p.counters.ToTarget, p.late)
	out.lull = &p.lull
	to := p.Listener
	to.Target = target
	log := p.log.With("target", target)
	if p.router == nil {
		log = log.With("node", p.Node)
	}
	m := &mux{
		port: p, to: to, node: p.Node, log: log,
		out: out, sender: newSender(), flows: make(map[flowID]*flow),
	}
	m.train = newTrain(m.sendToCaller, m.sentToCaller, canSegment())
	m.wire = &wire{name: addr(p.Listen), out: out, ended: m.ended, flush: m.flushed}
	m.wire.in.handle = m.handle
	return m
}

// run opens the conn and carries the flows until the conn has ended.
func (m *mux) run(ctx context.Context) {
	started := time.Now()
	conn, node, err := m.port.dial(ctx, m.to)
	if m.port.router == nil {
		m.port.core.Doors[tunnel.DoorUDP].Ended(time.Since(started), err)
	}
	m.opened(node, err == nil)
	if err != nil {
		m.port.failed(m, err)
		return
	}
	m.log.Debug("conn for datagrams opened", "dur", time.Since(started))
	m.out.opened()
	_, _, err = tunnel.Splice(ctx, m.wire, conn)
	m.log.Debug("conn for datagrams ended", "dur", time.Since(started), "err", err)
}

// opened notes which node was dialled, and whether the dial has opened the conn. If so, the flows that wait for the
// conn open.
func (m *mux) opened(node tunnel.NodeName, ok bool) {
	m.port.mu.Lock()
	defer m.port.mu.Unlock()
	m.node, m.isOpen = node, ok
	if ok {
		for _, f := range m.flows {
			m.port.showLocked(f)
		}
	}
}

// ended implements wire.ended: no flow can use the conn any more.
func (m *mux) ended() {
	m.port.mu.Lock()
	defer m.port.mu.Unlock()
	m.port.dropLocked(m)
}

// flushed implements wire.flush: the frames of a Write have been handled.
func (m *mux) flushed() {
	m.train.flush()
	m.now = time.Time{}
}

// handle handles a frame of the edge.
func (m *mux) handle(f frame) error {
	switch f.kind {
	case kindDatagram:
		if flow := m.touch(f.flow, len(f.payload)); flow != nil {
			m.train.add(flow, f.payload)
		} else {
			m.port.counters.Drop(DropUnknown, 1)
		}
	case kindEnd:
		e, err := parseEnding(f.payload)
		if err != nil {
			return err
		}
		m.endedAtEdge(f.flow, e)
	}
	return nil
}

// touch returns the flow to whose caller a datagram of n bytes goes, or nil if the flow has ended.
func (m *mux) touch(id flowID, n int) *flow {
	if m.now.IsZero() { // read the clock once for all frames of a Write; flushed resets now
		m.now = time.Now()
	}
	p := m.port
	p.mu.Lock()
	defer p.mu.Unlock()
	f := m.flows[id]
	if f != nil {
		f.received += int64(n)
		p.table.touch(f, false, m.now)
	}
	return f
}

// endedAtEdge removes a flow that the edge has ended, or never opened.
func (m *mux) endedAtEdge(id flowID, e ending) {
	p := m.port
	p.mu.Lock()
	f := m.flows[id]
	if f != nil {
		if e.code != 0 && e.code != tunnel.Draining {
			f.refusal = &tunnel.Refusal{Code: e.code, Text: e.text}
		}
		p.removeLocked(f)
	}
	if e.code == tunnel.Draining {
		p.retireLocked(m)
	}
	p.mu.Unlock()
	if f != nil && e.code != 0 && e.code != tunnel.Draining {
		if n, ok := p.warnFlow.Allow(); ok {
			m.log.Warn("the edge does not open a flow", "caller", f.key.caller,
				"err", &tunnel.Refusal{Code: e.code, Text: e.text}, "skipped", n)
		}
	}
}

// sendToCaller sends datagrams of a flow to its caller. It does not wait for room in the socket's
// buffer: all flows of the port would wait.
func (m *mux) sendToCaller(f *flow, p []byte, segment int) error {
	control := f.reply
	if segment > 0 {
		m.oob = appendSegment(append(m.oob[:0], f.reply...), segment)
		control = m.oob
	}
	return m.sender.sendTo(m.port.out, m.port.v6, f.key.caller, p, control)
}

func (m *mux) sentToCaller(_ *flow, n, bytes int, err error) {
	if err != nil {
		m.port.counters.Drop(notSent(err), uint64(n)) //nolint:gosec // a count
		return
	}
	m.port.counters.ToCaller.add(n, bytes)
}

// tooOld reports whether err is the answer of an edge that has no module for UDP. Such an edge refuses the open with
// the code internal. An edge with the module uses this code only for an unknown failure of a system call. The log also
// has the text of err, which shows the difference.
func tooOld(err error) bool {
	r, ok := errors.AsType[*tunnel.Refusal](err)
	return ok && r.Code == tunnel.Internal
}

// logFailed logs why there is no conn to the node.
func (m *mux) logFailed(err error) {
	p := m.port
	m.log.Debug("conn for datagrams refused", "err", err)
	switch {
	case p.router == nil && tooOld(err): // with a router, the answer comes from the cloud, not from an edge
		if n, ok := p.warnFailed.Allow(); ok {
			m.log.Warn("the edge is too old for UDP: install version "+p.software+" there, as here",
				"err", err, "skipped", n)
		}
	case tunnel.CodeOf(err) == tunnel.Overloaded:
		if n, ok := p.warnFull.Allow(); ok {
			m.log.Warn("datagrams are dropped: a limit is reached, see docs/limits.md",
				"err", err, "skipped", n)
		}
	default:
		if n, ok := p.warnFailed.Allow(); ok {
			m.log.Warn("datagrams are dropped: the target cannot be reached", "err", err, "skipped", n)
		}
	}
}
