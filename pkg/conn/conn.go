// Package conn is one forwarded connection: a net.Conn whose other end is in another process, at the
// other end of a session between an edge and the cloud. Conn behaves like a TCP connection, with
// half-closes, deadlines and resets.
//
// A conn uses one of two ways. One is an HTTP/2 stream of its own (OverStream). The other is a data
// connection (OverLease): a TLS connection that carries one conn after the other. Type Conn does not know
// which of the two it uses.
//
// Files: conn.go holds the life of a conn, send.go and recv.go its two directions, and way.go the interface
// of its way. chunk.go has the wire format of chunks, and the gRPC codec for them. data.go and lease.go
// are the data connection. turns.go shares one connection among many streams.
//
// Lock order, outermost first; "try" takes a lock only if it is free:
//
//	pkg/stream's session.mu → Data.mu
//	Conn.readMu, Conn.writeMu → deadline.mu, Conn.mu
//	Conn.sendMu → Lease.sendMu → Data.mu
//	Conn.sendMu → Lease.recvMu, pkg/stream's session.mu (Config.Gone may give the lease back)
//	Conn.sendMu → Conn.mu; try Conn.sendMu
//	Conn.sendMu → Turns.mu
//	Lease.recvMu → Data.mu
//
// Conn.mu, Data.mu, Turns.mu and deadline.mu are innermost. Config.Ended and Config.Gone are called
// with no lock held but Conn.sendMu, and may take session.mu. So no goroutine that holds session.mu may
// call a method of Conn that ends the conn or sends.
//
// The package does not open connections, does not know sessions, and decides neither by which way a
// conn goes nor when a data connection is closed: pkg/stream does.
package conn

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
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/pkg/tunnel"
)

// Conn is one end of a forwarded connection: a net.Conn over a way. It behaves like a TCP connection. Each
// direction ends by itself (fin). A side that takes no more bytes says so (stop). The other side sees an
// abort as a reset.
//
// A direction has ended when its sender has sent fin or its receiver has sent stop. When both directions
// have ended, the cloud's handler returns OK, which ends the stream; over a data connection see flagEnd.
// Until then a goroutine receives: Read's goroutine, that of WriteTo, or a goroutine that discards bytes
// after the direction's end (way.pauseAfterFin). So no stop is missed, and no sender waits for flow control
// on a conn that has no reader.
//
// A SendMsg that waits for flow control returns only when it may send or the stream ends. So a call that
// must not block calls SendMsg only where the way says that SendMsg does not wait (CloseWrite, TrySend).
// Write hands its bytes to the sender goroutine, and small writes that come while the sender is busy leave in
// one chunk. ReadFrom and WriteTo, which Splice uses, need neither the sender nor the receiver goroutine. A
// fin needs no goroutine where way.sendsAtOnce returns true.
type Conn struct {
	// Set once.
	way      way
	ended    func(err error) // see Config.Ended
	isEdge   bool
	asked    bool // see Config.Asked
	ordered  bool // see Config.Ordered
	blocks   *Blocks
	counters *tunnel.Counters
	traffic  *tunnel.Traffic     // counts the bytes of the session; nil: not counted
	ends     *tunnel.GraceEnd    // see Config.Ends
	tellEnds func(time.Duration) // see Config.TellEnds
	log      *slog.Logger
	local    Addr
	remote   Addr
	gone     func() // see Config.Gone

	// For Answered.
	moved    atomic.Int64 // grows with each byte
	answered atomic.Bool  // WriteTo has written the last bytes, and they came from the other side
	unsent   atomic.Int32 // calls that have bytes to send

	over chan struct{} // closed when the conn is to end, or has ended; then err is set
	out  sendHalf
	in   recvHalf

	mu         sync.Mutex // guards the following, and fields of in and out that say so; never held while waiting
	goroutines int        // running goroutines of the conn, and calls that count as one; Gone waits for all of them
	err        error      // why the conn is over; nil for a clean end
	onReset    []func()   // called when the conn is aborted
}

// notice is the state of a mark (fin, stop or abort) that this side sends at most once.
type notice uint8

const (
	noticeNone notice = iota // there is nothing to tell
	noticeDue                // the sender goroutine has to send it
	noticeSent
)

// Addr is the address of one end of a conn.
type Addr string

// Network implements net.Addr.
func (Addr) Network() string { return "tunnel" }

// String implements net.Addr.
func (a Addr) String() string { return string(a) }

