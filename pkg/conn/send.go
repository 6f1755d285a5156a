package conn

import (
	"io"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"google.golang.org/grpc/mem"

	"tunnel.example/tunnel/pkg/tunnel"
)

// sendHalf is the direction in which this side writes.
type sendHalf struct {
	// Set once.
	done chan struct{} // closed when this side writes no more; then err is set

	deadline deadline   // the deadline of Write
	flow     flow       // bounds the chunks that SendMsg has taken and not written
	writeMu  sync.Mutex // held by Write: one at a time
	sendMu   sync.Mutex // held around way.SendMsg, which takes one caller at a time

	direct atomic.Int64 // bytes that TrySend has sent, and ReadFrom has not counted yet

	// Set before the sender goroutine starts, which most conns need only at their end.
	wake chan struct{} // signals the sender that there is something to send; capacity 1, so that signals merge

	// Guarded by Conn.mu.
	tail       *[]byte       // bytes that Write has queued and the sender has not taken; nil: none
	tailLen    int           // how many bytes are in tail
	space      chan struct{} // signals Write that tail was taken; capacity 1; nil before the first Write
	sent       int           // bytes sent, with the overhead that a data connection adds
	sending    bool          // the sender goroutine runs
	fin        notice        // says that this side writes no more
	stopGot    bool          // the other side reads no more
	reset      notice        // the abort that ResetBehind sends behind the last bytes; nothing follows it
	resetTaken bool          // the other side has ended the conn after our reset, so no cancel is sent; see MustCancel
	resetLate  *time.Timer   // ResetBehind starts it: it ends the conn if the other side does not; nil: not started
	err        error         // why this side writes no more
	onStop     []func()      // called when stopGot becomes true
}

func (h *sendHalf) init(b *Blocks, turns *Turns) {
	h.done = make(chan struct{})
	h.flow.init(b)
	h.flow.turns = turns
}

// Write queues p and returns when all of it is queued. It waits while the queue, of one chunk, is
// full.
func (c *Conn) Write(p []byte) (n int, err error) {
	c.out.writeMu.Lock()
	defer c.out.writeMu.Unlock()
	for {
		// The deadline is checked first: a Write after its deadline fails even if there is room.
		expired := c.out.deadline.wait()
		if tunnel.IsClosed(expired) {
			return n, c.opError("write", errTimeout)
		}
		m, err := c.queue(p[n:])
		n += m
		if err != nil {
			return n, c.opError("write", err)
		}
		if n == len(p) {
			return n, nil
		}
		select {
		case <-c.out.space:
		case <-expired:
		case <-c.out.done:
		}
	}
}

// queue appends to the tail as much of p as fits.
func (c *Conn) queue(p []byte) (n int, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if tunnel.IsClosed(c.out.done) {
		return 0, c.out.err
	}
	if len(p) == 0 {
		return 0, nil
	}
	if c.out.tail == nil {
		c.out.tail = c.blocks.get()
	}
	if c.out.space == nil {
		c.out.space = make(chan struct{}, 1)
	}
	n = copy(payload(c.out.tail)[c.out.tailLen:max(c.out.tailLen, c.out.flow.turns.chunk())], p)
	c.out.tailLen += n
	c.startSenderLocked()
	return n, nil
}

// startSenderLocked wakes the sender, or starts it.
func (c *Conn) startSenderLocked() {
	if !c.out.sending {
		c.out.sending = true
		c.out.wake = make(chan struct{}, 1)
		c.goLocked(c.sendLoop)
	}
	select {
	case c.out.wake <- struct{}{}:
	default:
	}
}

