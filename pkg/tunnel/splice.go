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
// was lost. Bytes that were in flight may be missing. It is ECONNRESET, so callers that
// handle TCP resets handle it, too.
const ErrReset = syscall.ECONNRESET

// copySize is the buffer size, in bytes, for conns without a faster way to copy: two TLS
// records.
const copySize = 32 << 10

// Splice copies between a and b in both directions, as if they were one TCP connection, and closes
// both. It returns when both directions have ended:
//
//   - when a's bytes end, Splice closes b's write side (half-close), and the other way round;
//   - when one side is reset, Splice resets the other, behind the bytes that arrived before the
//     reset; so it does for any other error by which the kernel abandons a connection;
//   - when b takes no more bytes, Splice shuts down reading from a (CloseRead), and b's
//     remaining bytes still reach a.
//
// If ctx ends first, Splice resets both. If this process or that at the other end of the tunnel is about to stop, and
// so to reset them, Splice resets them before, at a quiet moment: see watchdog.look. b is the target. If this process
// dies, the kernel resets both: see ResetOnDeath. err says why a direction ended early; nil: both ended cleanly.
func Splice(ctx context.Context, a, b net.Conn) (aToB, bToA int64, err error) {
	resetBoth := func() {
		Reset(a)
		Reset(b)
	}
	stop := context.AfterFunc(ctx, resetBoth)
	ResetOnDeath(a)
	ResetOnDeath(b)
	// One direction of a conn may have ended cleanly, so that nothing reads the conn when a reset
	// arrives.
	onReset(a, func() { Reset(b) })
	onReset(b, func() { Reset(a) })

	var errAB, errBA error
	var wg sync.WaitGroup
	dog := &watchdog{resetBoth: resetBoth}
	dog.ends[0], _ = ctx.Value(graceKey{}).(*GraceEnd)
	dog.target, _ = b.(answerer)
	if target, ok := b.(interface{ Ends() *GraceEnd }); ok {
		dog.ends[1] = target.Ends()
	}
	dog.caller, _ = a.(endsTeller)
	ab, ba := newDirection(a, dog), newDirection(b, dog)
	// A direction that waits for a silent source learns only by this callback that its
	// destination takes no more bytes.
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

	// Closing loses no bytes now, since both directions have ended. From here on, the end of ctx
	// must not reset either conn.
	stop()
	panicked.again()
	closeCleanly(a, ab.stopped.Load())
	closeCleanly(b, ba.stopped.Load())
	return aToB, bToA, errors.Join(errAB, errBA)
}

// abort resets both conns after a panic in the half of d.
func abort(a, b net.Conn, d *direction) {
	Reset(a)
	Reset(b)
	if !IsClosed(d.done) {
		d.end(nil, ErrReset)
	}
}

// ResetOnDeath makes the kernel reset c if this process is killed. By default the kernel
// would close c cleanly, and a peer could take half an answer for a complete one. Splice
// calls ResetOnDeath. Call it also for a conn that waits to be spliced.
func ResetOnDeath(c net.Conn) {
	if l, ok := c.(lingerer); ok {
		l.SetLinger(0) // it fails only if c has ended: nothing can be cut off then
	}
}

// lingerer is a *net.TCPConn, or a type that embeds one.
type lingerer interface{ SetLinger(sec int) error }

// closeCleanly undoes ResetOnDeath, which would turn the close into a reset, and closes c.
//
// unwanted: the peer of c may still be sending bytes that nothing reads. Then a close should
// send a reset (RFC 9293 section 3.10.4), but Linux sends one only if unread bytes are in the
// socket. Without a reset, a peer that waits for window space would wait for a minute. So if the
// peer has acknowledged all bytes, closeCleanly does not undo ResetOnDeath.
func closeCleanly(c net.Conn, unwanted bool) {
	if l, ok := c.(lingerer); ok && !(unwanted && allAcked(c, ackTime)) {
		l.SetLinger(-1)
	}
	c.Close()
}

