package tunnel

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// ErrReset is the read error of a conn that the other end aborted, or whose session
// was lost: what was in flight may be missing. It is ECONNRESET, so that callers
// who know TCP need not know the tunnel.
const ErrReset = syscall.ECONNRESET

// copySize is how much one read takes on the way from a conn that has no faster way:
// two TLS records.
const copySize = 32 << 10

// Splice copies between a and b, both ways at once, as if they were one TCP
// connection, and closes both. It returns when both directions have ended:
//
//   - the end of a's bytes closes b's write side (half-close), and the other way round;
//   - a reset of one resets the other, behind the bytes that arrived before it; the same goes
//     for any other error by which the kernel gives a connection up;
//   - when b takes no more bytes, a is told so (CloseRead) and b's remaining bytes
//     still reach a.
//
// When ctx ends first, both are reset, and so they are when this process dies: see
// ResetOnDeath. err is why a direction ended before its time.
func Splice(ctx context.Context, a, b net.Conn) (aToB, bToA int64, err error) {
	resetBoth := func() {
		Reset(a)
		Reset(b)
	}
	stop := context.AfterFunc(ctx, resetBoth)
	ResetOnDeath(a)
	ResetOnDeath(b)
	// Half of a conn may have ended cleanly, and nobody be reading it, when a reset comes.
	onReset(a, func() { Reset(b) })
	onReset(b, func() { Reset(a) })

	var errAB, errBA error
	var wg sync.WaitGroup
	ab, ba := newDirection(), newDirection()
	// A direction that waits for a silent source learns only here that its bytes are unwanted.
	onStop(b, func() { ab.stop(a) })
	onStop(a, func() { ba.stop(b) })
	w := watchdog{a: rawConn(a), b: rawConn(b), ab: ab, ba: ba, resetBoth: resetBoth}
	w.start()
	var panicked panics
	wg.Go(func() {
		defer panicked.catch(func() { abort(a, b, ab) })
		aToB, errAB = half(b, a, ab, ba)
	})
	func() {
		defer panicked.catch(func() { abort(a, b, ba) })
		bToA, errBA = half(a, b, ba, ab)
	}()
	wg.Wait()
	w.stop()

	// Neither close can lose bytes: both directions have ended. Nor may the end of ctx.
	stop()
	panicked.again()
	closeCleanly(a, ab.stopped.Load())
	closeCleanly(b, ba.stopped.Load())
	return aToB, bToA, errors.Join(errAB, errBA)
}

// abort resets both ends after a panic in the half of d.
func abort(a, b net.Conn, d *direction) {
	Reset(a)
	Reset(b)
	if !isClosed(d.done) {
		d.end(nil, ErrReset)
	}
}

// ResetOnDeath makes the kernel reset c when it closes it because this process has
// been killed. By itself it would end c as if nothing were missing, and half an
// answer would look like a whole one. Splice does this; a conn that waits to be
// spliced is in the same danger.
func ResetOnDeath(c net.Conn) {
	if l, ok := c.(lingerer); ok {
		l.SetLinger(0) //nolint:errcheck // then c has ended, and nothing can be cut off
	}
}

// lingerer is a *net.TCPConn, alone or as part of something else.
type lingerer interface{ SetLinger(sec int) error }

// closeCleanly undoes ResetOnDeath, which would make the close a reset, and closes c. With
// unwanted, c's peer may still be sending, to nobody: then a reset is what a close should
// be (RFC 9293 section 3.10.4), and Linux makes it one only if something unread lies
// there. A sender that waits for a window would wait for a minute.
func closeCleanly(c net.Conn, unwanted bool) {
	if l, ok := c.(lingerer); ok && !(unwanted && allAcked(c, ackTime)) {
		l.SetLinger(-1) //nolint:errcheck // c has ended, and Close says so
	}
	c.Close()
}

const (
	// ackTime is how long a clean close waits until the peer has acknowledged everything.
	ackTime = 100 * time.Millisecond
	// resetTime is how long a reset waits behind the bytes that were sent before it.
	resetTime = time.Second
	// lookInterval is how often Splice looks at connections that nobody may be reading.
	lookInterval = 5 * time.Second
)

// allAcked waits until the peer of a socket has acknowledged everything that was written to
// it, and reports whether it has.
func allAcked(c net.Conn, limit time.Duration) bool {
	raw := rawConn(c)
	if raw == nil {
		return false
	}
	late := time.Now().Add(limit)
	for pause := time.Millisecond; ; pause = min(2*pause, 16*time.Millisecond) {
		left := -1
		if err := raw.Control(func(fd uintptr) { left = unacked(fd) }); err != nil {
			return false
		}
		if left <= 0 || time.Now().After(late) {
			return left == 0
		}
		time.Sleep(pause)
	}
}

