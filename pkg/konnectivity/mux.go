package konnectivity

import (
	"errors"
	"log/slog"
	"sync"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

// All conns of an agent share one gRPC stream with its proxy-server. A mux is one end of such a
// stream. Agents has the server's end of each stream (link.go), Agent has the agent's end (agent.go).
//
// The protocol has no flow control per conn. A receiver can only stop reading the stream, and that
// stops every conn. So received data waits in a queue of its conn. When the queue is full, the stream
// waits while the conn's reader makes progress, as TCP would. A reader that has made no progress for
// stallTimeout loses its conn, so that the other conns go on.

const (
	// maxUnread bounds the receive queue of one conn. maxUnreadOfStream bounds the receive queues
	// of all conns of a stream together. Both are in bytes, and include packetCost for each packet.
	maxUnread         = 4 << 20
	maxUnreadOfStream = 64 << 20
	// packetCost is about how much memory a queued packet takes beside its data, in bytes.
	packetCost = 256
	// stallTimeout is how long a reader may make no progress while the stream waits for it.
	stallTimeout = 3 * time.Second
	// socketBuffer is about how many unread bytes the socket may hold that a conn is spliced to. By
	// default the buffer may grow to megabytes. The kernel then reports the socket writable only after
	// the reader has read a large part, so a slow reader would seem stalled.
	socketBuffer = 64 << 10
	// maxUnsent bounds the send queue of a conn, in bytes, packetCost included.
	maxUnsent = 256 << 10
	// maxControl bounds the queued packets without data, and maxIDs the conns of a stream. A peer
	// that follows the protocol reaches neither.
	maxControl = 16 << 10
	maxIDs     = 64 << 10
	// halfClosedTimeout is how long a conn may be idle after one side has closed.
	halfClosedTimeout = 10 * time.Second
	// closeDelay is the time between a conn's last data and its close request. On a close request the
	// stock agent discards data that it has not yet written to the target.
	closeDelay = 500 * time.Millisecond
)

// packetStream is a gRPC stream of [*Packet]. One goroutine at a time may send, another may receive.
type packetStream interface {
	SendMsg(m any) error
	RecvMsg(m any) error
}

// mux is one end of a stream with many conns, which have ids. sendLoop alone sends on the stream. The
// owner of the mux receives, and hands packets to deliver and peerClosed.
type mux struct {
	// Set once.
	stream            packetStream
	agent             bool          // this end is the agent: it closes a conn by a close response, not a request
	halfClosedTimeout time.Duration // the constant; tests shorten it
	counters          *tunnel.Counters
	log               *slog.Logger
	ended             chan struct{} // closed by end, once
	wake              chan struct{} // signals sendLoop that out has grown; capacity 1, so that signals merge
	progress          chan struct{} // signals deliver that a reader has made progress; capacity 1, so that signals merge

	mu      sync.Mutex         // guards the following, and the state of all conns
	conns   map[int64]*Conn    // by id; an id is free again when sendCloseLocked or peerClosed has removed the conn
	readers map[*Conn]struct{} // conns with unread data, also after the peer has closed them
	unread  int                // bytes in the receive queues, packetCost included
	out     []outgoing         // send queue, in order
	control int                // packets without data in out or being sent
	err     error              // why the mux has ended; nil while it lives
}

// outgoing is an entry of the send queue.
type outgoing struct {
	packet *Packet
	conn   *Conn        // the conn of a data packet, or of a close request that waits for closeDelay; else nil
	last   func() error // if set, there is no packet: last ends the sending side of the stream
}

func newMux(stream packetStream, agent bool, counters *tunnel.Counters, log *slog.Logger) *mux {
	return &mux{
		stream: stream, agent: agent, halfClosedTimeout: halfClosedTimeout, counters: counters, log: log,
		ended: make(chan struct{}), wake: make(chan struct{}, 1), progress: make(chan struct{}, 1),
		conns: make(map[int64]*Conn), readers: make(map[*Conn]struct{}),
	}
}

// guarded returns f with a guard: a panic in f ends this stream, and no other.
func (m *mux) guarded(f func()) func() {
	return func() {
		if err := tunnel.Guard(m.log, m.counters, "the stream ends", func() error { f(); return nil }); err != nil {
			m.end(err)
		}
	}
}

// send queues a packet without data, and never blocks.
func (m *mux) send(p *Packet) {
	m.mu.Lock()
	m.sendLocked(p, nil)
	m.mu.Unlock()
	m.endIfFlooded()
}

// endIfFlooded ends the mux if more than maxControl packets wait because the peer does not read. Whoever queues a
// packet that the peer can cause at any rate calls it afterwards.
func (m *mux) endIfFlooded() {
	m.mu.Lock()
	flood := m.err == nil && m.control > maxControl
	m.mu.Unlock()
	if flood {
		m.counters.Limited(tunnel.LimitOutbox)
		m.end(errors.New("the other side does not read the stream"))
	}
}

// sendLocked queues a packet. c is the conn of the packet, or nil; see outgoing.conn.
func (m *mux) sendLocked(p *Packet, c *Conn) {
	if m.err != nil {
		return
	}
	if c == nil {
		m.control++
	}
	m.out = append(m.out, outgoing{packet: p, conn: c})
	notify(m.wake)
}

// finish calls end after all queued packets have been sent. Nothing is sent after that.
func (m *mux) finish(end func() error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.out = append(m.out, outgoing{last: end})
	notify(m.wake)
}

// notify signals c unless a signal is pending. c has capacity 1.
func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// sendLoop sends the queued packets until the mux or the stream ends.
func (m *mux) sendLoop() {
	for {
		select {
		case <-m.wake:
		case <-m.ended:
			return
		}
		m.mu.Lock()
		out := m.out
		m.out = nil
		m.mu.Unlock()
		for _, o := range out {
			if o.last != nil {
				o.last() //nolint:errcheck // an error means that the stream has ended already
				return
			}
			if o.conn != nil && o.packet.Type == PacketCloseReq {
				// Until closeDelay is over, sendLoop sends packets of other conns.
				time.AfterFunc(closeDelay, m.guarded(func() { m.send(o.packet) }))
				continue
			}
			if err := m.stream.SendMsg(o.packet); err != nil {
				m.streamEnded(errors.New("sending on the stream has failed"))
				return
			}
			// SendMsg blocks while the peer does not read. So a packet counts as queued until SendMsg
			// has returned.
			m.mu.Lock()
			if o.conn == nil {
				m.control--
			} else {
				m.counters.BytesSent.Add(uint64(len(o.packet.Data)))
				o.conn.unsent -= len(o.packet.Data) + packetCost
				o.conn.lastSent = time.Now()
				o.conn.cond.Broadcast()
			}
			m.mu.Unlock()
		}
	}
}

// reasonTimeout is how long streamEnded waits for the reason.
const reasonTimeout = time.Second

// streamEnded ends the mux, because gRPC has ended its stream. Only RecvMsg returns the reason, so the goroutine that
// receives gets reasonTimeout to end the mux: it may wait for a reader. After that, the reason is err.
func (m *mux) streamEnded(err error) {
	select {
	case <-m.ended:
	case <-time.After(reasonTimeout):
		m.end(err)
	}
}

// end ends the mux for the reason err, and resets its conns. Only the first call counts.
func (m *mux) end(err error) {
	m.mu.Lock()
	if m.err != nil {
		m.mu.Unlock()
		return
	}
	m.err = err
	m.out = nil
	// Callbacks belong to owners of conns, and may call the mux. They run without mu.
	var callbacks []func()
	for _, c := range m.conns {
		callbacks = append(callbacks, c.abortLocked())
	}
	clear(m.conns)
	close(m.ended)
	m.mu.Unlock()
	for _, f := range callbacks {
		f()
	}
}

// add registers a new conn. It fails if the id is in use, or the mux has ended. over is called once,
// when the conn is over.
func (m *mux) add(id int64, over func()) (*Conn, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.err != nil:
		return nil, m.err
	case id == 0 || m.conns[id] != nil:
		return nil, errors.New("the id of the connection is in use")
	case len(m.conns) >= maxIDs:
		return nil, errors.New("the stream has too many conns: the other side does not confirm their ends")
	}
	c := &Conn{m: m, id: id, onOver: sync.OnceFunc(over)}
	c.cond.L = &m.mu
	m.conns[id] = c
	return c, nil
}