// sendLoop sends what Write, CloseWrite and CloseRead leave for it.
func (c *Conn) sendLoop() {
	for {
		select {
		case <-c.out.wake:
		case <-c.over:
			return
		}
		for {
			if !c.out.flow.wait(c.over) {
				return
			}
			c.mu.Lock()
			n := c.out.tailLen
			c.mu.Unlock()
			sent, err := c.sendOnce(c.out.flow.turn(n, c.over))
			if err != nil {
				// The receiver learns from way.RecvMsg why the conn has ended.
				return
			}
			if !sent {
				c.out.flow.turns.settle(&c.out.flow) // a ReadFrom has sent the tail
				break
			}
		}
	}
}

// sendOnce is sendPending for a caller that does not hold sendMu. It sends at most limit bytes of the tail; 0: the
// whole tail.
func (c *Conn) sendOnce(limit int) (sent bool, err error) {
	c.out.sendMu.Lock()
	defer c.out.sendMu.Unlock() // deferred, because a ReadFrom may wait for sendMu even after a panic here
	c.mu.Lock()
	if limit == 0 || limit >= c.out.tailLen {
		c.mu.Unlock()
		return c.sendPending()
	}
	part := c.blocks.get()
	copy(payload(part), payload(c.out.tail)[:limit])
	c.out.tailLen = copy(payload(c.out.tail), payload(c.out.tail)[limit:c.out.tailLen])
	c.mu.Unlock()
	return true, c.send(&outgoing{block: part, n: limit})
}

// sendPending sends the tail, and the marks that are due. sent is false if there was nothing to send. The
// caller holds sendMu.
func (c *Conn) sendPending() (sent bool, err error) {
	c.mu.Lock()
	o := &outgoing{
		block: c.out.tail, n: c.out.tailLen,
		fin:   c.out.fin == noticeDue && c.out.reset == noticeNone,
		stop:  c.in.stop == noticeDue,
		abort: c.out.reset != noticeNone,
	}
	if c.out.reset == noticeSent || o.n == 0 && !o.fin && !o.stop && !o.abort {
		c.mu.Unlock()
		return false, nil
	}
	space := c.out.space
	c.out.tail, c.out.tailLen = nil, 0
	switch {
	case o.abort:
		c.out.reset = noticeSent // set before SendMsg: the answer may come before SendMsg has returned
	case c.isEdge:
		o.last = o.fin && c.in.finGot // every byte before the peer's fin has been handed on
	default:
		o.last = (o.fin || c.out.fin == noticeSent || c.out.stopGot) && (o.stop || c.in.stop == noticeSent || c.in.finGot)
	}
	c.mu.Unlock()
	select {
	case space <- struct{}{}:
	default:
	}
	if o.block == nil {
		o.block = c.blocks.get()
	}
	return true, c.send(o)
}

// longSend is how long SendMsg takes at least if the chunk has waited for flow control.
const longSend = 10 * time.Millisecond

// send sends one chunk. It waits while the other side's window is full. An error says that the conn has
// ended; the receiver learns the reason from way.RecvMsg. The caller holds sendMu.
func (c *Conn) send(o *outgoing) error {
	if o.n > 0 {
		c.moves(o.n)
	}
	began := time.Now()
	o.pool = &c.out.flow
	c.out.flow.add()
	if err := c.way.SendMsg(o); err != nil {
		if !o.taken {
			c.out.flow.Put(o.block)
			o.forwarded.Free()
		}
		return c.writeError()
	}
	if o.n > 0 && time.Since(began) >= longSend {
		c.moves(o.n) // an answer that came meanwhile was probably none to these bytes
	}
	c.counters.BytesSent.Add(uint64(o.n))
	c.traffic.Send(o.n)
	c.mu.Lock()
	c.out.sent += o.n + chunkOverhead
	if o.fin {
		c.out.fin = noticeSent
	}
	if o.stop {
		c.in.stop = noticeSent
	}
	finished := (o.fin || o.stop) && c.bothEndedLocked()
	c.mu.Unlock()
	if finished {
		c.finish()
	}
	return nil
}

// finish is called when both directions have ended. The cloud then ends the conn. The edge waits for the
// cloud's end, which says that the cloud has every byte. It does not wait if it has told the cloud already
// that the conn has ended here (way.endSaid).
func (c *Conn) finish() {
	if !c.isEdge || c.way.endSaid() {
		c.end(nil)
	}
}

