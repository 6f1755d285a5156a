package stream

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"

	"tunnel/pkg/tunnel"
)

// conn is one end of a forwarded connection: a net.Conn over one Connect stream, or over a
// data connection, which stands in for one (ride). It
// behaves like TCP: each direction ends by itself (fin), a side that takes no more
// bytes says so (stop), and an abort shows as a reset.
//
// A direction has ended when its sender has sent fin or its receiver has said stop.
// When both have, the cloud's handler returns OK, which ends the stream (for a ride see
// flagEnd). Until then somebody receives: Read's goroutine, WriteTo, or a goroutine that
// throws away what arrives after the direction's end (for a ride 20 ms later); so no stop is
// missed and no sender hangs on flow control for a conn that is not read any more.
//
// gRPC frees a SendMsg that waits for flow control only when the stream ends. So
// nothing that must not block calls it: Write hands its bytes to the sender
// goroutine, and small writes that come while it is busy leave in one chunk. ReadFrom
// and WriteTo, which Splice uses, do without the goroutines, and so does the fin of a ride
// that has sent little.
type conn struct {
	// Set once.
	stream   messageStream
	by       *ride           // the same, if it is one
	ended    func(err error) // the session's part of the end; called once, nil for a clean end
	isEdge   bool
	ordered  bool // the peer has capabilityAbort
	blocks   *blocks
	counters *tunnel.Counters
	log      *slog.Logger
	local    addr
	remote   addr
	gone     func() // called once when the stream has ended and no goroutine is left

	readDeadline  deadline
	writeDeadline deadline

	over      chan struct{} // closed when the stream is to end, or has; then err is set
	readDone  chan struct{} // closed when this side reads no more
	writeDone chan struct{} // closed when this side writes no more; then writeErr is set
	wake      chan struct{} // to the sender: there is something to send; one token is enough
	space     chan struct{} // to Write: the tail was taken; one token is enough
	in        chan mem.BufferSlice
	flow      flow
	heard     atomic.Bool // bytes have come since pace.gathers last asked

	readMu  sync.Mutex      // one Read at a time; guards current
	current mem.BufferSlice // what Read has not taken of the last chunk

	writeMu sync.Mutex // one Write at a time
	sendMu  sync.Mutex // held around SendMsg, which takes one caller at a time

	mu         sync.Mutex // guards the following; never held while waiting
	tail       *[]byte    // bytes that Write took and the sender has not
	tailLen    int
	finWanted  bool // our side has written all
	stopWanted bool // our side reads no more
	finSent    bool
	stopSent   bool
	finGot     bool
	stopGot    bool
	sending    bool // the sender goroutine runs
	// Of ResetBehind; nothing is sent behind a reset.
	resetWanted, resetSent bool
	resetTaken             bool        // the other side has ended the stream after it; a cancel could overtake it there
	resetLate              *time.Timer // ends the conn, since the peer has not; nil until resetWanted
	receiving              bool        // somebody calls RecvMsg, or everything has been received
	goroutines             int
	sent                   int         // bytes, with what a data connection puts around them
	rest                   *time.Timer // until somebody receives what comes after fin
	err                    error       // why the conn is over; nil for a clean end
	writeErr               error
	onReset                []func()
	onStop                 []func()
}

// messageStream is what a conn needs of a grpc.ClientStream or grpc.ServerStream, or a ride.
type messageStream interface {
	SendMsg(m any) error
	RecvMsg(m any) error
}

// addr is the address of one end of a conn.
type addr string

func (addr) Network() string  { return "tunnel" }
func (a addr) String() string { return string(a) }

// receiveQueue is how many chunks wait for a Read beside the one being read, so that
// the receiver and the reader overlap. Everything else waits in gRPC's window.
const receiveQueue = 1

type connConfig struct {
	stream        messageStream
	turns         *turns // of the session's connection, if the stream is on it
	isEdge        bool
	ordered       bool
	blocks        *blocks
	counters      *tunnel.Counters
	log           *slog.Logger
	local, remote addr
	ended         func(err error)
	gone          func()
}

func newConn(cfg connConfig) *conn {
	c := &conn{
		stream: cfg.stream, isEdge: cfg.isEdge, ordered: cfg.ordered, blocks: cfg.blocks, counters: cfg.counters, log: cfg.log,
		local: cfg.local, remote: cfg.remote, ended: cfg.ended, gone: cfg.gone,
		readDeadline:  newDeadline(),
		writeDeadline: newDeadline(),
		over:          make(chan struct{}),
		readDone:      make(chan struct{}),
		writeDone:     make(chan struct{}),
		wake:          make(chan struct{}, 1),
		space:         make(chan struct{}, 1),
		in:            make(chan mem.BufferSlice, receiveQueue),
	}
	c.by, _ = cfg.stream.(*ride)
	c.flow.init(cfg.blocks)
	c.flow.turns = cfg.turns
	return c
}

