package konnectivity

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

// Conn is one conn of an agent's stream, at either end of the stream. It implements net.Conn.
//
// The protocol closes a conn only in both directions at once. So Conn handles a half-close like this:
//
//   - At an agent, CloseWrite closes the conn: the target's bytes have ended, and the agent sends the
//     last of them before the close.
//   - At a proxy-server, CloseWrite sends nothing at first, since the target may still answer. The
//     close follows when the target's bytes end, or when the caller stops reading. If no byte moves
//     for halfClosedTimeout, the conn is reset.
//
// At an agent that has received a close request, the queued data still reach the target. There, too,
// the conn is reset if no byte moves for halfClosedTimeout.
//
// A front door should call CloseRead as soon as it knows that its caller has closed the connection.
// Otherwise the target waits for the end of the caller's data.
type Conn struct {
	// Set once.
	m      *mux
	id     int64  // unique on the stream while the conn is in mux.conns
	onOver func() // called when the conn is over, once

	// Guarded by m.mu.
	cond          sync.Cond   // broadcast when anything below has changed
	queue         []Packet    // received packets that have not been read
	unread        int         // bytes in queue, packetCost included
	lastRead      time.Time   // when the reader last made progress, or data came to an empty queue
	unsent        int         // bytes in the send queue, packetCost included
	lastSent      time.Time   // when data of this conn were last sent
	closeReceived bool        // the peer has closed: only the packets in queue are left to read
	resetBehind   bool        // the peer has reset the conn: the error comes behind the packets in queue
	writeClosed   bool        // CloseWrite was called
	readClosed    bool        // CloseRead was called
	closeSent     bool        // our close is sent or queued, or there is no need to send one
	aborted       bool        // reset by either side, or the mux has ended
	idleTimer     *time.Timer // see resetWhenIdleLocked; nil: both sides are open
	onReset       func()      // see OnReset; nil: not set
	onStop        func()      // see OnStop; nil: not set

	readBy, writeBy deadline // the deadlines of Read and of Write
}

// deadline is when an operation fails. Its fields are guarded by m.mu.
type deadline struct {
	at    time.Time   // zero: never
	timer *time.Timer // wakes the operation
}

func (d *deadline) passed() bool { return !d.at.IsZero() && !time.Now().Before(d.at) }

// wantsDataLocked reports whether received data may still be read.
func (c *Conn) wantsDataLocked() bool {
	return !c.readClosed && !c.aborted && !c.closeSent && !c.closeReceived
}

// discardLocked drops the unread data.
func (c *Conn) discardLocked() {
	for i := range c.queue {
		c.queue[i].Free()
	}
	c.m.unread -= c.unread
	c.queue, c.unread = nil, 0
	delete(c.m.readers, c)
	notify(c.m.progress)
}

// abortLocked resets the conn. The caller calls callback after it has released mu.
func (c *Conn) abortLocked() (callback func()) {
	reset := c.onReset
	if c.aborted || c.readClosed && c.writeClosed {
		reset = nil // the owner has closed the conn, and expects no call
	}
	c.aborted = true
	c.discardLocked()
	c.cond.Broadcast()
	return func() {
		if reset != nil {
			reset()
		}
		c.onOver()
	}
}

// sendCloseLocked queues our close, unless it was queued before. why tells the proxy-server of a
// reset; it is "" after a clean end.
func (c *Conn) sendCloseLocked(why string) {
	if c.closeSent {
		return
	}
	c.closeSent = true
	if c.idleTimer != nil && !c.resetBehind { // else the reader still has data to take
		c.idleTimer.Stop()
	}
	switch {
	case c.closeReceived:
	case c.m.agent:
		delete(c.m.conns, c.id)
		c.m.sendLocked(&Packet{Type: PacketCloseRsp, ConnID: c.id, Err: why}, nil)
	default:
		// The id stays in use until the agent has answered.
		request := &Packet{Type: PacketCloseReq, ConnID: c.id}
		if c.aborted || c.unsent == 0 && time.Since(c.lastSent) >= closeDelay {
			c.m.sendLocked(request, nil)
		} else {
			c.m.sendLocked(request, c)
		}
	}
}