// direction is how one half of a splice has ended, for the other half to see.
type direction struct {
	done    chan struct{} // closed when the half copies no more
	rerr    error         // why it could not read; read after done
	werr    error         // why it could not write; likewise
	stopped atomic.Bool   // its bytes are not wanted any more
	srcLost atomic.Bool   // the kernel has given its source up; whoever learns of it says so here
	lost    func()        // called when srcLost is set; set by watchdog.start

	mu   sync.Mutex // guards then
	then func()     // called after done
}

func newDirection() *direction { return &direction{done: make(chan struct{})} }

// end says that the half copies no more.
func (d *direction) end(rerr, werr error) {
	d.rerr, d.werr = rerr, werr
	close(d.done)
	d.mu.Lock()
	then := d.then
	d.mu.Unlock()
	if then != nil {
		then()
	}
}

// copiedAll reports whether the half has, to its source's end.
func (d *direction) copiedAll() bool { return isClosed(d.done) && d.rerr == nil && d.werr == nil }

// afterwards calls f when the half copies no more. It is called once.
func (d *direction) afterwards(f func()) {
	d.mu.Lock()
	ended := isClosed(d.done)
	if !ended {
		d.then = f
	}
	d.mu.Unlock()
	if ended {
		f()
	}
}

// stop ends the direction: its destination takes no more bytes of src.
func (d *direction) stop(src net.Conn) {
	d.stopped.Store(true)
	if !closeRead(src) {
		src.SetReadDeadline(time.Unix(1, 0)) //nolint:errcheck // src has ended, then
	}
}

// half copies src to dst until one of them ends, and passes that end on. own is this
// direction and back the other.
func half(dst, src net.Conn, own, back *direction) (n int64, err error) {
	n, rerr, werr := transfer(dst, src)
	if own.stopped.Load() && werr == nil && (!isLost(rerr) || back.copiedAll()) {
		// The read was made to fail, or to end. Where both directions were shut down here, and the
		// peer goes on, our own kernel makes that a reset (RFC 1122 section 4.2.2.13).
		rerr, werr = nil, syscall.EPIPE
	}
	if isLost(werr) {
		// back reads what dst had sent before it was lost. It then resets src behind those bytes.
		back.setSrcLost()
	}
	own.end(rerr, werr)
	if rerr == nil && werr == nil && endedByLoss(src, own, back) {
		rerr = ErrReset
	}
	switch {
	case rerr != nil:
		Reset(src)
		ResetBehind(dst)
		return n, rerr
	case werr != nil:
		closeRead(src)
		return n, werr
	default:
		closeWrite(dst)
		watch(src, dst, back)
		return n, nil
	}
}

// watch waits until back has ended. Meanwhile it looks after src, whose bytes have
// ended and which nobody reads any more: when its peer resets it, nobody is left to
// take back's bytes, and back may be waiting for a silent dst.
func watch(src, dst net.Conn, back *direction) {
	raw := rawConn(src)
	if raw == nil || isClosed(back.done) {
		return
	}
	back.afterwards(func() {
		src.SetReadDeadline(time.Unix(1, 0)) //nolint:errcheck // then src has ended, and Read says so
	})
	if raw.Read(hungUp) == nil {
		back.stop(dst)
	}
	<-back.done
}

// endedByLoss tells the end of src's bytes from the loss of src: a reset, a timeout, a host
// that cannot be reached. The kernel tells such an error once. When a write of the other half
// gets it, a read sees a clean end, and a cut-off upload would look complete. A write that
// fails with EPIPE is none: the peer had closed properly before (tcp_reset in
// net/ipv4/tcp_input.c).
func endedByLoss(src net.Conn, own, back *direction) bool {
	if !isClosed(back.done) {
		if !hasHungUp(src) {
			return own.srcLost.Load() // false: half-closed by its peer, no more
		}
		if src.LocalAddr().Network() == "unix" {
			return false // closed by its peer; a reset would have been the read's error
		}
		// If a write got the error, that half is about to end.
		select {
		case <-back.done:
		case <-time.After(resetTime):
		}
	}
	return own.srcLost.Load()
}

// isLost reports whether err is the kernel's word that a connection is lost: ECONNRESET,
// ETIMEDOUT, EHOSTUNREACH, ENETUNREACH, ECONNABORTED and the like. EPIPE says no such thing,
// only that this side can write no more.
func isLost(err error) bool {
	errno, ok := errors.AsType[syscall.Errno](err)
	return ok && errno != syscall.EPIPE
}

// watchdog looks at the connections of a Splice that nobody may be reading, since the half
// that should read waits in a write.
type watchdog struct {
	a, b      syscall.RawConn // nil: no socket
	ab, ba    *direction
	resetBoth func()

	mu    sync.Mutex // guards the following
	timer *time.Timer
	late  *time.Timer // resets both: runs since one of them was lost
	over  bool
}

func (w *watchdog) start() {
	w.ab.lost, w.ba.lost = w.expire, w.expire
	if w.a != nil || w.b != nil {
		w.mu.Lock()
		w.timer = time.AfterFunc(lookInterval, w.look)
		w.mu.Unlock()
	}
}