var (
	_ net.Conn        = (*conn)(nil)
	_ tunnel.Resetter = (*conn)(nil)
	_ io.ReaderFrom   = (*conn)(nil)
	_ io.WriterTo     = (*conn)(nil)
)

func (c *conn) LocalAddr() net.Addr  { return c.local }
func (c *conn) RemoteAddr() net.Addr { return c.remote }

// SetDeadline sets both deadlines.
func (c *conn) SetDeadline(t time.Time) error {
	c.readDeadline.set(t)
	c.writeDeadline.set(t)
	return nil
}

// SetReadDeadline sets when a Read gives up.
func (c *conn) SetReadDeadline(t time.Time) error {
	c.readDeadline.set(t)
	return nil
}

// SetWriteDeadline sets when a Write gives up.
func (c *conn) SetWriteDeadline(t time.Time) error {
	c.writeDeadline.set(t)
	return nil
}

// Close ends both directions and returns at once. What was written before still
// arrives; what arrives afterwards is thrown away.
func (c *conn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.endWriteLocked(net.ErrClosed) {
		c.startSenderLocked()
	}
	c.endReadLocked()
	return nil
}

// CloseWrite says that nothing more will be written. What was written still arrives.
func (c *conn) CloseWrite() error {
	c.mu.Lock()
	due := c.endWriteLocked(syscall.EPIPE)
	inline := due && c.by != nil && c.sent <= finInline && !c.sending && !isClosed(c.over) && c.sendMu.TryLock()
	switch {
	case inline:
		c.goroutines++ // as if this were one
	case due:
		c.startSenderLocked()
	}
	c.mu.Unlock()
	if inline {
		defer c.oneLess()
		defer c.sendMu.Unlock()
		c.sendPending() //nolint:errcheck // the receiver is told why the stream has ended
	}
	return nil
}

// finInline is how much a conn may have sent for its fin to go without the sender goroutine: a
// socket takes so much without waiting, and all of the conn before has been taken from it.
const finInline = 4 << 10

// CloseRead says that nothing more will be read; the other side's writes will fail.
func (c *conn) CloseRead() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.endReadLocked()
	return nil
}

// Reset aborts the conn: the other side sees a reset.
func (c *conn) Reset() error {
	c.end(tunnel.ErrReset)
	return nil
}

// abortTime is how long the other side may take to get what was sent before an abort.
const abortTime = time.Second

// ResetBehind aborts the conn in order: the other side gets the bytes that were written, and
// then sees a reset. A Reset could overtake those bytes. ResetBehind aborts at once, as Reset
// does, when the other side takes longer than abortTime or lacks capabilityAbort.
func (c *conn) ResetBehind() {
	c.mu.Lock()
	inOrder := c.ordered && !c.finWanted && !c.stopGot && !isClosed(c.over)
	if inOrder && !c.resetWanted {
		c.resetWanted = true
		c.resetLate = time.AfterFunc(abortTime, func() { c.end(tunnel.ErrReset) })
		if !isClosed(c.writeDone) {
			c.writeErr = tunnel.ErrReset
			close(c.writeDone)
		}
		c.startSenderLocked()
	}
	c.mu.Unlock()
	if !inOrder {
		c.end(tunnel.ErrReset)
	}
}

// endBehind ends the conn because the other side's ResetBehind has arrived. Only the reader of
// the bytes before it calls it. The reader passes the reset on behind those bytes, so the
// OnReset callbacks are not called.
func (c *conn) endBehind() error {
	c.mu.Lock()
	c.onReset = nil
	c.mu.Unlock()
	c.end(tunnel.ErrReset)
	return c.opError("read", tunnel.ErrReset)
}

// OnReset calls f when the conn is aborted, at once if it already is.
func (c *conn) OnReset(f func()) {
	c.mu.Lock()
	if !isClosed(c.over) {
		c.onReset = append(c.onReset, f)
		c.mu.Unlock()
		return
	}
	aborted := c.err != nil
	c.mu.Unlock()
	if aborted {
		f()
	}
}

// OnStop calls f when the other side reads no more, at once if it already has said so.
func (c *conn) OnStop(f func()) {
	c.mu.Lock()
	stopped := c.stopGot
	if !stopped {
		c.onStop = append(c.onStop, f)
	}
	c.mu.Unlock()
	if stopped {
		f()
	}
}

