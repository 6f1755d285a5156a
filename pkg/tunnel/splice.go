package tunnel

import (
	"context"
	"errors"
	"io"
	"net"
	"slices"
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
	dog := &watchdog{resetBoth: resetBoth}
	ab, ba := newDirection(a, dog), newDirection(b, dog)
	// A direction that waits for a silent source learns only here that its bytes are unwanted.
	onStop(b, func() { ab.stop(a) })
	onStop(a, func() { ba.stop(b) })
	dog.start(ab, ba)
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
	dog.stop()

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
	if raw == nil || c.LocalAddr().Network() == "unix" { // a close of a unix socket takes nothing from the peer
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
	src    syscall.RawConn // the socket that the half reads; nil: none
	dog    *watchdog
	done   chan struct{} // closed when the half copies no more
	passed chan struct{} // closed when a clean end has been passed on
	rerr   error         // why it could not read; read after done
	werr   error         // why it could not write; likewise

	stopped atomic.Bool  // its bytes are not wanted any more
	reads   atomic.Int64 // reads of src
	srcLost bool         // the kernel has given src up; guarded by watchdog.mu

	mu   sync.Mutex // guards then
	then func()     // called after done
}

func newDirection(src net.Conn, dog *watchdog) *direction {
	return &direction{src: rawConn(src), dog: dog, done: make(chan struct{}), passed: make(chan struct{})}
}

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
	n, rerr, werr := transfer(dst, src, &own.reads)
	if own.stopped.Load() && werr == nil && (!isLost(rerr) || back.copiedAll()) {
		// The read was made to fail, or to end. Where both directions were shut down here, and the
		// peer goes on, our own kernel makes that a reset (RFC 1122 section 4.2.2.13).
		rerr, werr = nil, syscall.EPIPE
	}
	if isLost(werr) {
		// back reads what dst had sent before it was lost. It then resets src behind those bytes.
		back.dog.lose(back)
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
		if isLost(closeWrite(dst)) { // TLS writes a close_notify, which may be the write that gets the error
			back.dog.lose(back)
		}
		close(own.passed)
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
// gets it, a read sees a clean end, and a cut-off upload would look complete. EPIPE is no loss:
// the peer had sent its FIN before the reset (tcp_reset in net/ipv4/tcp_input.c).
func endedByLoss(src net.Conn, own, back *direction) bool {
	if !isClosed(back.passed) && own.src != nil && src.LocalAddr().Network() != "unix" {
		over, failed := pollHangUp(own.src)
		if failed {
			return false // the error is still there, so the read saw a FIN
		}
		if over { // a write may have taken the error: then that half is about to end
			late := time.NewTimer(resetTime)
			defer late.Stop()
			for _, c := range []chan struct{}{back.done, back.passed} {
				if isClosed(back.done) && !back.copiedAll() {
					break
				}
				select {
				case <-c:
				case <-late.C:
				}
			}
		}
	}
	return own.dog.hasLost(own)
}

// isLost reports whether err means that the kernel has given a connection up: ECONNRESET,
// ETIMEDOUT, EHOSTUNREACH, ENETUNREACH, ECONNABORTED and the like. EPIPE only says that this
// side can write no more.
func isLost(err error) bool {
	errno, ok := errors.AsType[syscall.Errno](err)
	return ok && errno != syscall.EPIPE
}

// watchdog knows which connections of a Splice are lost. Nobody reads a connection while its
// half waits in a write, so the watchdog looks at both from time to time.
type watchdog struct {
	resetBoth func()
	both      []*direction // set by start

	mu       sync.Mutex // guards the following and direction.srcLost
	check    *time.Timer
	deadline *time.Timer // nil until a connection is lost
	reads    int64       // of lost sources when deadline was set
	stopped  bool
}

func (w *watchdog) start(both ...*direction) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.both = both
	if slices.ContainsFunc(both, func(d *direction) bool { return d.src != nil }) {
		w.check = time.AfterFunc(lookInterval, w.look)
	}
}

func (w *watchdog) stop() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.stopped = true
	for _, t := range []*time.Timer{w.check, w.deadline} {
		if t != nil {
			t.Stop()
		}
	}
}

// look asks the kernel about both sockets.
func (w *watchdog) look() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.stopped {
		return
	}
	for _, d := range w.both {
		if d.src != nil && isLost(pendingError(d.src)) {
			w.loseLocked(d)
		}
	}
	w.check.Reset(lookInterval)
}

// lose notes that the kernel has given the source of d up.
func (w *watchdog) lose(d *direction) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.loseLocked(d)
}

// loseLocked starts the deadline by which the loss must have been passed on, behind the bytes
// that came before it. A half that waits for a peer which does not read cannot pass it on.
func (w *watchdog) loseLocked(d *direction) {
	d.srcLost = true
	if w.deadline == nil && !w.stopped {
		w.reads = w.readsLocked()
		w.deadline = time.AfterFunc(resetTime, w.expire)
	}
}

// expire resets both connections if nothing of the lost one was read for resetTime.
func (w *watchdog) expire() {
	w.mu.Lock()
	reads := w.readsLocked()
	moves := reads != w.reads
	w.reads = reads
	if moves && !w.stopped {
		w.deadline.Reset(resetTime)
	}
	w.mu.Unlock()
	if !moves {
		w.resetBoth()
	}
}

func (w *watchdog) readsLocked() (n int64) {
	for _, d := range w.both {
		if d.srcLost {
			n += d.reads.Load()
		}
	}
	return n
}

func (w *watchdog) hasLost(d *direction) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return d.srcLost
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// transfer copies src to dst, by the tunnel conn's own loop where one of them has
// it, and tells a failed read from a failed write.
func transfer(dst, src net.Conn, reads *atomic.Int64) (n int64, rerr, werr error) {
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
	from := &reader{r: src, reads: reads}
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

// reader counts reads, and remembers the error of a read, so that it is not taken for one of a
// write.
type reader struct {
	r     io.Reader
	reads *atomic.Int64
	err   error
}

func (r *reader) Read(p []byte) (int, error) {
	n, err := r.r.Read(p)
	r.reads.Add(1)
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

func closeWrite(c net.Conn) error {
	if cw, ok := c.(interface{ CloseWrite() error }); ok {
		return cw.CloseWrite()
	}
	return c.Close()
}

// closeRead returns false when c cannot do that.
func closeRead(c net.Conn) bool {
	cr, ok := c.(interface{ CloseRead() error })
	if ok {
		cr.CloseRead() //nolint:errcheck // the peer has gone; the other direction will notice
	}
	return ok
}