// ReadFrom sends the bytes of src until src ends. It reads them into a block and sends the block. An error
// is from src, or says that this conn takes no more bytes. The bytes that TrySend sends meanwhile count.
func (c *Conn) ReadFrom(src io.Reader) (n int64, err error) {
	defer func() { n += c.out.direct.Swap(0) }()
	var gather pace
	for {
		if !c.out.flow.wait(c.out.done) {
			return n, c.opError("write", c.writeError())
		}
		block := c.blocks.get()
		m, rerr := src.Read(payload(block)[:c.out.flow.turns.chunk()])
		if m == 0 {
			c.blocks.put(block)
		} else {
			c.unsent.Add(1)
			err := c.sendInTurns(block, m)
			c.unsent.Add(-1)
			if err != nil {
				return n, c.opError("write", err)
			}
			n += int64(m)
		}
		if rerr == io.EOF {
			return n, nil
		}
		if rerr != nil {
			return n, rerr
		}
		if gather.gathers(m, &c.in.heard) {
			time.Sleep(gatherTime)
		}
	}
}

// maxTry is the most bytes that TrySend sends.
const maxTry = 2 << 10

// TrySend sends a small message without waiting: head and body, as one chunk. It sends nothing and returns false if
// other bytes wait to be sent, another goroutine sends, or the kernel has no room. While ReadFrom waits for its source,
// the source may send a message so, instead of waking ReadFrom.
func (c *Conn) TrySend(head, body []byte) bool {
	n := len(head) + len(body)
	if n > maxTry {
		return false
	}
	c.mu.Lock()
	free := c.out.tailLen == 0 && !tunnel.IsClosed(c.out.done) && !tunnel.IsClosed(c.over) && c.out.sendMu.TryLock()
	if free {
		c.goroutines++ // this call counts as a goroutine, so that gone waits for it
	}
	c.mu.Unlock()
	if !free {
		return false
	}
	defer c.oneLess()
	defer c.out.sendMu.Unlock()
	if !c.way.hasRoom() { // nobody takes the room away while sendMu is held
		return false
	}
	block := c.blocks.get()
	copy(payload(block)[copy(payload(block), head):], body)
	if c.send(&outgoing{block: block, n: n}) != nil {
		return false
	}
	c.out.direct.Add(int64(n))
	return true
}

// WriteSlice sends the payload of a chunk that another conn has received. It frees data, even if it fails.
// It copies the bytes only if they are too many for one chunk on a thin link.
func (c *Conn) WriteSlice(data mem.BufferSlice) error {
	c.unsent.Add(1)
	defer c.unsent.Add(-1)
	if data.Len() > c.out.flow.turns.chunk() {
		r := data.Reader()
		data.Free() // r holds a reference of its own
		defer r.Close()
		_, err := c.ReadFrom(r)
		return err
	}
	if !c.out.flow.wait(c.out.done) {
		data.Free()
		return c.opError("write", c.writeError())
	}
	c.out.flow.turn(data.Len(), c.out.done)
	if err := c.sendBehind(&outgoing{block: c.blocks.get(), n: data.Len(), forwarded: data}); err != nil {
		return c.opError("write", err)
	}
	return nil
}

// sendInTurns sends a block when it is the conn's turn. It sends the block in parts if the link has
// become thin since the block was read.
func (c *Conn) sendInTurns(block *[]byte, n int) error {
	turn := c.out.flow.turn(n, c.out.done)
	if turn == n {
		return c.sendBlock(block, n)
	}
	defer c.blocks.put(block)
	for rest := payload(block)[:n]; ; {
		part := c.blocks.get()
		rest = rest[copy(payload(part), rest[:turn]):]
		if err := c.sendBlock(part, turn); err != nil || len(rest) == 0 {
			return err
		}
		if !c.out.flow.wait(c.out.done) {
			return c.writeError()
		}
		turn = c.out.flow.turn(len(rest), c.out.done)
	}
}