// endWriteLocked reports whether fin is due.
func (c *conn) endWriteLocked(err error) bool {
	if isClosed(c.writeDone) {
		return false
	}
	c.writeErr = err
	close(c.writeDone)
	c.finWanted = !c.stopGot
	return c.finWanted
}

func (c *conn) endReadLocked() {
	if isClosed(c.readDone) {
		return
	}
	close(c.readDone)
	c.startReceiverLocked()
	if !c.finGot {
		c.stopWanted = true
		c.startSenderLocked()
	}
}

// bothEndedLocked reports whether both directions have ended.
func (c *conn) bothEndedLocked() bool {
	return !c.resetWanted && (c.finSent || c.stopGot) && (c.finGot || c.stopSent)
}

// end makes the conn over: cleanly when err is nil, else by a reset. Only the first
// call counts.
func (c *conn) end(err error) {
	c.mu.Lock()
	if isClosed(c.over) {
		c.mu.Unlock()
		return
	}
	c.err = err
	if !isClosed(c.writeDone) {
		c.writeErr = err
		if err == nil {
			c.writeErr = syscall.EPIPE
		}
		close(c.writeDone)
	}
	close(c.over)
	for _, t := range []*time.Timer{c.rest, c.resetLate} {
		if t != nil {
			t.Stop()
		}
	}
	callbacks := c.onReset
	c.onReset = nil
	c.goroutines++ // as if this were one: gone comes after ended
	c.mu.Unlock()

	c.flow.leave()
	c.ended(err)
	if err != nil {
		c.counters.Resets.Add(1)
		for _, f := range callbacks {
			f()
		}
	}
	c.oneLess()
}

// oneLess counts a goroutine that has ended.
func (c *conn) oneLess() {
	c.mu.Lock()
	c.goroutines--
	last := c.goroutines == 0 && isClosed(c.over)
	c.mu.Unlock()
	if last {
		c.gone()
	}
}

// goLocked runs f in a goroutine that gone waits for; caller holds mu. Nothing is
// started once the conn is over. A panic ends this conn and no other.
func (c *conn) goLocked(f func()) {
	if isClosed(c.over) {
		return
	}
	c.goroutines++
	go func() {
		if err := guard(c.log, c.counters, "the conn ends", func() error { f(); return nil }); err != nil {
			c.end(tunnel.ErrReset)
		}
		c.oneLess()
	}()
}

// opError wraps err as the net package does, so that callers who know TCP's errors
// (timeouts, net.ErrClosed, ECONNRESET, EPIPE) find them.
func (c *conn) opError(op string, err error) error {
	return &net.OpError{Op: op, Net: c.local.Network(), Source: c.local, Addr: c.remote, Err: err}
}

// errTimeout is what an expired deadline gives: its Timeout method says true.
var errTimeout = os.ErrDeadlineExceeded

// streamError takes the error of RecvMsg. At the edge io.EOF is the cloud's OK: a
// clean end if both directions have ended. The wanted ends count, not the sent ones:
// the cloud may answer our fin before our SendMsg has returned. At the cloud io.EOF
// only says that the edge has closed its side of the stream. Everything else is a
// reset, and so is an end that comes too early: bytes may be missing.
func (c *conn) streamError(err error) {
	c.mu.Lock()
	inputEnded := c.finGot || c.stopWanted
	clean := inputEnded && (c.finWanted || c.stopGot)
	c.mu.Unlock()
	switch eof := errors.Is(err, io.EOF); {
	case eof && c.isEdge && clean:
		c.end(nil)
	case eof && !c.isEdge && (clean || c.by == nil && inputEnded):
	default:
		if !c.isEdge && status.Code(err) == codes.ResourceExhausted { // gRPC's own
			c.counters.Limited(tunnel.LimitMessage)
		}
		c.endedByPeer()
	}
}

// watch ends the conn when ctx, which is the stream's, is done.
func (c *conn) watch(ctx context.Context) (stop func() bool) {
	return context.AfterFunc(ctx, c.endedByPeer)
}

// endedByPeer ends the conn because the other side has ended the stream, or says that it has.
func (c *conn) endedByPeer() {
	c.mu.Lock()
	c.resetTaken = c.resetSent
	c.mu.Unlock()
	c.end(tunnel.ErrReset)
}

// mustCancel reports whether a conn that ended by a reset needs a cancel on the control stream,
// which also reaches an edge that does not read the conn.
func (c *conn) mustCancel() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.resetTaken
}