// deliver puts a received DATA packet into the queue of its conn, which later frees the packet. While
// there is no room in the queue, deliver blocks, and so does the whole stream. known is false if the
// stream has no such conn.
func (m *mux) deliver(p *Packet) (known bool) {
	m.mu.Lock()
	c := m.conns[p.ConnID]
	if c == nil {
		m.mu.Unlock()
		p.Free()
		return false
	}
	cost := len(p.Data) + packetCost
	// A reader that stalled while deliver waited may have been kept from reading, by a pause of this process. It has
	// until grace. Readers that had stalled before are cut off at once.
	waited, grace := false, time.Time{}
	for blocker := m.blockerLocked(c, cost); blocker != nil && c.wantsDataLocked(); blocker = m.blockerLocked(c, cost) {
		wait := stallTimeout - time.Since(blocker.lastRead)
		switch {
		case wait > 0:
			grace = time.Time{}
		case waited && grace.IsZero():
			wait = stallTimeout / 10
			grace = time.Now().Add(wait)
		case waited:
			wait = time.Until(grace)
		}
		if wait > 0 {
			waited = true
			m.mu.Unlock()
			select {
			case <-m.progress:
			case <-m.ended:
			case <-time.After(wait):
			}
		} else {
			// Without the blocking conn the stream continues. The abort frees that conn's queue, so
			// c may have room now.
			m.counters.Limited(tunnel.LimitUnread)
			callback := blocker.abortLocked()
			blocker.sendCloseLocked("its reader has stalled")
			m.mu.Unlock()
			callback()
		}
		m.mu.Lock()
	}
	defer m.mu.Unlock()
	if !c.wantsDataLocked() || len(p.Data) == 0 {
		p.Free()
		return true
	}
	m.counters.BytesReceived.Add(uint64(len(p.Data)))
	if len(c.queue) == 0 {
		c.lastRead = time.Now()
		m.readers[c] = struct{}{}
	}
	c.queue = append(c.queue, *p)
	c.unread += cost
	m.unread += cost
	c.cond.Broadcast()
	return true
}

