// Package conn is one forwarded connection: a net.Conn whose other end is in another process, at the
// other end of a session between an edge and the cloud. Conn behaves like a TCP connection, with
// half-closes, deadlines and resets.
//
// A conn goes by one of two ways, and does not know which: an HTTP/2 stream of its own (OverStream),
// or a data connection, which is a TLS connection that carries one conn after the other
// (OverLease).
//
// Where things are: conn.go is the conn's life, send.go and recv.go its two directions, way.go what it
// needs of its way; chunk.go is the wire format of its chunks, and the gRPC codec for them; data.go
// and lease.go are the data connection; turns.go shares one connection among many streams.
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
// with no lock held but Conn.sendMu, and may take session.mu. So nobody who holds session.mu may call
// a method of Conn that ends or sends.
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

// Conn is one end of a forwarded connection: a net.Conn over a way. It behaves like a TCP connection: each
// direction ends by itself (fin), a side that takes no more bytes says so (stop), and an abort shows
// as a reset.
//
// A direction has ended when its sender has sent fin or its receiver has said stop. When both have,
// the cloud's handler returns OK, which ends the stream; over a data connection see flagEnd. Until
// then somebody receives: Read's goroutine, WriteTo, or a goroutine that throws away what arrives
// after the direction's end (way.pauseAfterFin). So no stop is missed, and no sender hangs on flow
// control for a conn that nobody reads any more.
//
// gRPC frees a SendMsg that waits for flow control only when the stream ends. So nothing that must
// not block calls it: Write hands its bytes to the sender goroutine, and small writes that come while
// that is busy leave in one chunk. ReadFrom and WriteTo, which Splice uses, do without the goroutines,
// and so does a fin where way.sendsAtOnce.
type Conn struct {
	// Set once.
	way      way
	ended    func(err error) // see Config.Ended
	isEdge   bool
	asked    bool // see Config.Asked
	ordered  bool // see Config.Ordered
	blocks   *Blocks
	counters *tunnel.Counters
	traffic  *tunnel.Traffic // of the session; nil: not counted
	log      *slog.Logger
	local    Addr
	remote   Addr
	gone     func() // see Config.Gone

	moved    atomic.Int64 // see Answered
	answered atomic.Bool  // see Answered

	over chan struct{} // closed when the conn is to end, or has ended; then err is set
	out  sendHalf
	in   recvHalf

	mu         sync.Mutex // guards the following, and what the halves say; never held while waiting
	goroutines int        // of the conn, and callers that Gone waits for as for one
	err        error      // why the conn is over; nil for a clean end
	onReset    []func()   // called when the conn is aborted
}

// notice is the state of something that this side tells the other side once.
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
	// Ended is called once when the conn is over, with nil for a clean end: the owner's part of the
	// end. It must not wait.
	Ended func(err error)
	// Gone is called once, after Ended, when the conn is over and none of its goroutines is left. It
	// must not wait.
	Gone func()
}

// OverStream returns one end of a conn over an HTTP/2 stream. turns are those of the connection that
// the stream is on; nil: nobody waits for a turn.
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
// them: so far, an answer has followed each request. moved counts the bytes of both directions. At the
// end that has the target, Answered is always false.
func (c *Conn) Answered() (moved int64, ok bool) { return c.moved.Load(), c.answered.Load() }

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

// Close ends both directions and returns at once. Bytes that were written before still arrive; bytes
// that come afterwards are thrown away.
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

// bothEndedLocked reports whether both directions have ended.
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
	c.goroutines++ // as if this call were one: gone comes after ended
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

// goLocked runs f in a goroutine that gone waits for; caller holds mu. It starts nothing once the
// conn is over. A panic ends this conn and no other.
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

// receiveError takes the error of way.RecvMsg.
//
// At the edge io.EOF is the cloud's OK: a clean end if both directions have ended. Notices that are
// due count as much as sent ones: the cloud may answer our fin before our SendMsg has returned. At the
// cloud io.EOF is fine when the edge's direction has ended, or both where way.eofEndsBoth; the conn
// itself ends in finish. Everything else is a reset. So is an end that comes too early: bytes may be
// missing.
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
		if !c.isEdge && status.Code(err) == codes.ResourceExhausted { // gRPC's own
			c.counters.Limited(tunnel.LimitMessage)
		}
		c.EndedByPeer()
	}
}

// Watch ends the conn by a reset when ctx is done. stop stops watching.
func (c *Conn) Watch(ctx context.Context) (stop func() bool) {
	return context.AfterFunc(ctx, c.EndedByPeer)
}

// EndedByPeer ends the conn by a reset, because the other side has ended it or says so.
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