// resetWhenIdleLocked starts the timer of a conn that is half-closed, or was reset behind data. The conn is reset if no
// byte is read or sent for halfClosedTimeout. While the peer is open, a slow reader may leave data unread for longer.
// The timer looks twice, since this process may have been paused.
func (c *Conn) resetWhenIdleLocked() {
	doubted := false
	c.idleTimer = time.AfterFunc(c.m.halfClosedTimeout, c.m.guarded(func() {
		callback := func() {}
		c.m.mu.Lock()
		switch wait := c.m.halfClosedTimeout - min(time.Since(c.lastRead), time.Since(c.lastSent)); {
		case c.aborted, c.readClosed && c.writeClosed: // the conn is over
		case !c.resetBehind && (c.closeSent || c.closeReceived && !c.m.agent): // both sides have closed
		case len(c.queue) > 0 && !c.closeReceived: // a slow reader of an open peer
			c.idleTimer.Reset(c.m.halfClosedTimeout)
		case wait > 0:
			doubted = false
			c.idleTimer.Reset(wait)
		case !doubted:
			doubted = true
			c.idleTimer.Reset(c.m.halfClosedTimeout / 10)
		default:
			callback = c.abortLocked()
			c.sendCloseLocked("")
		}
		c.m.mu.Unlock()
		callback()
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
		case len(c.queue) > 0:
			p := &c.queue[0]
			n := copy(b, p.Data)
			if p.Data = p.Data[n:]; len(p.Data) > 0 {
				c.consumedLocked(n)
				return n, nil
			}
			p.Free()
			c.queue = c.queue[1:]
			c.consumedLocked(n + packetCost)
			return n, nil
		case c.resetBehind && !c.readClosed:
			return 0, &net.OpError{Op: "read", Net: Addr{}.Network(), Err: tunnel.ErrReset}
		case c.closeReceived || c.readClosed || c.closeSent:
			return 0, io.EOF
		}
		c.cond.Wait()
	}
}

func (c *Conn) consumedLocked(cost int) {
	c.lastRead = time.Now()
	c.unread -= cost
	c.m.unread -= cost
	if c.unread == 0 {
		delete(c.m.readers, c)
	}
	notify(c.m.progress)
}

// WriteTo implements io.WriterTo, which [tunnel.Splice] uses. If w is a socket, its buffer is bounded,
// so that a full buffer does not hide the progress of its reader.
func (c *Conn) WriteTo(w io.Writer) (int64, error) {
	if s, ok := w.(syscall.Conn); ok {
		if raw, err := s.SyscallConn(); err == nil {
			raw.Control(limitSocketBuffer)
		}
	}
	// The wrapper structs hide Conn.WriteTo, which io.CopyBuffer would call again, and the ReadFrom
	// of w.
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
		case c.closeReceived || c.writeClosed || c.closeSent:
			return n, &net.OpError{Op: "write", Net: Addr{}.Network(), Err: syscall.EPIPE}
		case c.writeBy.passed():
			return n, os.ErrDeadlineExceeded
		case c.unsent >= maxUnsent:
			c.cond.Wait()
			continue
		}
		// sendLoop sends after Write has returned, when the caller may reuse b.
		part := bytes.Clone(b[:min(len(b), DataSize)])
		c.unsent += len(part) + packetCost
		c.m.sendLocked(&Packet{Type: PacketData, ConnID: c.id, Data: part}, c)
		n += len(part)
		b = b[len(part):]
	}
	return n, nil
}

// CloseWrite ends the direction in which this end sends. The protocol has no half-close; see [Conn] for what is sent.
func (c *Conn) CloseWrite() error {
	c.m.mu.Lock()
	defer c.m.mu.Unlock()
	if c.writeClosed || c.aborted {
		return nil
	}
	c.writeClosed = true
	if c.m.agent || c.readClosed || c.closeReceived {
		c.sendCloseLocked("")
	} else {
		c.resetWhenIdleLocked()
	}
	c.cond.Broadcast()
	return nil
}

// CloseRead makes the conn discard data that still come. No packet of the protocol tells the peer to stop.
func (c *Conn) CloseRead() error {
	c.m.mu.Lock()
	defer c.m.mu.Unlock()
	c.readClosed = true
	c.discardLocked()
	if c.writeClosed && !c.aborted {
		c.sendCloseLocked("")
	}
	c.cond.Broadcast()
	return nil
}

// Close implements net.Conn.
func (c *Conn) Close() error {
	c.CloseRead()
	c.CloseWrite()
	c.onOver()
	return nil
}

// Reset ends the conn at once, and drops its data.
func (c *Conn) Reset() error {
	c.m.mu.Lock()
	c.onReset = nil
	if !c.aborted {
		c.m.counters.Resets.Add(1)
	}
	callback := c.abortLocked()
	c.sendCloseLocked("reset")
	c.m.mu.Unlock()
	callback()
	return nil
}

// OnReset sets the function f that is called when the peer resets the conn, or at once if the conn is reset already.
func (c *Conn) OnReset(f func()) {
	c.m.mu.Lock()
	c.onReset = f
	already := c.aborted
	c.m.mu.Unlock()
	if already {
		f()
	}
}

// OnStop sets the function f that is called when the peer stops reading, or at once if the peer has stopped already.
func (c *Conn) OnStop(f func()) {
	c.m.mu.Lock()
	c.onStop = f
	already := c.closeReceived
	c.m.mu.Unlock()
	if already {
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
