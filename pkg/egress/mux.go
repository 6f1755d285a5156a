package egress

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"strings"
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
// that still takes something, as TCP would. One that takes nothing loses its conn.

const (
	// mostUnread is what the queue of a conn holds, in bytes, and mostUnreadOfAll those of
	// a stream together.
	mostUnread      = 4 << 20
	mostUnreadOfAll = 64 << 20
	// packetCost is what a packet costs beside its data.
	packetCost = 256
	// patience is how long a stream waits for a reader whose queue is full to take a packet.
	patience = 250 * time.Millisecond
	// mostUnsent is what a conn may have waiting to be sent, in bytes and what they cost.
	mostUnsent = 256 << 10
	// mostControl is how many packets without data may wait to be sent, and mostIDs how
	// many ids may be in use: more than a peer that keeps to the protocol makes us need.
	mostControl = 16 << 10
	mostIDs     = 64 << 10
	// halfOpen is how long a target may be silent after its caller has ended its direction.
	halfOpen = 10 * time.Second
	// lingerTime is how long a close waits behind data: the stock agent throws away what it
	// has not written yet.
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
	counters *tunnel.Counters
	ended    chan struct{} // closed by end
	wake     chan struct{} // capacity 1: there is something in out
	room     chan struct{} // capacity 1: a reader has taken something

	mu      sync.Mutex // guards the following, and all of the conns
	conns   map[int64]*muxConn
	unread  int        // cost of what waits for readers
	out     []outgoing // to be sent in this order
	control int        // packets without data that have not been sent
	err     error      // why it has ended
}

// outgoing is a packet on its way out.
type outgoing struct {
	packet *packet
	conn   *muxConn     // whose data it is, or nil
	last   func() error // in place of a packet: what ends the sending
}

func newMux(stream packetStream, agent bool, counters *tunnel.Counters) *mux {
	return &mux{
		stream: stream, agent: agent, counters: counters,
		ended: make(chan struct{}), wake: make(chan struct{}, 1), room: make(chan struct{}, 1),
		conns: make(map[int64]*muxConn),
	}
}

// send queues a packet. It never waits: a peer that does not read loses the stream.
func (m *mux) send(p *packet) {
	m.mu.Lock()
	m.sendLocked(p, nil)
	flood := m.err == nil && m.control > mostControl
	m.mu.Unlock()
	if flood {
		m.counters.Limited(tunnel.LimitOutbox)
		m.end(errors.New("the other side does not read the stream"))
	}
}

