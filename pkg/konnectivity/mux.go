package konnectivity

import (
	"bytes"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"tunnel/pkg/tunnel"
)

// The conns of an agent share one stream with its server, in packets that know neither
// windows nor half-closes. A mux is such a stream, at either end: agents.go is a server's,
// agent.go an agent's.
//
// Nothing tells the sender of a packet to wait, but that the stream is not read. So what
// has come waits in a queue of its conn. When that is full, the stream waits for a reader
// that still takes something, as TCP would. One that takes nothing loses its conn: what
// counts is the time since it last took something.

const (
	// mostUnread is what the queue of a conn holds, in bytes, and mostUnreadOfAll those of
	// a stream together.
	mostUnread      = 4 << 20
	mostUnreadOfAll = 64 << 20
	// packetCost is what a packet costs beside its data.
	packetCost = 256
	// patience is how long a reader may take nothing while the stream waits for it.
	patience = 3 * time.Second
	// socketQueue is what may wait in a socket that reads from a conn, about: the kernel says
	// that there is room when a part of its buffer is free, which may have megabytes.
	socketQueue = 64 << 10
	// mostUnsent is what a conn may have waiting to be sent, in bytes and what they cost.
	mostUnsent = 256 << 10
	// mostControl is how many packets without data may wait to be sent, and mostIDs how
	// many ids may be in use: more than a peer that keeps to the protocol makes us need.
	mostControl = 16 << 10
	mostIDs     = 64 << 10
	// halfOpen is how long nothing may move in a conn of which one side has ended.
	halfOpen = 10 * time.Second
	// lingerTime is how long a close waits when the data before it have been sent: the stock
	// agent throws away what it has not written yet.
	lingerTime = 500 * time.Millisecond
)

// packetStream is a gRPC stream of packets.
type packetStream interface {
	SendMsg(m any) error
	RecvMsg(m any) error
}

// mux is a stream whose conns are told apart by their ids. Its owner receives, and calls
// deliver and peerClosed; sendLoop sends.
type mux struct {
	// Set once.
	stream   packetStream
	agent    bool // we are the agent: a conn of ours ends with a close response
	halfOpen time.Duration
	counters *tunnel.Counters
	log      *slog.Logger
	ended    chan struct{} // closed by end
	wake     chan struct{} // capacity 1: there is something in out
	room     chan struct{} // capacity 1: a reader has taken something

	mu      sync.Mutex // guards the following, and all of the conns
	conns   map[int64]*Conn
	readers map[*Conn]struct{} // those that have something unread, also when the peer has closed them
	unread  int                // cost of what waits for readers
	out     []outgoing         // to be sent in this order
	control int                // packets without data that have not been sent
	err     error              // why it has ended
}

// outgoing is a packet on its way out.
type outgoing struct {
	packet *Packet
	conn   *Conn        // whose data it is, or whose close that keeps its distance to them; or nil
	last   func() error // in place of a packet: what ends the sending
}

func newMux(stream packetStream, agent bool, counters *tunnel.Counters, log *slog.Logger) *mux {
	return &mux{
		stream: stream, agent: agent, halfOpen: halfOpen, counters: counters, log: log,
		ended: make(chan struct{}), wake: make(chan struct{}, 1), room: make(chan struct{}, 1),
		conns: make(map[int64]*Conn), readers: make(map[*Conn]struct{}),
	}
}

// guarded returns f under a guard. A panic ends this stream and no other.
func (m *mux) guarded(f func()) func() {
	return func() {
		if err := tunnel.Guard(m.log, m.counters, "the stream ends", func() error { f(); return nil }); err != nil {
			m.end(err)
		}
	}
}

// send queues a packet. It never waits: a peer that does not read loses the stream.
func (m *mux) send(p *Packet) {
	m.mu.Lock()
	m.sendLocked(p, nil)
	flood := m.err == nil && m.control > mostControl
	m.mu.Unlock()
	if flood {
		m.counters.Limited(tunnel.LimitOutbox)
		m.end(errors.New("the other side does not read the stream"))
	}
}

func (m *mux) sendLocked(p *Packet, c *Conn) {
	if m.err != nil {
		return
	}
	if c == nil {
		m.control++
	}
	m.out = append(m.out, outgoing{packet: p, conn: c})
	ping(m.wake)
}

// finish has end called behind all that is queued; nothing is sent after that.
func (m *mux) finish(end func() error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.out = append(m.out, outgoing{last: end})
	ping(m.wake)
}