func (w *watchdog) stop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.over = true
	for _, t := range []*time.Timer{w.timer, w.late} {
		if t != nil {
			t.Stop()
		}
	}
}

// look asks the kernel about both sockets.
func (w *watchdog) look() {
	if w.a != nil && isLost(pendingError(w.a)) {
		w.ab.setSrcLost()
	}
	if w.b != nil && isLost(pendingError(w.b)) {
		w.ba.setSrcLost()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.over {
		w.timer.Reset(lookInterval)
	}
}

// expire gives the halves resetTime to pass the loss of a connection on behind the bytes that
// came before it. A half that waits for a peer which does not read cannot.
func (w *watchdog) expire() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.over && w.late == nil {
		w.late = time.AfterFunc(resetTime, w.resetBoth)
	}
}

// setSrcLost notes that the kernel has given the direction's source up.
func (d *direction) setSrcLost() {
	if !d.srcLost.Swap(true) {
		d.lost()
	}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// hasHungUp reports whether the socket c is over in both directions. It goes past the lock of
// c, because the other half may be waiting in a write.
func hasHungUp(c net.Conn) (is bool) {
	raw := rawConn(c)
	return raw != nil && raw.Control(func(fd uintptr) { is = hungUp(fd) }) == nil && is
}

// transfer copies src to dst, by the tunnel conn's own loop where one of them has
// it, and tells a failed read from a failed write.
func transfer(dst, src net.Conn) (n int64, rerr, werr error) {
	var err error
	if to, ok := src.(interface {
		Resetter
		io.WriterTo
	}); ok {
		n, err = to.WriteTo(dst)
		if errors.Is(err, ErrReset) && !isWriteError(err) {
			return n, err, nil
		}
		return n, nil, err
	}
	from := &reader{r: src}
	if to, ok := dst.(interface {
		Resetter
		io.ReaderFrom
	}); ok {
		n, err = to.ReadFrom(from)
		if from.err != nil {
			return n, from.err, nil
		}
		return n, nil, err
	}
	n, werr = io.CopyBuffer(struct{ io.Writer }{dst}, from, make([]byte, copySize))
	if from.err != nil {
		return n, from.err, nil
	}
	return n, nil, werr
}

// reader remembers the error of a read, so that it is not taken for one of a write.
type reader struct {
	r   io.Reader
	err error
}

func (r *reader) Read(p []byte) (int, error) {
	n, err := r.r.Read(p)
	if err != nil && err != io.EOF {
		r.err = err
	}
	return n, err
}

// isWriteError reports whether err came from writing to an operating system socket.
func isWriteError(err error) bool {
	op, ok := errors.AsType[*net.OpError](err)
	return ok && (op.Op == "write" || op.Op == "writev")
}

// Resetter is a conn that can be aborted so that its peer sees a reset.
type Resetter interface {
	// Reset aborts both directions. What was written may not arrive.
	Reset() error
}

// Reset aborts c: the peer sees a reset where c can do that, else a close.
func Reset(c net.Conn) {
	switch c := c.(type) {
	case Resetter:
		c.Reset() //nolint:errcheck // it is being thrown away
	case lingerer:
		c.SetLinger(0) //nolint:errcheck // likewise
		c.(net.Conn).Close()
	case interface{ NetConn() net.Conn }: // *tls.Conn
		// Its Close would tell the peer of a clean end, and wait for a peer that is stuck.
		Reset(c.NetConn())
	default:
		c.Close()
	}
}

// ResetBehind aborts c behind the bytes that were written to it: the peer gets those first,
// unless it takes them for longer than resetTime.
func ResetBehind(c net.Conn) {
	if r, ok := c.(interface{ ResetBehind() }); ok {
		r.ResetBehind()
		return
	}
	allAcked(c, resetTime)
	Reset(c)
}

// onReset has f called when c, a tunnel conn, is aborted.
func onReset(c net.Conn, f func()) {
	if r, ok := c.(interface{ OnReset(f func()) }); ok {
		r.OnReset(f)
	}
}

// onStop has f called when the peer of c, a tunnel conn, takes no more bytes.
func onStop(c net.Conn, f func()) {
	if s, ok := c.(interface{ OnStop(f func()) }); ok {
		s.OnStop(f)
	}
}

func closeWrite(c net.Conn) {
	if cw, ok := c.(interface{ CloseWrite() error }); ok {
		cw.CloseWrite() //nolint:errcheck // the peer has gone; the other direction will notice
		return
	}
	c.Close()
}

// closeRead returns false when c cannot do that.
func closeRead(c net.Conn) bool {
	cr, ok := c.(interface{ CloseRead() error })
	if ok {
		cr.CloseRead() //nolint:errcheck // the peer has gone; the other direction will notice
	}
	return ok
}
