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

	"golang.org/x/sys/unix"
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
//   - a reset of one resets the other;
//   - when b takes no more bytes, a is told so (CloseRead) and b's remaining bytes
//     still reach a.
//
// When ctx ends first, both are reset, and so they are when this process dies: see
// ResetOnDeath. err is why a direction ended before its time.
func Splice(ctx context.Context, a, b net.Conn) (aToB, bToA int64, err error) {
	stop := context.AfterFunc(ctx, func() {
		Reset(a)
		Reset(b)
	})
	ResetOnDeath(a)
	ResetOnDeath(b)
	// Half of a conn may have ended cleanly, and nobody be reading it, when a reset comes.
	onReset(a, func() { Reset(b) })
	onReset(b, func() { Reset(a) })

	var errAB, errBA error
	var wg sync.WaitGroup
	ab, ba := newDirection(), newDirection()
	// Who reads from a silent end learns only in this way that its bytes are not wanted.
	onStop(b, func() { ab.stop(a) })
	onStop(a, func() { ba.stop(b) })
	wg.Go(func() { aToB, errAB = half(b, a, ab, ba) })
	bToA, errBA = half(a, b, ba, ab)
	wg.Wait()

	// Neither close can lose bytes: both directions have ended. Nor may the end of ctx.
	stop()
	closeCleanly(a, ab.stopped.Load())
	closeCleanly(b, ba.stopped.Load())
	return aToB, bToA, errors.Join(errAB, errBA)
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
	if l, ok := c.(lingerer); ok && !(unwanted && allAcked(c)) {
		l.SetLinger(-1) //nolint:errcheck // c has ended, and Close says so
	}
	c.Close()
}

// ackTime is how long a close waits for the peer to have everything.
const ackTime = 100 * time.Millisecond

// allAcked reports whether the peer of a socket has everything that was written to it.
func allAcked(c net.Conn) bool {
	raw := rawConn(c)
	if raw == nil {
		return false
	}
	for late := time.Now().Add(ackTime); ; time.Sleep(time.Millisecond) {
		left := -1
		err := raw.Control(func(fd uintptr) {
			if n, err := unix.IoctlGetInt(int(fd), unix.SIOCOUTQ); err == nil { // a FIN counts, too
				left = n
			}
		})
		if err != nil || left <= 0 || time.Now().After(late) {
			return err == nil && left == 0
		}
	}
}

// direction is how one half of a splice has ended, for the other half to see.
type direction struct {
	done    chan struct{} // closed when the half copies no more
	rerr    error         // why it could not read; read after done
	werr    error         // why it could not write; likewise
	stopped atomic.Bool   // its bytes are not wanted any more

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
	if own.stopped.Load() && werr == nil && (!errors.Is(rerr, ErrReset) || back.copiedAll()) {
		// The read was made to fail, or to end. Where both directions were shut down here, and the
		// peer goes on, our own kernel makes that a reset (RFC 1122 section 4.2.2.13).
		rerr, werr = nil, syscall.EPIPE
	}
	own.end(rerr, werr)
	if rerr == nil && werr == nil && endedByReset(src, back) {
		rerr = ErrReset
	}
	switch {
	case rerr != nil:
		Reset(dst)
		Reset(src)
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
	if raw.Read(isDead) == nil {
		back.stop(dst)
	}
	<-back.done
}

// endedByReset tells the end of src's bytes from a reset. Linux reports a reset once:
// when a write of the other half gets it, a read sees a clean end, and a cut-off
// upload would look complete. That write fails with ECONNRESET; with EPIPE when the
// peer had closed properly before (tcp_reset in net/ipv4/tcp_input.c).
func endedByReset(src net.Conn, back *direction) bool {
	if !isClosed(back.done) {
		if !dead(src) {
			return false // half-closed by its peer, no more
		}
		if src.LocalAddr().Network() == "unix" {
			return false // closed by its peer; a reset would have been the read's error
		}
		// If a write got the reset, that half is about to end.
		select {
		case <-back.done:
		case <-time.After(time.Second):
			return false
		}
	}
	return errors.Is(back.werr, ErrReset)
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// dead reports whether the socket c takes no more bytes. It goes past the lock of c,
// because the other half may be waiting in a write.
func dead(c net.Conn) (is bool) {
	raw := rawConn(c)
	return raw != nil && raw.Control(func(fd uintptr) { is = isDead(fd) }) == nil && is
}

// isDead reports whether a socket has been reset: one that its peer has half-closed
// still takes an empty message.
func isDead(fd uintptr) bool {
	err := unix.Send(int(fd), nil, unix.MSG_NOSIGNAL)
	return errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET)
}

// rawConn returns the socket of c, or nil where c is none.
func rawConn(c net.Conn) syscall.RawConn {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return nil
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return nil
	}
	return raw
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