func ping(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// sendLoop sends what is queued, until the mux or the stream ends.
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
				o.last() //nolint:errcheck // the stream is over, then
				return
			}
			if o.conn != nil && o.packet.Type == PacketCloseReq {
				time.AfterFunc(lingerTime, m.guarded(func() { m.send(o.packet) }))
				continue
			}
			if err := m.stream.SendMsg(o.packet); err != nil {
				m.end(errors.New("the stream takes no more"))
				return
			}
			m.mu.Lock()
			if o.conn == nil {
				m.control--
			} else {
				m.counters.BytesSent.Add(uint64(len(o.packet.Data)))
				o.conn.unsent -= len(o.packet.Data) + packetCost
				o.conn.sent = time.Now()
				o.conn.cond.Broadcast()
			}
			m.mu.Unlock()
		}
	}
}

// end ends the mux. Conns that are not over are reset.
func (m *mux) end(err error) {
	m.mu.Lock()
	if m.err != nil {
		m.mu.Unlock()
		return
	}
	m.err = err
	m.out = nil
	var tell []func()
	for _, c := range m.conns {
		tell = append(tell, c.abortLocked())
	}
	clear(m.conns)
	close(m.ended)
	m.mu.Unlock()
	for _, f := range tell {
		f()
	}
}

// add files a new conn, unless its id is taken or the mux has ended. over is called once,
// when the conn is over.
func (m *mux) add(id int64, over func()) (*Conn, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case m.err != nil:
		return nil, m.err
	case id == 0 || m.conns[id] != nil:
		return nil, errors.New("the id of the connection is taken")
	case len(m.conns) >= mostIDs:
		return nil, errors.New("the other side does not say that conns are over")
	}
	c := &Conn{m: m, id: id, over: sync.OnceFunc(over)}
	c.cond.L = &m.mu
	m.conns[id] = c
	return c, nil
}

// deliver takes a received DATA, and waits until there is room for it. It returns false when
// there is no such conn.
func (m *mux) deliver(p *Packet) (known bool) {
	m.mu.Lock()
	c := m.conns[p.ConnID]
	if c == nil {
		m.mu.Unlock()
		p.Free()
		return false
	}
	cost := len(p.Data) + packetCost
	for held := m.holderLocked(c, cost); held != nil && c.wantsLocked(); held = m.holderLocked(c, cost) {
		if wait := patience - time.Since(held.took); wait > 0 {
			m.mu.Unlock()
			select {
			case <-m.room:
			case <-m.ended:
			case <-time.After(wait):
			}
		} else {
			m.counters.Limited(tunnel.LimitUnread)
			tell := held.abortLocked()
			held.sendCloseLocked("its reader takes nothing")
			m.mu.Unlock()
			tell()
		}
		m.mu.Lock()
	}
	defer m.mu.Unlock()
	if !c.wantsLocked() || len(p.Data) == 0 {
		p.Free()
		return true
	}
	m.counters.BytesReceived.Add(uint64(len(p.Data)))
	if len(c.in) == 0 {
		c.took = time.Now()
		m.readers[c] = struct{}{}
	}
	c.in = append(c.in, *p)
	c.unread += cost
	m.unread += cost
	c.cond.Broadcast()
	return true
}

// holderLocked returns whose reader has to take something before c has room for so much; nil:
// there is room. It is c, or for the whole of the stream the one that has most unread.
func (m *mux) holderLocked(c *Conn, cost int) (held *Conn) {
	switch {
	case c.unread > 0 && c.unread+cost > mostUnread:
		return c
	case m.unread+cost > mostUnreadOfAll:
		for r := range m.readers {
			if held == nil || r.unread > held.unread {
				held = r
			}
		}
	}
	return held
}

// peerClosed takes a received close. It returns false when there is no such conn.
func (m *mux) peerClosed(id int64, why string) (known bool) {
	m.mu.Lock()
	c := m.conns[id]
	if c == nil {
		m.mu.Unlock()
		return false
	}
	delete(m.conns, id)
	if m.agent {
		m.sendLocked(&Packet{Type: PacketCloseRsp, ConnID: id}, nil)
	}
	var tell func()
	if why != "" && !c.closed {
		tell = c.abortLocked()
	} else {
		c.peerEnded = true
		c.cond.Broadcast()
		tell = c.onStop
		if m.agent {
			c.endSilentLocked()
		}
	}
	m.mu.Unlock()
	if tell != nil {
		tell()
	}
	return true
}