// Config is what a conn needs beside its way.
type Config struct {
	IsEdge        bool // this is the edge's end
	Asked         bool // this side has asked for the conn: the target is at the other side
	Ordered       bool // the other side takes chunks with abort
	Blocks        *Blocks
	Counters      *tunnel.Counters
	Traffic       *tunnel.Traffic // counts the bytes of the session, too; nil: not counted
	Log           *slog.Logger
	Local, Remote Addr
	// Ends begins when the other side says that it is about to reset the conn. nil unless Asked.
	Ends *tunnel.GraceEnd
	// TellEnds tells the other side, which has asked for the conn, that the conn is reset after left. It must not wait.
	// nil: the other side need not know.
	TellEnds func(left time.Duration)
	// Ended is called once when the conn is over, so that its owner can do its part of the end. err is nil
	// after a clean end. Ended must not wait.
	Ended func(err error)
	// Gone is called once, after Ended, when the conn is over and none of its goroutines is left. It
	// must not wait.
	Gone func()
}

// OverStream returns one end of a conn over an HTTP/2 stream. turns is shared by all conns on the
// stream's connection; nil: the conn never waits for a turn.
func OverStream(s Stream, turns *Turns, cfg Config) *Conn {
	both := &struct { // one allocation
		conn Conn
		way  streamWay
	}{way: streamWay{s, cfg.IsEdge}}
	both.conn.init(&both.way, turns, cfg)
	return &both.conn
}

// OverLease returns one end of a conn over a data connection.
func OverLease(l *Lease, cfg Config) *Conn {
	c := new(Conn)
	c.init(l, nil, cfg)
	return c
}

func (c *Conn) init(w way, turns *Turns, cfg Config) {
	c.way, c.isEdge, c.asked, c.ordered = w, cfg.IsEdge, cfg.Asked, cfg.Ordered
	c.blocks, c.counters, c.traffic, c.log = cfg.Blocks, cfg.Counters, cfg.Traffic, cfg.Log
	c.local, c.remote, c.ended, c.gone = cfg.Local, cfg.Remote, cfg.Ended, cfg.Gone
	c.ends, c.tellEnds = cfg.Ends, cfg.TellEnds
	c.over = make(chan struct{})
	c.out.init(cfg.Blocks, turns)
	c.in.init()
}

var (
	_ net.Conn        = (*Conn)(nil)
	_ tunnel.Resetter = (*Conn)(nil)
	_ io.ReaderFrom   = (*Conn)(nil)
	_ io.WriterTo     = (*Conn)(nil)
)

func (c *Conn) LocalAddr() net.Addr  { return c.local }
func (c *Conn) RemoteAddr() net.Addr { return c.remote }

// Answered reports whether the last bytes of the conn came from the other side, and WriteTo has written
// them, and no bytes of this side wait to be sent. If so, the target has probably answered all that the caller has
// sent. moved changes with each byte of either direction. At the end that has the target, ok is always false.
func (c *Conn) Answered() (moved int64, ok bool) {
	// A send first resets answered, and then unsent: so unsent is read first.
	return c.moved.Load(), c.unsent.Load() == 0 && c.answered.Load()
}

// moves notes n bytes of either direction, for Answered. The order matters to WriteTo.
func (c *Conn) moves(n int) {
	c.moved.Add(int64(n))
	c.answered.Store(false)
}

// Ends returns Config.Ends, for Splice.
func (c *Conn) Ends() *tunnel.GraceEnd { return c.ends }

// TellEnds tells the other side that the conn is reset after left, for Splice.
func (c *Conn) TellEnds(left time.Duration) {
	if c.tellEnds != nil {
		c.tellEnds(left)
	}
}

// SetDeadline sets both deadlines.
func (c *Conn) SetDeadline(t time.Time) error {
	c.in.deadline.set(t)
	c.out.deadline.set(t)
	return nil
}

// SetReadDeadline sets when a Read gives up.
func (c *Conn) SetReadDeadline(t time.Time) error {
	c.in.deadline.set(t)
	return nil
}

// SetWriteDeadline sets when a Write gives up.
func (c *Conn) SetWriteDeadline(t time.Time) error {
	c.out.deadline.set(t)
	return nil
}

// Close ends both directions and returns at once. Bytes that were written before still arrive. The conn
// discards bytes that it receives afterwards.
func (c *Conn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.endWriteLocked(net.ErrClosed) {
		c.startSenderLocked()
	}
	c.endReadLocked()
	return nil
}

// Reset aborts the conn: the other side sees a reset.
func (c *Conn) Reset() error {
	c.end(tunnel.ErrReset)
	return nil
}

