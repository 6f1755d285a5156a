package conn

import (
	"io"
	"math"
	"sync/atomic"
	"syscall"
	"time"

	"google.golang.org/grpc/mem"
)

// Write queues p and returns when all of it is queued: it waits while more than one
// chunk is.
func (c *Conn) Write(p []byte) (n int, err error) {
	c.writeMu.Lock()
	defer c.writeMu.Unlock()
	for {
		// The deadline comes first: one in the past fails even where there is room.
		expired := c.writeDeadline.wait()
		if isClosed(expired) {
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
		case <-c.space:
		case <-expired:
		case <-c.writeDone:
		}
	}
}

// queue appends to the tail what fits.
func (c *Conn) queue(p []byte) (n int, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if isClosed(c.writeDone) {
		return 0, c.writeErr
	}
	if len(p) == 0 {
		return 0, nil
	}
	if c.tail == nil {
		c.tail = c.blocks.get()
	}
	n = copy(payload(c.tail)[c.tailLen:max(c.tailLen, c.flow.turns.chunk())], p)
	c.tailLen += n
	c.startSenderLocked()
	return n, nil
}

// startSenderLocked wakes the sender, or starts it.
func (c *Conn) startSenderLocked() {
	if !c.sending {
		c.sending = true
		c.goLocked(c.sendLoop)
	}
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// sendLoop sends what Write, CloseWrite and CloseRead leave for it.
func (c *Conn) sendLoop() {
	for {
		select {
		case <-c.wake:
		case <-c.over:
			return
		}
		for {
			if !c.flow.wait(c.over) {
				return
			}
			c.mu.Lock()
			n := c.tailLen
			c.mu.Unlock()
			sent, err := c.sendOnce(c.flow.turn(n, c.over))
			if err != nil {
				// The receiver is told why the stream has ended.
				return
			}
			if !sent {
				c.flow.turns.settle(&c.flow) // a ReadFrom has sent the tail
				break
			}
		}
	}
}

// sendOnce is sendPending, with so many bytes of the tail at most; 0: all.
func (c *Conn) sendOnce(most int) (sent bool, err error) {
	c.sendMu.Lock()
	defer c.sendMu.Unlock() // whatever happens, a ReadFrom may wait for it
	c.mu.Lock()
	if most == 0 || most >= c.tailLen {
		c.mu.Unlock()
		return c.sendPending()
	}
	part := c.blocks.get()
	copy(payload(part), payload(c.tail)[:most])
	c.tailLen = copy(payload(c.tail), payload(c.tail)[most:c.tailLen])
	c.mu.Unlock()
	return true, c.send(&outgoing{block: part, n: most})
}

// sendPending sends the tail and the ends of directions that are due. Caller holds
// sendMu. sent is false when there was nothing.
func (c *Conn) sendPending() (sent bool, err error) {
	c.mu.Lock()
	o := &outgoing{
		block: c.tail, n: c.tailLen,
		fin:   c.finWanted && !c.finSent && !c.resetWanted,
		stop:  c.stopWanted && !c.stopSent,
		abort: c.resetWanted,
	}
	if c.resetSent || o.n == 0 && !o.fin && !o.stop && !o.abort {
		c.mu.Unlock()
		return false, nil
	}
	c.tail, c.tailLen = nil, 0
	c.resetSent = o.abort // before SendMsg, whose answer may be quicker than its return
	switch {
	case o.abort:
	case c.isEdge:
		o.last = o.fin && c.finGot // what came before it has been handed on
	default:
		o.last = (o.fin || c.finSent || c.stopGot) && (o.stop || c.stopSent || c.finGot)
	}
	c.mu.Unlock()
	select {
	case c.space <- struct{}{}:
	default:
	}
	if o.block == nil {
		o.block = c.blocks.get()
	}
	return true, c.send(o)
}

// send sends one chunk; caller holds sendMu. It waits while the other side's window
// is full. An error says that the stream has ended; whether that was a reset, the
// receiver learns from the status.
func (c *Conn) send(o *outgoing) error {
	o.pool = &c.flow
	c.flow.add()
	if err := c.way.SendMsg(o); err != nil {
		if !o.taken {
			c.flow.Put(o.block)
			o.forwarded.Free()
		}
		return c.writeError()
	}
	c.counters.BytesSent.Add(uint64(o.n))
	c.mu.Lock()
	c.sent += o.n + chunkOverhead
	c.finSent = c.finSent || o.fin
	c.stopSent = c.stopSent || o.stop
	finished := (o.fin || o.stop) && c.bothEndedLocked()
	c.mu.Unlock()
	if finished {
		c.finish()
	}
	return nil
}

// finish is called when both directions have ended. The cloud ends the stream; the edge waits for
// that end, which tells it that the cloud has everything, unless it has said so itself.
func (c *Conn) finish() {
	if !c.isEdge || c.way.endSaid() {
		c.end(nil)
	}
}

// ReadFrom sends what src gives until its end: read into a block, sent from there.
// Errors are src's own, or say that this conn takes no more.
func (c *Conn) ReadFrom(src io.Reader) (n int64, err error) {
	var pace pace
	for {
		if !c.flow.wait(c.writeDone) {
			return n, c.opError("write", c.writeError())
		}
		block := c.blocks.get()
		m, rerr := src.Read(payload(block)[:c.flow.turns.chunk()])
		if m == 0 {
			c.blocks.put(block)
		} else {
			if err := c.sendInTurns(block, m); err != nil {
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
		if pace.gathers(m, &c.heard) {
			time.Sleep(gatherTime)
		}
	}
}

// What is written in small pieces, one after the other and with no answer between them, as a
// log is that somebody follows, costs a packet each and twice its bytes. So it is read with
// short pauses, in which it gathers in the socket.
const (
	gatherTime = 2 * time.Millisecond
	// gatherBelow is what a small piece is, in bytes: two of them still fit into a packet.
	gatherBelow = 700
	// gatherAfter is how many must have come so. Who asks and waits for an answer gets there
	// never.
	gatherAfter = 8
	// gatherVain is how many pauses in a row may have gathered nothing: some sources give
	// piece by piece whatever waits behind.
	gatherVain = 4
)

// pace says when to pause.
type pace struct {
	small int       // pieces, one after the other
	bytes int       // of the first gatherAfter of them
	last  time.Time // when one was read
	vain  int       // pauses in a row in which nothing has gathered
}

// gathers takes that n bytes were read. heard says whether any have come the other way since
// it was last called, and is reset.
func (p *pace) gathers(n int, heard *atomic.Bool) bool {
	if n == 0 || n >= gatherBelow || p.vain == gatherVain || heard.Swap(false) {
		if p.small > gatherAfter && p.vain < gatherVain {
			p.vain = 0 // it has gathered more than a little, or is answered
		}
		p.small, p.bytes = 0, 0
		return false
	}
	now := time.Now()
	if now.Sub(p.last) > 2*gatherTime {
		p.small, p.bytes = 0, 0
	}
	p.small, p.last = p.small+1, now
	if p.small <= gatherAfter {
		p.bytes += n
		return false
	}
	if p.small > gatherAfter+1 { // there was a pause
		p.vain++
		if n*gatherAfter > p.bytes { // more than those on average
			p.vain = 0
		}
	}
	return p.vain < gatherVain
}

// WriteSlice sends the payload of a chunk that another conn has received, uncopied. It
// takes data over. On a thin link it is too much for one chunk.
func (c *Conn) WriteSlice(data mem.BufferSlice) error {
	if data.Len() > c.flow.turns.chunk() {
		r := data.Reader()
		data.Free()     // r has it
		defer r.Close() //nolint:errcheck // it never fails
		_, err := c.ReadFrom(r)
		return err
	}
	if !c.flow.wait(c.writeDone) {
		data.Free()
		return c.opError("write", c.writeError())
	}
	c.flow.turn(data.Len(), c.writeDone)
	if err := c.sendBehind(&outgoing{block: c.blocks.get(), n: data.Len(), forwarded: data}); err != nil {
		return c.opError("write", err)
	}
	return nil
}

// sendInTurns sends a block when it is its turn: in parts, when the link has become thin since it
// was read.
func (c *Conn) sendInTurns(block *[]byte, n int) error {
	turn := c.flow.turn(n, c.writeDone)
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
		if !c.flow.wait(c.writeDone) {
			return c.writeError()
		}
		turn = c.flow.turn(len(rest), c.writeDone)
	}
}

// sendBlock sends a block behind everything that Write has queued.
func (c *Conn) sendBlock(block *[]byte, n int) error {
	return c.sendBehind(&outgoing{block: block, n: n})
}

// sendBehind sends o behind everything that Write has queued.
func (c *Conn) sendBehind(o *outgoing) error {
	c.sendMu.Lock()
	defer c.sendMu.Unlock()
	_, err := c.sendPending()
	// Only now: what was pending may have been fin, and nothing goes behind that.
	if err == nil && isClosed(c.writeDone) {
		err = c.writeError()
	}
	if err != nil {
		c.blocks.put(o.block)
		o.forwarded.Free()
		c.flow.turns.settle(&c.flow) // the turn that o had is for others
		return err
	}
	return c.send(o)
}

// writeError says why this side can write no more. EPIPE is also the answer while the
// reason is not known yet; the end that follows brings it.
func (c *Conn) writeError() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.writeErr == nil {
		return syscall.EPIPE
	}
	return c.writeErr
}

// maxInFlight is how many chunks of a conn may be on their way from SendMsg to the
// socket. While that many are, nothing is read from the source, so that what comes
// in small pieces leaves in large ones when the link is the bottleneck. When it is
// not, nothing waits. Bulk transfers stay below it: gRPC takes 64 KiB per stream.
const maxInFlight = 4

// flow counts the blocks of a conn that gRPC has not written yet. It is the
// mem.BufferPool to which gRPC returns them.
type flow struct {
	blocks   *Blocks
	inFlight atomic.Int32
	room     chan struct{} // one token: a block came back

	turns  *Turns       // of the session's connection; nil: the conn has one for itself
	places atomic.Int32 // chunks that are counted in turns.held; changed by its owner
	round  int          // of turns, in which places are; guarded by turns.mu
	had    int64        // what turns.now is to others; guarded by turns.mu
}

var _ mem.BufferPool = (*flow)(nil)

func (f *flow) init(b *Blocks) {
	f.blocks = b
	f.room = make(chan struct{}, 1)
}

func (f *flow) add() { f.inFlight.Add(1) }

// Get implements mem.BufferPool. gRPC never calls it on the pool of a buffer.
func (f *flow) Get(int) *[]byte { return f.blocks.get() }

// Put implements mem.BufferPool: gRPC has written the block.
func (f *flow) Put(block *[]byte) {
	f.blocks.put(block)
	f.inFlight.Add(-1)
	f.turns.settle(f)
	select {
	case f.room <- struct{}{}:
	default:
	}
}

// turn waits until some of n bytes may be sent, or done is closed. It returns how many.
func (f *flow) turn(n int, done <-chan struct{}) int {
	if f.turns == nil {
		return n
	}
	return f.turns.wait(f, n, done)
}

// leave gives up the places of a conn that has ended: gRPC may throw its chunks away.
func (f *flow) leave() {
	f.inFlight.Store(math.MinInt32 / 2)
	f.turns.settle(f)
}

// wait returns true when another chunk may be sent, and false when done is closed.
// ReadFrom and the sender may both wait. One token is enough for two: when it lets
// one of them pass, maxInFlight-1 blocks are still to come back.
func (f *flow) wait(done <-chan struct{}) bool {
	for f.inFlight.Load() >= maxInFlight {
		select {
		case <-f.room:
		case <-done:
			return false
		}
	}
	return !isClosed(done)
}