// muxConn is a conn of a mux. The protocol has one end for both directions; this is what is
// made of it: at a server, CloseWrite says nothing until the other direction has ended
// or is silent for halfOpen. At an agent it is the end of the conn.
type Conn struct {
	// Set once.
	m    *mux
	id   int64
	over func() // called when it is over

	// Guarded by m.mu.
	cond      sync.Cond // anything below has changed
	in        []Packet  // not read yet
	unread    int       // the cost of that
	took      time.Time // when the reader last took something, or had nothing to take
	unsent    int       // the cost of what is ours and has not been sent
	sent      time.Time // when something of that was sent last
	peerEnded bool      // the peer has closed: in is the rest
	noWrite   bool      // CloseWrite was called
	noRead    bool      // CloseRead was called
	closed    bool      // our close has been said, or needs not be
	aborted   bool
	silent    *time.Timer // of endSilentLocked
	onReset   func()
	onStop    func()

	readBy, writeBy deadline
}

// deadline is when an operation fails; both are guarded by m.mu.
type deadline struct {
	at    time.Time
	timer *time.Timer
}

func (d *deadline) passed() bool { return !d.at.IsZero() && !time.Now().Before(d.at) }

// wantsLocked reports whether anybody is to read what still comes.
func (c *Conn) wantsLocked() bool { return !c.noRead && !c.aborted && !c.closed && !c.peerEnded }

// dropLocked throws away what has not been read.
func (c *Conn) dropLocked() {
	for i := range c.in {
		c.in[i].Free()
	}
	c.m.unread -= c.unread
	c.in, c.unread = nil, 0
	delete(c.m.readers, c)
	ping(c.m.room)
}

// abortLocked ends the conn as a reset does, and returns what is to be called without mu.
func (c *Conn) abortLocked() func() {
	reset := c.onReset
	if c.aborted || c.noRead && c.noWrite {
		reset = nil // who had the conn has done with it
	}
	c.aborted = true
	c.dropLocked()
	c.cond.Broadcast()
	return func() {
		if reset != nil {
			reset()
		}
		c.over()
	}
}

// sendCloseLocked says that the conn is over, unless it has been said.
func (c *Conn) sendCloseLocked(why string) {
	if c.closed {
		return
	}
	c.closed = true
	if c.silent != nil {
		c.silent.Stop()
	}
	switch {
	case c.peerEnded:
	case c.m.agent:
		delete(c.m.conns, c.id)
		c.m.sendLocked(&Packet{Type: PacketCloseRsp, ConnID: c.id, Err: why}, nil)
	default:
		// The id stays ours until the agent has answered.
		request := &Packet{Type: PacketCloseReq, ConnID: c.id}
		if c.aborted || c.unsent == 0 && time.Since(c.sent) >= lingerTime {
			c.m.sendLocked(request, nil)
		} else {
			c.m.sendLocked(request, c)
		}
	}
}

// endSilentLocked has a conn of which one side has ended reset when nothing has moved in
// it for halfOpen. What has not been read may wait as long as there is somebody to send more.
func (c *Conn) endSilentLocked() {
	c.silent = time.AfterFunc(c.m.halfOpen, c.m.guarded(func() {
		tell := func() {}
		c.m.mu.Lock()
		switch wait := c.m.halfOpen - min(time.Since(c.took), time.Since(c.sent)); {
		case c.closed || c.aborted || c.peerEnded && !c.m.agent:
		case len(c.in) > 0 && !c.peerEnded:
			c.silent.Reset(c.m.halfOpen)
		case wait > 0:
			c.silent.Reset(wait)
		default:
			tell = c.abortLocked()
			c.sendCloseLocked("")
		}
		c.m.mu.Unlock()
		tell()
	}))
}

// Read implements net.Conn.
func (c *Conn) Read(b []byte) (int, error) {
	c.m.mu.Lock()
	defer c.m.mu.Unlock()
	for {
		switch {
		case c.aborted:
			return 0, &net.OpError{Op: "read", Net: Addr{}.Network(), Err: tunnel.ErrReset}
		case c.readBy.passed():
			return 0, os.ErrDeadlineExceeded
		case len(c.in) > 0:
			p := &c.in[0]
			n := copy(b, p.Data)
			if p.Data = p.Data[n:]; len(p.Data) > 0 {
				c.tookLocked(n)
				return n, nil
			}
			p.Free()
			c.in = c.in[1:]
			c.tookLocked(n + packetCost)
			return n, nil
		case c.peerEnded || c.noRead || c.closed:
			return 0, io.EOF
		}
		c.cond.Wait()
	}
}

func (c *Conn) tookLocked(cost int) {
	c.took = time.Now()
	c.unread -= cost
	c.m.unread -= cost
	if c.unread == 0 {
		delete(c.m.readers, c)
	}
	ping(c.m.room)
}