const (
	// ackTime is how long a clean close waits at most for the peer to acknowledge all bytes.
	ackTime = 100 * time.Millisecond
	// resetTime is how long a reset waits at most for the bytes that were sent before it.
	resetTime = time.Second
	// lookInterval is how often Splice asks the kernel about connections that no goroutine may
	// be reading.
	lookInterval = 5 * time.Second
	// quietInterval replaces lookInterval while Splice looks for a quiet moment.
	quietInterval = 100 * time.Millisecond
)

// allAcked waits at most limit until the peer of socket c has acknowledged all bytes written to
// c, and reports whether it has.
func allAcked(c net.Conn, limit time.Duration) bool {
	raw := rawConn(c)
	if raw == nil || c.LocalAddr().Network() == "unix" { // closing a unix socket takes no bytes from the peer
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

// direction is one half of a splice: the copying from one conn to the other. It tells the other
// half how this half has ended.
type direction struct {
	src    syscall.RawConn // the socket that the half reads; nil: the source is not a socket; set once
	dog    *watchdog       // shared by both directions; set once
	done   chan struct{}   // end closes it when the half stops copying; nothing is sent
	passed chan struct{}   // half closes it after it passed on a clean end; nothing is sent
	rerr   error           // why reading failed; other goroutines read it after done is closed
	werr   error           // why writing failed; other goroutines read it after done is closed

	stopped atomic.Bool  // the destination takes no more bytes; any goroutine may set it
	reads   atomic.Int64 // how often src was read; the watchdog looks at this count
	srcLost bool         // the kernel has abandoned src; guarded by watchdog.mu

	mu   sync.Mutex // guards then
	then func()     // called once, after done is closed; nil: nothing to call
}

func newDirection(src net.Conn, dog *watchdog) *direction {
	return &direction{src: rawConn(src), dog: dog, done: make(chan struct{}), passed: make(chan struct{})}
}

// end records how the half ended, and calls the function that afterwards has set.
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

// copiedAll reports whether the half has ended after it copied all bytes of its source.
func (d *direction) copiedAll() bool { return IsClosed(d.done) && d.rerr == nil && d.werr == nil }

// afterwards calls f when the half has stopped copying, or at once if it already has. It may be
// used only once per direction.
func (d *direction) afterwards(f func()) {
	d.mu.Lock()
	ended := IsClosed(d.done)
	if !ended {
		d.then = f
	}
	d.mu.Unlock()
	if ended {
		f()
	}
}

// stop ends the direction, since its destination takes no more bytes of src.
func (d *direction) stop(src net.Conn) {
	d.stopped.Store(true)
	if !closeRead(src) {
		src.SetReadDeadline(time.Unix(1, 0))
	}
}

// half copies src to dst until one of them ends, and passes that end on to the other conn. own
// is this direction, back the opposite one.
func half(dst, src net.Conn, own, back *direction) (n int64, err error) {
	n, rerr, werr := transfer(dst, src, &own.reads)
	if own.stopped.Load() && werr == nil && (!isLost(rerr) || back.copiedAll()) {
		// stop made the read fail or end, so the error says nothing about the source. Even a reset
		// may come from our own kernel: it resets a connection whose peer continues to send after
		// both directions were shut down here (RFC 1122 section 4.2.2.13).
		rerr, werr = nil, syscall.EPIPE
	}
	if isLost(werr) {
		// The opposite direction, back, still reads the bytes that dst sent before dst was lost.
		// Then back resets src behind these bytes.
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
		if isLost(closeWrite(dst)) { // TLS writes a close_notify here; that write may get the kernel's error
			back.dog.lose(back)
		}
		close(own.passed)
		watch(src, dst, back)
		return n, nil
	}
}

// watch waits until back has ended. Meanwhile it watches src, whose bytes have ended so
// that no goroutine reads it. If the peer resets src, no peer is left to take the bytes of
// back. back may be waiting for a silent dst, so watch then stops back.
func watch(src, dst net.Conn, back *direction) {
	raw := rawConn(src)
	if raw == nil || IsClosed(back.done) {
		return
	}
	back.afterwards(func() {
		src.SetReadDeadline(time.Unix(1, 0))
	})
	if raw.Read(hungUp) == nil {
		back.stop(dst)
	}
	<-back.done
}

// endedByLoss reports whether src was lost (a reset, a timeout, a host that cannot be reached)
// although a read of src returned a clean end. The kernel reports the error of a lost connection
// only once. If a write of the other half gets the error, the next read returns a clean end, and
// a cut-off upload would look complete. EPIPE is no loss: the peer sent its FIN before the reset
// (tcp_reset in net/ipv4/tcp_input.c).
func endedByLoss(src net.Conn, own, back *direction) bool {
	if !IsClosed(back.passed) && own.src != nil && src.LocalAddr().Network() != "unix" {
		over, failed := pollHangUp(own.src)
		if failed {
			return false // the error is not reported yet, so the read saw a FIN
		}
		if over { // a write of the other half may have got the error: then that half is about to end
			// It waits in two halves: after a process was off the processor for long, its other goroutines get a turn.
			late, again := time.NewTimer(resetTime/2), true
			defer late.Stop()
			for _, c := range []chan struct{}{back.done, back.passed} {
				if IsClosed(back.done) && !back.copiedAll() {
					break // back has got an error, and will not pass on a clean end
				}
				for ended := false; !ended; {
					select {
					case <-c:
						ended = true
					case <-late.C:
						if !again {
							return own.dog.hasLost(own)
						}
						again = false
						late.Reset(resetTime / 2)
					}
				}
			}
		}
	}
	return own.dog.hasLost(own)
}

// isLost reports whether err means that the kernel has abandoned a connection: ECONNRESET,
// ETIMEDOUT, EHOSTUNREACH, ENETUNREACH, ECONNABORTED and the like. EPIPE says only that this
// side can no longer write.
func isLost(err error) bool {
	errno, ok := errors.AsType[syscall.Errno](err)
	return ok && errno != syscall.EPIPE
}

// watchdog records which connections of a Splice are lost. While a half waits in a write, no
// goroutine reads its source, so the watchdog asks the kernel about both sockets every
// lookInterval.
type watchdog struct {
	resetBoth func()       // set once
	caller    endsTeller   // nil: the caller's conn is not one of the tunnel; set once
	target    answerer     // nil: the target's conn is not one of the tunnel; set once
	ends      [2]*GraceEnd // when this process and that at the other end of target reset the conns; set once
	both      []*direction // set by start, before any other call

	mu       sync.Mutex  // guards the following and direction.srcLost
	check    *time.Timer // calls look; nil: there is nothing to look at
	deadline *time.Timer // calls expire; nil until a connection is lost
	reads    int64       // result of readsLocked when deadline was last set
	doubted  bool        // expire has found no new reads, and looks once more
	stopped  bool        // Splice is about to return

	told       time.Time // the end that caller was told last
	moved      int64     // the number that target.Answered returned last
	quietSince time.Time // when look first saw moved; zero: look has not asked yet
}

// answerer is a conn of the tunnel to the target. Answered returns a number that changes with each byte that the conn
// sends or receives. ok is true if the last of them came from the target, and were handed on. Such a conn may have a
// method Ends: when the process at its other end resets it, as that process has said; nil: it never says so.
type answerer interface{ Answered() (moved int64, ok bool) }

// endsTeller is a conn of the tunnel whose other end has the caller. TellEnds tells the other end that the conn is
// reset after left.
type endsTeller interface{ TellEnds(left time.Duration) }

func (w *watchdog) start(both ...*direction) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.both = both
	if w.target != nil || w.caller != nil || slices.ContainsFunc(both, func(d *direction) bool { return d.src != nil }) {
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

// look asks the kernel whether either socket is lost. It also sees whether the conns are about to be reset, because a
// process stops. Then it looks for a quiet moment, and ends the conns there: at the end of the grace period they would
// be reset perhaps in the middle of an answer. Callers such as kube-apiserver keep conns for later requests, and pass
// half of an answer on as if it were whole. If the caller's conn is one of the tunnel, the process at the other end of
// it is told, and does the same: only where the caller's socket is, the kernel knows which bytes are on their way. Each
// process looks every lookInterval, so over several processes a conn may learn too late, and is reset at the end.
func (w *watchdog) look() {
	tell, quiet := w.lookAgain()
	if !tell.IsZero() {
		w.caller.TellEnds(time.Until(tell))
	}
	if quiet {
		w.resetBoth()
	}
}

// lookAgain is look, but returns what is to be done. tell: tell the caller's end that the conns are reset at that time;
// zero: do not. quiet: end the conns. Conns are quiet if the caller has all bytes of the target, and neither side has
// sent a byte for a quarter of the time that is left.
func (w *watchdog) lookAgain() (tell time.Time, quiet bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.stopped {
		return tell, false
	}
	for _, d := range w.both {
		if d.src != nil && isLost(pendingError(d.src)) {
			w.loseLocked(d)
		}
	}
	now, next := time.Now(), lookInterval
	switch at := w.endsAt(now); {
	case at.IsZero():
	case w.caller != nil:
		if at != w.told {
			w.told, tell = at, at
		}
	case w.target != nil && at.Sub(now) <= quietTime:
		next = quietInterval
		inFlight := w.inFlightLocked() // first: bytes that leave the kernel now are seen by Answered
		moved, answered := w.target.Answered()
		if inFlight || w.quietSince.IsZero() || moved != w.moved || !answered {
			w.moved, w.quietSince = moved, now
		}
		quiet = now.Sub(w.quietSince) >= at.Sub(now)/4
	}
	w.check.Reset(next)
	return tell, quiet
}

// endsAt returns when the conns are reset; zero: no process is about to stop, or it should have reset them already.
func (w *watchdog) endsAt(now time.Time) (first time.Time) {
	for _, end := range w.ends {
		if at := end.time(); at.After(now) && (first.IsZero() || at.Before(first)) {
			first = at
		}
	}
	return first
}

// inFlightLocked reports whether bytes of either socket are on their way, such as a request for which this process has
// not had the processor yet. The caller holds mu.
func (w *watchdog) inFlightLocked() (some bool) {
	for _, d := range w.both {
		if d.src != nil {
			_ = d.src.Control(func(fd uintptr) { some = some || inFlight(fd) }) // a closed socket has no such bytes
		}
	}
	return some
}

// lose records that the kernel has abandoned the source of d.
func (w *watchdog) lose(d *direction) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.loseLocked(d)
}

// loseLocked records the loss and starts the deadline for passing it on, behind the bytes that
// came before it. The deadline is needed because a half that waits for a peer that does not read
// cannot pass the loss on. The caller holds mu.
func (w *watchdog) loseLocked(d *direction) {
	d.srcLost = true
	if w.deadline == nil && !w.stopped {
		w.reads = w.readsLocked()
		w.deadline = time.AfterFunc(resetTime, w.expire)
	}
}

// expire resets both connections if no bytes of a lost one were read for resetTime. Otherwise it
// extends the deadline. It looks twice, since this process may have been paused before the next read.
func (w *watchdog) expire() {
	w.mu.Lock()
	reads := w.readsLocked()
	moves := reads != w.reads
	stalls := !moves && w.doubted
	w.reads, w.doubted = reads, !moves
	switch {
	case w.stopped, stalls:
	case moves:
		w.deadline.Reset(resetTime)
	default:
		w.deadline.Reset(resetTime / 10)
	}
	w.mu.Unlock()
	if stalls {
		w.resetBoth()
	}
}

// readsLocked returns how often both directions have read from sources that the kernel has abandoned. The caller
// holds mu.
func (w *watchdog) readsLocked() (n int64) {
	for _, d := range w.both {
		if d.srcLost {
			n += d.reads.Load()
		}
	}
	return n
}

// hasLost reports whether the kernel has abandoned the source of d.
func (w *watchdog) hasLost(d *direction) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return d.srcLost
}

// transfer copies src to dst. If src or dst is a tunnel conn, it uses that conn's own
// copy loop. It returns read errors and write errors separately.
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
	sender, ok := dst.(trySender)
	if from, takes := src.(messageSource); ok && takes {
		from.SetTrySend(sender.TrySend)
		defer from.SetTrySend(nil)
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

// messageSource is a conn whose Read returns messages that other goroutines have queued. While no message waits in the
// queue, those goroutines may send one themselves, by the function that SetTrySend gives them. That is faster than to
// wake the goroutine that reads.
type messageSource interface {
	// SetTrySend sets the function; nil: every message goes through the queue.
	SetTrySend(try func(head, body []byte) bool)
}

// trySender is a conn that can say whether it sends a message at once, see [conn.Conn.TrySend].
type trySender interface {
	TrySend(head, body []byte) bool
}

// reader counts reads and keeps the error of a read, so that transfer does not take it for the
// error of a write.
type reader struct {
	r     io.Reader
	reads *atomic.Int64 // direction.reads
	err   error         // the error of a read; nil: no error, or io.EOF
}

func (r *reader) Read(p []byte) (int, error) {
	n, err := r.r.Read(p)
	r.reads.Add(1)
	if err != nil && err != io.EOF {
		r.err = err
	}
	return n, err
}

// isWriteError reports whether err is from a write to a socket of the operating system.
func isWriteError(err error) bool {
	op, ok := errors.AsType[*net.OpError](err)
	return ok && (op.Op == "write" || op.Op == "writev")
}

// Resetter is a conn that can be aborted so that its peer sees a reset.
type Resetter interface {
	// Reset aborts both directions. Bytes that were written before may be lost.
	Reset() error
}

// Reset aborts c. The peer sees a reset if c can send one, else a close.
func Reset(c net.Conn) {
	switch c := c.(type) {
	case Resetter:
		c.Reset() // c is not used any more
	case lingerer:
		c.SetLinger(0)
		c.(net.Conn).Close()
	case interface{ NetConn() net.Conn }: // *tls.Conn
		// Close of a TLS connection would report a clean end to the peer, and it would wait for a
		// peer that does not read.
		Reset(c.NetConn())
	default:
		c.Close()
	}
}

// ResetBehind aborts c after the bytes that were written to c have arrived. It waits for these
// bytes for resetTime at most.
func ResetBehind(c net.Conn) {
	if r, ok := c.(interface{ ResetBehind() }); ok {
		r.ResetBehind()
		return
	}
	allAcked(c, resetTime)
	Reset(c)
}

// onReset makes a tunnel conn c call f when c is aborted. For other conns it does nothing.
func onReset(c net.Conn, f func()) {
	if r, ok := c.(interface{ OnReset(f func()) }); ok {
		r.OnReset(f)
	}
}

// onStop makes a tunnel conn c call f when its peer takes no more bytes. For other conns it does nothing.
func onStop(c net.Conn, f func()) {
	if s, ok := c.(interface{ OnStop(f func()) }); ok {
		s.OnStop(f)
	}
}

// closeWrite closes the write side of c, or all of c if c cannot half-close.
func closeWrite(c net.Conn) error {
	if cw, ok := c.(interface{ CloseWrite() error }); ok {
		return cw.CloseWrite()
	}
	return c.Close()
}

// closeRead shuts down reading from c. It returns false if c cannot do that.
func closeRead(c net.Conn) bool {
	cr, ok := c.(interface{ CloseRead() error })
	if ok {
		cr.CloseRead()
	}
	return ok
}