func (m *mux) sendLocked(p *packet, c *muxConn) {
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
			if err := m.stream.SendMsg(o.packet); err != nil {
				m.end(errors.New("the stream takes no more"))
				return
			}
			m.mu.Lock()
			if o.conn == nil {
				m.control--
			} else {
				m.counters.BytesSent.Add(uint64(len(o.packet.data)))
				o.conn.unsent -= len(o.packet.data) + packetCost
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
// when the conn is over; late when it has to be.
func (m *mux) add(id int64, over, late func()) (*muxConn, error) {
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
	c := &muxConn{m: m, id: id, over: sync.OnceFunc(over), late: late}
	c.cond.L = &m.mu
	m.conns[id] = c
	return c, nil
}

// deliver takes a received DATA. It returns false when there is no such conn. When the
// reader of the conn is stuck, the conn is reset.
func (m *mux) deliver(p *packet) (known bool) {
	m.mu.Lock()
	c := m.conns[p.connID]
	if c == nil {
		m.mu.Unlock()
		p.free()
		return false
	}
	cost := len(p.data) + packetCost
	full := func() bool {
		return len(c.in) > 0 && (c.unread+cost > mostUnread || m.unread+cost > mostUnreadOfAll)
	}
	var late <-chan time.Time
	for c.wantsLocked() && full() {
		if late == nil {
			late = time.After(patience)
		}
		m.mu.Unlock()
		stuck := false
		select {
		case <-m.room:
		case <-m.ended:
		case <-late:
			stuck = true
		}
		m.mu.Lock()
		if stuck && c.wantsLocked() && full() {
			m.counters.Limited(tunnel.LimitUnread)
			tell := c.abortLocked()
			c.sendCloseLocked("its reader takes nothing")
			m.mu.Unlock()
			p.free()
			tell()
			return true
		}
	}
	defer m.mu.Unlock()
	if !c.wantsLocked() || len(p.data) == 0 {
		p.free()
		return true
	}
	m.counters.BytesReceived.Add(uint64(len(p.data)))
	c.in = append(c.in, *p)
	c.unread += cost
	m.unread += cost
	c.idleLocked()
	c.cond.Broadcast()
	return true
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
		m.sendLocked(&packet{typ: packetCloseRsp, connID: id}, nil)
	}
	var tell func()
	if why != "" && !c.closed {
		tell = c.abortLocked()
	} else {
		c.peerEnded = true
		c.cond.Broadcast()
		tell = c.onStop
		if c.late != nil {
			time.AfterFunc(closeWait, c.late)
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
type muxConn struct {
	// Set once.
	m    *mux
	id   int64
	over func() // called when it is over
	late func() // called closeWait after the peer has closed; nil: nobody cares

	// Guarded by m.mu.
	cond      sync.Cond // anything below has changed
	in        []packet  // not read yet
	unread    int       // the cost of that
	unsent    int       // the cost of what is ours and has not been sent
	wrote     time.Time // when something was written last
	peerEnded bool      // the peer has closed: in is the rest
	noWrite   bool      // CloseWrite was called
	noRead    bool      // CloseRead was called
	closed    bool      // our close has been said, or needs not be
	aborted   bool
	idle      *time.Timer // of halfOpen
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
func (c *muxConn) wantsLocked() bool { return !c.noRead && !c.aborted && !c.closed && !c.peerEnded }

// dropLocked throws away what has not been read.
func (c *muxConn) dropLocked() {
	for i := range c.in {
		c.in[i].free()
	}
	c.m.unread -= c.unread
	c.in, c.unread = nil, 0
	ping(c.m.room)
}

// abortLocked ends the conn as a reset does, and returns what is to be called without mu.
func (c *muxConn) abortLocked() func() {
	c.aborted = true
	c.dropLocked()
	c.stopIdleLocked()
	c.cond.Broadcast()
	reset := c.onReset
	if c.closed {
		reset = nil // who had the conn has done with it
	}
	return func() {
		if reset != nil {
			reset()
		}
		c.over()
	}
}

// sendCloseLocked says that the conn is over, unless it has been said.
func (c *muxConn) sendCloseLocked(why string) {
	if c.closed {
		return
	}
	c.closed = true
	c.stopIdleLocked()
	switch {
	case c.peerEnded:
	case c.m.agent:
		delete(c.m.conns, c.id)
		c.m.sendLocked(&packet{typ: packetCloseRsp, connID: c.id, err: why}, nil)
	default:
		// The id stays ours until the agent has answered.
		request := func() {
			c.m.send(&packet{typ: packetCloseReq, connID: c.id})
		}
		if wait := lingerTime - time.Since(c.wrote); wait > 0 && !c.aborted {
			time.AfterFunc(wait, request)
			return
		}
		c.m.sendLocked(&packet{typ: packetCloseReq, connID: c.id}, nil)
	}
}

// idleLocked has the conn close when nothing comes any more.
func (c *muxConn) idleLocked() {
	if c.m.agent || !c.noWrite || c.closed {
		return
	}
	c.stopIdleLocked()
	c.idle = time.AfterFunc(halfOpen, func() {
		c.m.mu.Lock()
		defer c.m.mu.Unlock()
		if len(c.in) == 0 { // else its reader is slow
			c.sendCloseLocked("")
			c.cond.Broadcast()
			return
		}
		c.idleLocked()
	})
}

func (c *muxConn) stopIdleLocked() {
	if c.idle != nil {
		c.idle.Stop()
	}
}

// Read implements net.Conn.
func (c *muxConn) Read(b []byte) (int, error) {
	c.m.mu.Lock()
	defer c.m.mu.Unlock()
	for {
		switch {
		case c.aborted:
			return 0, &net.OpError{Op: "read", Net: streamAddr{}.Network(), Err: tunnel.ErrReset}
		case c.readBy.passed():
			return 0, os.ErrDeadlineExceeded
		case len(c.in) > 0:
			p := &c.in[0]
			n := copy(b, p.data)
			if p.data = p.data[n:]; len(p.data) > 0 {
				c.tookLocked(n)
				return n, nil
			}
			p.free()
			c.in = c.in[1:]
			c.tookLocked(n + packetCost)
			return n, nil
		case c.peerEnded || c.noRead || c.closed:
			return 0, io.EOF
		}
		c.cond.Wait()
	}
}

func (c *muxConn) tookLocked(cost int) {
	c.unread -= cost
	c.m.unread -= cost
	ping(c.m.room)
}

// Write implements net.Conn.
func (c *muxConn) Write(b []byte) (n int, err error) {
	c.m.mu.Lock()
	defer c.m.mu.Unlock()
	for len(b) > 0 {
		switch {
		case c.aborted:
			return n, &net.OpError{Op: "write", Net: streamAddr{}.Network(), Err: tunnel.ErrReset}
		case c.peerEnded || c.noWrite || c.closed:
			return n, &net.OpError{Op: "write", Net: streamAddr{}.Network(), Err: syscall.EPIPE}
		case c.writeBy.passed():
			return n, os.ErrDeadlineExceeded
		case c.unsent >= mostUnsent:
			c.cond.Wait()
			continue
		}
		part := bytes.Clone(b[:min(len(b), dataSize)])
		c.unsent += len(part) + packetCost
		c.wrote = time.Now()
		c.m.sendLocked(&packet{typ: packetData, connID: c.id, data: part}, c)
		n += len(part)
		b = b[len(part):]
	}
	return n, nil
}

// CloseWrite ends our direction, as far as the protocol can say that.
func (c *muxConn) CloseWrite() error {
	c.m.mu.Lock()
	defer c.m.mu.Unlock()
	if c.noWrite || c.aborted {
		return nil
	}
	c.noWrite = true
	if c.m.agent || c.noRead || c.peerEnded {
		c.sendCloseLocked("")
	} else {
		c.idleLocked()
	}
	c.cond.Broadcast()
	return nil
}

// CloseRead says that nothing more is read. The peer cannot be told so.
func (c *muxConn) CloseRead() error {
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
func (c *muxConn) Close() error {
	c.CloseRead()  //nolint:errcheck // it has none
	c.CloseWrite() //nolint:errcheck // likewise
	c.over()
	return nil
}

// Reset ends the conn at once.
func (c *muxConn) Reset() error {
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
func (c *muxConn) OnReset(f func()) {
	c.m.mu.Lock()
	c.onReset = f
	now := c.aborted
	c.m.mu.Unlock()
	if now {
		f()
	}
}

// OnStop has f called when the other side takes no more bytes.
func (c *muxConn) OnStop(f func()) {
	c.m.mu.Lock()
	c.onStop = f
	now := c.peerEnded
	c.m.mu.Unlock()
	if now {
		f()
	}
}

// LocalAddr implements net.Conn.
func (c *muxConn) LocalAddr() net.Addr { return streamAddr{} }

// RemoteAddr implements net.Conn.
func (c *muxConn) RemoteAddr() net.Addr { return streamAddr{} }

// SetDeadline implements net.Conn.
func (c *muxConn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

// SetReadDeadline implements net.Conn.
func (c *muxConn) SetReadDeadline(t time.Time) error { return c.setDeadline(&c.readBy, t) }

// SetWriteDeadline implements net.Conn.
func (c *muxConn) SetWriteDeadline(t time.Time) error { return c.setDeadline(&c.writeBy, t) }

func (c *muxConn) setDeadline(d *deadline, t time.Time) error {
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

// codeOf returns what a stock program means by the text of a failed dial.
func codeOf(text string) tunnel.Code {
	for _, known := range []struct {
		words string
		code  tunnel.Code
	}{
		{"refused", tunnel.Refused}, {"timeout", tunnel.Timeout}, {"timed out", tunnel.Timeout},
		{"unreachable", tunnel.Unreachable}, {"no route", tunnel.Unreachable}, {"no such host", tunnel.Unreachable},
		{"denied", tunnel.Denied}, {"overloaded", tunnel.Overloaded},
	} {
		if strings.Contains(text, known.words) {
			return known.code
		}
	}
	return tunnel.Internal
}

var _ interface {
	net.Conn
	tunnel.Resetter
	CloseWrite() error
	CloseRead() error
} = (*muxConn)(nil)