// WriteTo implements io.WriterTo, which [tunnel.Splice] uses. A socket is kept from hiding in
// a large buffer that its reader takes something.
func (c *Conn) WriteTo(w io.Writer) (int64, error) {
	if s, ok := w.(syscall.Conn); ok {
		if raw, err := s.SyscallConn(); err == nil {
			raw.Control(boundQueue) //nolint:errcheck // then it is closed
		}
	}
	return io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{c}, make([]byte, DataSize))
}

// Write implements net.Conn.
func (c *Conn) Write(b []byte) (n int, err error) {
	c.m.mu.Lock()
	defer c.m.mu.Unlock()
	for len(b) > 0 {
		switch {
		case c.aborted:
			return n, &net.OpError{Op: "write", Net: Addr{}.Network(), Err: tunnel.ErrReset}
		case c.peerEnded || c.noWrite || c.closed:
			return n, &net.OpError{Op: "write", Net: Addr{}.Network(), Err: syscall.EPIPE}
		case c.writeBy.passed():
			return n, os.ErrDeadlineExceeded
		case c.unsent >= mostUnsent:
			c.cond.Wait()
			continue
		}
		part := bytes.Clone(b[:min(len(b), DataSize)])
		c.unsent += len(part) + packetCost
		c.m.sendLocked(&Packet{Type: PacketData, ConnID: c.id, Data: part}, c)
		n += len(part)
		b = b[len(part):]
	}
	return n, nil
}

// CloseWrite ends our direction, as far as the protocol can say that.
func (c *Conn) CloseWrite() error {
	c.m.mu.Lock()
	defer c.m.mu.Unlock()
	if c.noWrite || c.aborted {
		return nil
	}
	c.noWrite = true
	if c.m.agent || c.noRead || c.peerEnded {
		c.sendCloseLocked("")
	} else {
		c.endSilentLocked()
	}
	c.cond.Broadcast()
	return nil
}

// CloseRead says that nothing more is read. The peer cannot be told so.
func (c *Conn) CloseRead() error {
	c.m.mu.Lock()
	defer c.m.mu.Unlock()
	c.noRead = true
	c.dropLocked()
	if c.noWrite && !c.aborted {
		c.sendCloseLocked("")
	}
	c.cond.Broadcast()
	return nil
}

// Close implements net.Conn.
func (c *Conn) Close() error {
	c.CloseRead()  //nolint:errcheck // it has none
	c.CloseWrite() //nolint:errcheck // likewise
	c.over()
	return nil
}

// Reset ends the conn at once.
func (c *Conn) Reset() error {
	c.m.mu.Lock()
	c.onReset = nil
	if !c.aborted {
		c.m.counters.Resets.Add(1)
	}
	tell := c.abortLocked()
	c.sendCloseLocked("reset")
	c.m.mu.Unlock()
	tell()
	return nil
}

// OnReset has f called when the conn is aborted by the other side.
func (c *Conn) OnReset(f func()) {
	c.m.mu.Lock()
	c.onReset = f
	now := c.aborted
	c.m.mu.Unlock()
	if now {
		f()
	}
}

// OnStop has f called when the other side takes no more bytes.
func (c *Conn) OnStop(f func()) {
	c.m.mu.Lock()
	c.onStop = f
	now := c.peerEnded
	c.m.mu.Unlock()
	if now {
		f()
	}
}

// LocalAddr implements net.Conn.
func (c *Conn) LocalAddr() net.Addr { return Addr{} }

// RemoteAddr implements net.Conn.
func (c *Conn) RemoteAddr() net.Addr { return Addr{} }

// SetDeadline implements net.Conn.
func (c *Conn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

// SetReadDeadline implements net.Conn.
func (c *Conn) SetReadDeadline(t time.Time) error { return c.setDeadline(&c.readBy, t) }

// SetWriteDeadline implements net.Conn.
func (c *Conn) SetWriteDeadline(t time.Time) error { return c.setDeadline(&c.writeBy, t) }

func (c *Conn) setDeadline(d *deadline, t time.Time) error {
	c.m.mu.Lock()
	defer c.m.mu.Unlock()
	if d.timer != nil {
		d.timer.Stop()
	}
	d.at = t
	if wait := time.Until(t); !t.IsZero() && wait > 0 {
		d.timer = time.AfterFunc(wait, func() {
			c.m.mu.Lock()
			defer c.m.mu.Unlock()
			c.cond.Broadcast()
		})
	}
	c.cond.Broadcast()
	return nil
}

var _ interface {
	net.Conn
	tunnel.Resetter
	io.WriterTo
	CloseWrite() error
	CloseRead() error
} = (*Conn)(nil)
