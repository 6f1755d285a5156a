package conn

import (
	"io"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"google.golang.org/grpc/mem"

	"tunnel.example/tunnel/pkg/tunnel"
)

// receiveQueue is how many chunks wait beside the chunk that Read is taking. So the receiver and the reader
// can work at the same time. Further chunks wait in the way: in the stream's window, or in the socket.
const receiveQueue = 1

// recvHalf is the direction in which this side reads.
type recvHalf struct {
	// Set once.
	done  chan struct{}        // closed when this side reads no more
	queue chan mem.BufferSlice // from the receiver, which closes it, to Read

	deadline deadline    // the deadline of Read
	heard    atomic.Bool // bytes have come since pace.gathers last asked

	readMu  sync.Mutex      // held by Read: one at a time; guards current
	current mem.BufferSlice // the part of the last chunk that Read has not returned yet

	// Guarded by Conn.mu.
	receiving bool        // a goroutine calls way.RecvMsg, or everything has been received
	finGot    bool        // the other side has written all
	stop      notice      // this side reads no more
	rest      *time.Timer // starts a goroutine that receives what comes after fin, see receiveRest; nil: not set
}

func (h *recvHalf) init() {
	h.done = make(chan struct{})
	h.queue = make(chan mem.BufferSlice, receiveQueue)
}

// Read reads bytes that have arrived, or waits for some.
func (c *Conn) Read(p []byte) (n int, err error) {
	c.in.readMu.Lock()
	defer c.in.readMu.Unlock()
	expired := c.in.deadline.wait()
	if tunnel.IsClosed(c.in.done) {
		return 0, c.opError("read", net.ErrClosed)
	}
	if tunnel.IsClosed(expired) {
		return 0, c.opError("read", errTimeout)
	}
	if len(p) == 0 {
		return 0, nil
	}
	if len(c.in.current) == 0 {
		c.startReceiver()
		select {
		case chunk, ok := <-c.in.queue:
			if !ok {
				return 0, c.endOfInput()
			}
			c.in.current = chunk
		case <-c.in.done:
			return 0, c.opError("read", net.ErrClosed)
		case <-expired:
			return 0, c.opError("read", errTimeout)
		}
	}
	return c.take(p), nil
}

// take moves bytes of the current chunk to p. The caller holds readMu.
func (c *Conn) take(p []byte) (n int) {
	for len(c.in.current) > 0 && n < len(p) {
		m, rest := mem.ReadUnsafe(p[n:], c.in.current[0])
		n += m
		if rest != nil {
			c.in.current[0] = rest
			break
		}
		c.in.current = c.in.current[1:]
	}
	return n
}

// endOfInput is the error of a Read when no byte will come any more: net.ErrClosed if this side has closed since the
// Read began, io.EOF after fin, else a reset. After a close, the receiver discards bytes, so a fin behind them is no
// clean end.
func (c *Conn) endOfInput() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case tunnel.IsClosed(c.in.done):
		return c.opError("read", net.ErrClosed)
	case c.in.finGot:
		return io.EOF
	}
	return c.opError("read", tunnel.ErrReset)
}

// startReceiver starts the receiver goroutine, unless a goroutine receives already.
func (c *Conn) startReceiver() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.startReceiverLocked()
}

func (c *Conn) startReceiverLocked() {
	if c.in.receiving {
		return
	}
	c.in.receiving = true
	if tunnel.IsClosed(c.over) {
		close(c.in.queue)
		return
	}
	c.goLocked(func() { c.receiveLoop(true) })
}

// receiveLoop passes chunks to Read until fin. It discards bytes that come after this side has stopped
// reading. It returns when the way has no more chunks. open says that the queue is not closed; receiveLoop
// closes the queue.
func (c *Conn) receiveLoop(open bool) {
	defer func() {
		if open {
			close(c.in.queue)
		}
	}()
	for {
		var m incoming
		if err := c.way.RecvMsg(&m); err != nil {
			c.receiveError(err)
			return
		}
		if !c.pass(&m, open) {
			return
		}
		if m.abort {
			c.end(tunnel.ErrReset)
			return
		}
		if c.note(m.fin, m.stop) && open {
			close(c.in.queue)
			open = false
		}
	}
}

// pass hands the bytes of a chunk to Read. It returns false when the conn is over: bytes were lost, so
// a fin behind them must not look like a clean end.
func (c *Conn) pass(m *incoming, open bool) bool {
	if len(m.data) == 0 {
		return true
	}
	if !open {
		m.free()
		c.end(tunnel.ErrReset) // bytes after fin break the protocol
		return false
	}
	c.received(m.data.Len())
	select {
	case c.in.queue <- m.data:
	case <-c.in.done:
		m.free()
	case <-c.over:
		m.free()
		return false
	}
	return true
}

// received counts n bytes that have come.
func (c *Conn) received(n int) {
	c.counters.BytesReceived.Add(uint64(n))
	c.traffic.Receive(n)
	c.moves(n)
	if !c.in.heard.Load() {
		c.in.heard.Store(true)
	}
}

// note handles the marks fin and stop of a chunk, after the chunk's bytes were handed on. It returns fin.
func (c *Conn) note(fin, stop bool) bool {
	if !fin && !stop {
		return false
	}
	c.mu.Lock()
	c.in.finGot = c.in.finGot || fin
	var callbacks []func()
	if stop && !c.out.stopGot {
		c.out.stopGot = true
		callbacks, c.out.onStop = c.out.onStop, nil
		if !tunnel.IsClosed(c.out.done) {
			c.out.err = syscall.EPIPE
			close(c.out.done)
		}
	}
	finished := c.bothEndedLocked()
	c.mu.Unlock()
	for _, f := range callbacks {
		f()
	}
	if finished {
		c.finish()
	}
	return fin
}