// sendBlock sends a block behind everything that Write has queued.
func (c *Conn) sendBlock(block *[]byte, n int) error {
	return c.sendBehind(&outgoing{block: block, n: n})
}

// sendBehind sends o behind everything that Write has queued.
func (c *Conn) sendBehind(o *outgoing) error {
	c.out.sendMu.Lock()
	defer c.out.sendMu.Unlock()
	_, err := c.sendPending()
	// Not before sendPending: it may have sent fin, and nothing goes behind fin.
	if err == nil && tunnel.IsClosed(c.out.done) {
		err = c.writeError()
	}
	if err != nil {
		c.blocks.put(o.block)
		o.forwarded.Free()
		c.out.flow.turns.settle(&c.out.flow) // o was not sent: its turn goes to another conn
		return err
	}
	return c.send(o)
}

// writeError says why this side can write no more. It is EPIPE if the reason is not known yet: the reason
// comes with the end of the conn, soon after.
func (c *Conn) writeError() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.out.err == nil {
		return syscall.EPIPE
	}
	return c.out.err
}

// CloseWrite ends the direction in which this side writes. Bytes that were written still arrive.
func (c *Conn) CloseWrite() error {
	c.mu.Lock()
	due := c.endWriteLocked(syscall.EPIPE)
	inline := due && !c.out.sending && c.way.sendsAtOnce(c.out.sent) && !tunnel.IsClosed(c.over) && c.out.sendMu.TryLock()
	switch {
	case inline:
		c.goroutines++ // this call counts as a goroutine, so that gone waits for it
	case due:
		c.startSenderLocked()
	}
	c.mu.Unlock()
	if inline {
		defer c.oneLess()
		defer c.out.sendMu.Unlock()
		c.sendPending() //nolint:errcheck // the receiver learns why the conn has ended
	}
	return nil
}

// endWriteLocked ends the direction in which this side writes. Later writes fail with err. The result says
// whether fin is now due.
func (c *Conn) endWriteLocked(err error) bool {
	if tunnel.IsClosed(c.out.done) {
		return false
	}
	c.out.err = err
	close(c.out.done)
	if c.out.stopGot {
		return false
	}
	c.out.fin = noticeDue
	return true
}

// abortTime is how long the other side may take to receive the bytes that were sent before an abort.
const abortTime = time.Second

// ResetBehind aborts the conn in order: the other side gets the bytes that were written, and
// then sees a reset. A Reset could overtake these bytes. If the other side does not have the capability
// abort (Config.Ordered), ResetBehind aborts at once, as Reset does. If the other side has not taken all
// bytes within abortTime, the conn is reset then.
func (c *Conn) ResetBehind() {
	c.mu.Lock()
	inOrder := c.ordered && c.out.fin == noticeNone && !c.out.stopGot && !tunnel.IsClosed(c.over)
	if inOrder && c.out.reset == noticeNone {
		c.out.reset = noticeDue
		c.out.resetLate = time.AfterFunc(abortTime, func() { c.end(tunnel.ErrReset) })
		if !tunnel.IsClosed(c.out.done) {
			c.out.err = tunnel.ErrReset
			close(c.out.done)
		}
		c.startSenderLocked()
	}
	c.mu.Unlock()
	if !inOrder {
		c.end(tunnel.ErrReset)
	}
}

// OnStop calls f when the other side says that it reads no more; at once if it has said so.
func (c *Conn) OnStop(f func()) {
	c.mu.Lock()
	stopped := c.out.stopGot
	if !stopped {
		c.out.onStop = append(c.out.onStop, f)
	}
	c.mu.Unlock()
	if stopped {
		f()
	}
}

// PeerStopped reports whether the other side has said that it reads no more.
func (c *Conn) PeerStopped() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.out.stopGot
}