// blockerLocked returns the conn whose reader must make progress before c has room for cost more
// bytes, or nil if there is room. If c's own queue is full, that conn is c. If all queues of the
// stream together are full, it is the conn with the most unread bytes.
func (m *mux) blockerLocked(c *Conn, cost int) (blocker *Conn) {
	switch {
	case c.unread > 0 && c.unread+cost > maxUnread:
		return c
	case m.unread+cost > maxUnreadOfStream:
		for r := range m.readers {
			if blocker == nil || r.unread > blocker.unread {
				blocker = r
			}
		}
	}
	return blocker
}

// peerClosed handles a received close request or response. If the peer sent an error, why is its
// text, and the conn is reset, behind the data that the reader has not taken. known is false if the stream has no
// such conn.
func (m *mux) peerClosed(id int64, why string) (known bool) {
	m.mu.Lock()
	c := m.conns[id]
	if c == nil {
		m.mu.Unlock()
		return false
	}
	delete(m.conns, id)
	if m.agent { // the server keeps the id in use until this answer
		m.sendLocked(&Packet{Type: PacketCloseRsp, ConnID: id}, nil)
	}
	var callback func()
	if why != "" && !c.closeSent && c.readClosed {
		callback = c.abortLocked()
	} else {
		c.closeReceived, c.resetBehind = true, why != "" && !c.closeSent
		c.cond.Broadcast()
		callback = c.onStop
		if m.agent || c.resetBehind {
			if c.idleTimer != nil {
				c.idleTimer.Stop()
			}
			c.resetWhenIdleLocked()
		}
	}
	m.mu.Unlock()
	if callback != nil {
		callback()
	}
	return true
}