// WriteTo writes the received bytes to w, until fin. It receives in its caller's goroutine, unless a Read has
// started the receiver goroutine. An error is from w, or says that the conn was closed or reset.
func (c *Conn) WriteTo(w io.Writer) (n int64, err error) {
	c.mu.Lock()
	inline := !c.in.receiving && !tunnel.IsClosed(c.over) && !tunnel.IsClosed(c.in.done)
	if inline {
		c.in.receiving = true
	}
	c.mu.Unlock()
	if !inline {
		return c.writeQueued(w)
	}
	defer c.receiveRest()
	var vec net.Buffers
	for {
		var m incoming
		if err := c.way.RecvMsg(&m); err != nil {
			c.receiveError(err)
			if tunnel.IsClosed(c.in.done) {
				return n, c.opError("read", net.ErrClosed)
			}
			return n, c.opError("read", tunnel.ErrReset)
		}
		if size := m.data.Len(); size > 0 {
			moved := c.moved.Load() + int64(size)
			c.received(size)
			written, err := writeChunk(w, &m, &vec)
			c.answered.Store(c.asked)
			if c.moved.Load() != moved {
				c.answered.Store(false) // the caller has already sent its next request
			}
			m.free()
			n += written
			if err != nil {
				c.note(m.fin, m.stop)
				if m.abort {
					c.end(tunnel.ErrReset)
				}
				return n, err
			}
		}
		if m.abort {
			return n, c.endBehind()
		}
		if c.note(m.fin, m.stop) {
			return n, nil
		}
		if tunnel.IsClosed(c.in.done) {
			return n, c.opError("read", net.ErrClosed)
		}
	}
}

// sliceWriter is a conn that sends received buffers without a copy, such as a conn to another replica or to
// a caller that speaks gRPC. WriteSlice frees data, even if it fails.
type sliceWriter interface {
	WriteSlice(data mem.BufferSlice) error
}

// buffersWriter is a conn that wraps a socket and can hand it several buffers at once.
type buffersWriter interface {
	WriteBuffers(v *net.Buffers) (int64, error)
}

// writeChunk writes the buffers of a chunk to w, in one system call if w is a socket. vec is scratch memory
// that the caller keeps for the next call.
func writeChunk(w io.Writer, m *incoming, vec *net.Buffers) (int64, error) {
	data := m.data
	if s, ok := w.(sliceWriter); ok {
		m.data = nil
		n := int64(data.Len())
		if err := s.WriteSlice(data); err != nil {
			return 0, err
		}
		return n, nil
	}
	if len(data) == 1 {
		n, err := w.Write(data[0].ReadOnlyData())
		return int64(n), err
	}
	v := (*vec)[:0]
	for _, b := range data {
		v = append(v, b.ReadOnlyData())
	}
	*vec = v
	if b, ok := w.(buffersWriter); ok {
		return b.WriteBuffers(&v)
	}
	return v.WriteTo(w)
}

// receiveRest starts a goroutine that receives what may come after WriteTo: a stop after fin, bytes after a
// failed write, the end of the stream. After fin it waits for way.pauseAfterFin before: most conns end in
// this time, and need no goroutine.
func (c *Conn) receiveRest() {
	ended := c.way.inputOver()
	if ended {
		defer c.receiveError(io.EOF)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.in.finGot && !tunnel.IsClosed(c.over) {
		c.goLocked(func() { c.receiveLoop(true) })
		return
	}
	close(c.in.queue)
	if ended || tunnel.IsClosed(c.over) {
		return
	}
	pause := c.way.pauseAfterFin()
	if pause == 0 || c.bothEndedLocked() {
		c.goLocked(func() { c.receiveLoop(false) })
		return
	}
	c.in.rest = time.AfterFunc(pause, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.goLocked(func() { c.receiveLoop(false) })
	})
}

// writeQueued is WriteTo for a conn whose receiver goroutine runs, or has run.
func (c *Conn) writeQueued(w io.Writer) (n int64, err error) {
	buf := make([]byte, MaxPayload)
	for {
		m, rerr := c.Read(buf)
		if m > 0 {
			written, werr := w.Write(buf[:m])
			n += int64(written)
			if werr != nil {
				return n, werr
			}
		}
		if rerr == io.EOF { //nolint:errorlint // Read returns io.EOF itself
			return n, nil
		}
		if rerr != nil {
			return n, rerr
		}
	}
}

// CloseRead ends the direction in which this side reads: the other side's writes will fail.
func (c *Conn) CloseRead() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.endReadLocked()
	return nil
}

// endReadLocked is CloseRead; caller holds mu.
func (c *Conn) endReadLocked() {
	if tunnel.IsClosed(c.in.done) {
		return
	}
	close(c.in.done)
	c.startReceiverLocked()
	if !c.in.finGot {
		c.in.stop = noticeDue
		c.startSenderLocked()
	}
}

// endBehind ends the conn because the abort of the other side's ResetBehind has arrived. Only the reader
// of the bytes before the abort calls endBehind. This reader passes the reset on behind these bytes, so
// the OnReset callbacks are not called.
func (c *Conn) endBehind() error {
	c.mu.Lock()
	c.onReset = nil
	c.mu.Unlock()
	c.end(tunnel.ErrReset)
	return c.opError("read", tunnel.ErrReset)
}