// OnReset calls f when the conn is aborted, at once if it already is.
func (c *Conn) OnReset(f func()) {
	c.mu.Lock()
	if !tunnel.IsClosed(c.over) {
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

// bothEndedLocked reports whether both directions have ended cleanly: not while a ResetBehind is under way.
func (c *Conn) bothEndedLocked() bool {
	out := c.out.fin == noticeSent || c.out.stopGot
	in := c.in.finGot || c.in.stop == noticeSent
	return out && in && c.out.reset == noticeNone
}

// end ends the conn: cleanly when err is nil, else by a reset. Only the first call counts.
func (c *Conn) end(err error) {
	c.mu.Lock()
	if tunnel.IsClosed(c.over) {
		c.mu.Unlock()
		return
	}
	c.err = err
	if !tunnel.IsClosed(c.out.done) {
		c.out.err = err
		if err == nil {
			c.out.err = syscall.EPIPE
		}
		close(c.out.done)
	}
	close(c.over)
	for _, t := range []*time.Timer{c.in.rest, c.out.resetLate} {
		if t != nil {
			t.Stop()
		}
	}
	callbacks := c.onReset
	c.onReset = nil
	c.goroutines++ // this call counts as a goroutine, so that gone is called after ended
	c.mu.Unlock()

	c.out.flow.leave()
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
func (c *Conn) oneLess() {
	c.mu.Lock()
	c.goroutines--
	last := c.goroutines == 0 && tunnel.IsClosed(c.over)
	c.mu.Unlock()
	if last {
		c.gone()
	}
}

// goLocked runs f in a goroutine that gone waits for. Once the conn is over, it starts no goroutine. A
// panic ends this conn and no other. The caller holds mu.
func (c *Conn) goLocked(f func()) {
	if tunnel.IsClosed(c.over) {
		return
	}
	c.goroutines++
	go func() {
		if err := tunnel.Guard(c.log, c.counters, "the conn ends", func() error { f(); return nil }); err != nil {
			c.end(tunnel.ErrReset)
		}
		c.oneLess()
	}()
}

// opError wraps err as the net package does, so that callers find TCP's errors: timeouts,
// net.ErrClosed, ECONNRESET, EPIPE.
func (c *Conn) opError(op string, err error) error {
	return &net.OpError{Op: op, Net: c.local.Network(), Source: c.local, Addr: c.remote, Err: err}
}

// errTimeout is the error of an expired deadline: its Timeout method returns true.
var errTimeout = os.ErrDeadlineExceeded

// receiveError handles the error of way.RecvMsg.
//
// At the edge, io.EOF is the cloud's OK: a clean end if both directions have ended. A fin or stop that is
// due counts as sent, because the cloud may answer our fin before our SendMsg has returned. At the cloud,
// io.EOF is fine if the edge's direction has ended; where way.eofEndsBoth returns true, both must have
// ended. finish then ends the conn. Any other error is a reset, and so is an io.EOF that comes too early:
// bytes may be missing.
func (c *Conn) receiveError(err error) {
	c.mu.Lock()
	inputEnded := c.in.finGot || c.in.stop != noticeNone
	clean := inputEnded && (c.out.fin != noticeNone || c.out.stopGot)
	c.mu.Unlock()
	switch eof := errors.Is(err, io.EOF); {
	case eof && c.isEdge && clean:
		c.end(nil)
	case eof && !c.isEdge && (clean || inputEnded && !c.way.eofEndsBoth()):
	default:
		if !c.isEdge && status.Code(err) == codes.ResourceExhausted { // gRPC itself rejects a message that is too long
			c.counters.Limited(tunnel.LimitMessage)
		}
		c.EndedByPeer()
	}
}

// Watch resets the conn when ctx is done. stop ends the watch.
func (c *Conn) Watch(ctx context.Context) (stop func() bool) {
	return context.AfterFunc(ctx, c.EndedByPeer)
}

// EndedByPeer ends the conn by a reset, because the other side has ended the conn, or says that it has.
func (c *Conn) EndedByPeer() {
	c.mu.Lock()
	c.out.resetTaken = c.out.reset == noticeSent
	c.mu.Unlock()
	c.end(tunnel.ErrReset)
}

// MustCancel reports whether a conn that ended by a reset needs a cancel on the control stream,
// which also reaches a peer that does not read the conn.
func (c *Conn) MustCancel() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.out.resetTaken
}

// Abort ends the conn by a reset, because its session has ended or the peer has cancelled it.
func (c *Conn) Abort() { c.end(tunnel.ErrReset) }

// Done returns a channel that is closed when the conn is over.
func (c *Conn) Done() <-chan struct{} { return c.over }

// Err returns why the conn is over, nil for a clean end. Done says when it is.
func (c *Conn) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}
