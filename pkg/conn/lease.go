package conn

import (
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"google.golang.org/grpc/mem"
)

// Lease is one conn's use of a data connection, in place of a Connect stream. After the lease was
// returned or revoked, SendMsg and RecvMsg fail. So a late goroutine of the old conn cannot touch the
// next conn's bytes. The phase of the data connection says how far the conn is.
type Lease struct {
	// Set once, by LendAtEdge or LendAtCloud.
	data   *Data
	isEdge bool

	sendMu sync.Mutex // held in SendMsg
	recvMu sync.Mutex // held in RecvMsg

	returning bool // no call of SendMsg or RecvMsg may begin; guarded by data.mu
}

var _ way = (*Lease)(nil)

// ErrReset says that no further conn may use a data connection, because its conn was reset.
var ErrReset = errors.New("its conn was reset")

var (
	errReturned = errors.New("the conn has returned its data connection")
	errBroken   = errors.New("the other side has broken the protocol")
)

const (
	// stopTimeout is how long a write may take after the other side has sent stop. The other side
	// discards what it receives then, so a write should not wait.
	stopTimeout = 10 * time.Second
	// finInline is how many bytes a conn may have sent so that its fin is sent without the sender
	// goroutine. A socket's buffer has room for so many bytes, since the kernel has sent all bytes of the
	// previous conn. So the write does not wait.
	finInline = 4 << 10
	// pauseAfterFin is how long after fin no goroutine receives from a data connection. Most conns have
	// ended by then, and so need no such goroutine.
	pauseAfterFin = 20 * time.Millisecond
)

// LendAtEdge lends d at the edge to the conn of an open that has come. Accept or a FrameRefused
// answers the open.
func (d *Data) LendAtEdge(l *Lease) {
	l.data, l.isEdge = d, true
	d.mu.Lock()
	defer d.mu.Unlock()
	d.lease, d.phase = l, phaseAsked
}

// LendAtCloud lends d at the cloud to the conn of an open that the edge has answered with
// FrameOpened.
func (d *Data) LendAtCloud() *Lease {
	l := &Lease{data: d}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.lease, d.phase = l, phaseCarrying
	return l
}

// Accept tells the cloud that the target was reached. If Accept fails, it has revoked the lease.
func (l *Lease) Accept() error {
	l.step(phaseAsked, phaseCarrying)
	err := l.data.Send(FrameOpened, nil)
	if err != nil {
		l.Revoke()
	}
	return err
}

// Revoke takes the data connection from a conn that was reset. No other conn may use it.
func (l *Lease) Revoke() {
	d := l.data
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.lease == l {
		d.lease, d.phase = nil, phaseDead
	}
}

// EndAwaited reports whether this side is the edge and has finished, and the cloud has not yet said that it
// has received all of the conn.
func (l *Lease) EndAwaited() bool { return l.isEdge && l.phase() == phaseEndSent }

// endGot reports whether the other side has said that it has finished.
func (l *Lease) endGot() bool {
	p := l.phase()
	return p == phaseEndGot || p == phaseEnded
}

// End interrupts, at the cloud, the calls of a conn that has ended cleanly. A caller may still be in
// RecvMsg, because an edge may send stop after its fin. If stopped is true, the edge reads no more. A
// caller may then be in SendMsg, and a broken edge may not discard what it receives.
func (l *Lease) End(stopped bool) {
	if l.endGot() {
		l.stopReceiving()
	} else {
		l.interrupt()
	}
	if stopped {
		l.data.raw.SetWriteDeadline(time.Now().Add(stopTimeout))
	}
}

// ReturnsAtOnce reports whether ReturnAtCloud would not wait: the edge has finished, and no caller is in
// SendMsg.
func (l *Lease) ReturnsAtOnce() bool {
	free := l.endGot() && l.sendMu.TryLock()
	if free {
		l.sendMu.Unlock()
	}
	return free
}

// ReturnAtCloud gives the data connection back for the next conn, after the clean end of its conn
// and End. It waits until the edge has taken all that was sent, and sends nothing more. That takes as
// long as the target takes to read. After an error no further conn may use the data connection.
func (l *Lease) ReturnAtCloud() error {
	d := l.data
	l.recvMu.Lock() // End has interrupted the caller that holds recvMu
	d.mu.Lock()
	l.returning = true
	interrupted := d.interrupted
	d.interrupted = false
	d.mu.Unlock()
	l.recvMu.Unlock()
	if interrupted {
		d.Resume()
	}
	l.sendMu.Lock() // a caller of ReadFrom may still send
	p := l.phase()
	l.sendMu.Unlock()
	got := p == phaseEndGot || p == phaseEnded
	var err error
	switch p {
	case phaseDead:
		return errBroken
	case phaseCarrying:
		err = d.sendEnd()
	}
	if err != nil {
		return err
	}
	d.raw.SetWriteDeadline(time.Time{})
	if !got {
		if err := d.skipToEnd(); err != nil {
			return err
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.lease, d.phase = nil, phaseIdle
	if p == phaseEndGot {
		d.phase = phaseOwing
	}
	return nil
}

// ReturnAtEdge gives the data connection back for the next conn, after its conn has ended or its open
// was refused. It tells the cloud that the edge has finished, unless the edge has said so. ErrReset
// says that the lease was revoked.
func (l *Lease) ReturnAtEdge() error {
	d := l.data
	l.sendMu.Lock() // a caller of ReadFrom may still send, and its bytes must not follow the end
	d.mu.Lock()
	p, holds, interrupted := d.phase, d.lease == l, d.interrupted
	if holds {
		d.lease, d.interrupted = nil, false
		if p != phaseDead {
			d.phase = phaseIdle
		}
	}
	d.mu.Unlock()
	l.sendMu.Unlock()
	switch {
	case !holds || p == phaseDead:
		return ErrReset
	case p == phaseCarrying || p == phaseEndGot:
		return d.sendEnd()
	case interrupted:
		d.Resume()
	}
	return nil
}

// phase returns the data connection's phase while l holds it, and phaseDead afterwards.
func (l *Lease) phase() phase {
	l.data.mu.Lock()
	defer l.data.mu.Unlock()
	return l.phaseLocked()
}

func (l *Lease) phaseLocked() phase {
	if l.data.lease != l {
		return phaseDead
	}
	return l.data.phase
}

// step moves from one phase to the next. It does nothing in another phase, or when l no longer holds
// the data connection.
func (l *Lease) step(from, to phase) {
	l.data.mu.Lock()
	defer l.data.mu.Unlock()
	if l.phaseLocked() == from {
		l.data.phase = to
	}
}

// enter returns the phase in which a call of SendMsg or RecvMsg begins; phaseDead if the call may not begin.
func (l *Lease) enter() phase {
	l.data.mu.Lock()
	defer l.data.mu.Unlock()
	if l.returning {
		return phaseDead
	}
	return l.phaseLocked()
}

// SendMsg sends an *outgoing chunk. It takes the chunk over, whether it fails or not.
func (l *Lease) SendMsg(m any) error {
	o := m.(*outgoing) // a conn sends nothing else
	o.taken = true
	defer o.pool.Put(o.block)
	defer o.forwarded.Free()
	l.sendMu.Lock()
	defer l.sendMu.Unlock()
	if l.enter() == phaseDead {
		return errReturned
	}
	have := 0 // how many bytes of o.forwarded are in the block
	for _, b := range o.forwarded {
		for p := b.ReadOnlyData(); len(p) > 0; {
			if have == MaxPayload {
				if err := l.data.writeChunk(o.block, have, 0); err != nil {
					return err
				}
				have = 0
			}
			n := copy(payload(o.block)[have:], p)
			p, have = p[n:], have+n
		}
	}
	if o.forwarded == nil {
		have = o.n
	}
	if err := l.data.writeChunk(o.block, have, flagsOf(o)); err != nil || !o.last {
		return err
	}
	l.step(phaseCarrying, phaseEndSent)
	l.step(phaseEndGot, phaseEnded)
	if l.isEdge { // the edge's receiver need not wait for the cloud's flagEnd
		l.stopReceiving()
	}
	return nil
}

func flagsOf(o *outgoing) (flags byte) {
	if o.fin {
		flags |= flagFin
	}
	if o.stop {
		flags |= flagStop
	}
	if o.last {
		flags |= flagEnd
	}
	if o.abort {
		flags |= flagAbort
	}
	return flags
}

// RecvMsg receives an *incoming chunk. io.EOF says that no more chunks come. At the edge, it also says that
// the conn has ended.
func (l *Lease) RecvMsg(m any) error {
	in := m.(*incoming) // a conn receives nothing else
	*in = incoming{}
	l.recvMu.Lock()
	defer l.recvMu.Unlock()
	switch p := l.enter(); {
	case p == phaseDead:
		return errReturned
	case l.endsInput(p):
		return io.EOF
	}
	d := l.data
	typ, n, err := d.next()
	switch {
	case err != nil && l.inputOver(): // l was interrupted
		return io.EOF
	case err != nil:
		return err
	case l.isEdge && typ == FrameOpen: // the next conn's open: SendMsg has sent our flagEnd, and not noted it yet
		d.putBack()
		return io.EOF
	case !isChunk(typ, n):
		l.breakOff()
		return fmt.Errorf("a frame of type %#x with %d bytes in the middle of a conn", typ, n)
	}
	in.fin, in.stop, in.abort = typ&flagFin != 0, typ&flagStop != 0, typ&flagAbort != 0
	if typ&flagEnd != 0 {
		l.step(phaseCarrying, phaseEndGot)
		l.step(phaseEndSent, phaseEnded)
	}
	if n == 0 {
		return nil
	}
	block := d.blocks.get()
	*block = (*block)[:n]
	if err := d.fill(*block); err != nil {
		d.blocks.put(block)
		return err
	}
	in.data = mem.BufferSlice{mem.NewBuffer(block, d.blocks)}
	return nil
}

// breakOff notes that the other side has broken the protocol: no other conn may follow.
func (l *Lease) breakOff() {
	l.data.mu.Lock()
	defer l.data.mu.Unlock()
	if l.data.lease == l {
		l.data.phase = phaseDead
	}
}

// stopReceiving makes a caller that is in RecvMsg return. Later callers return at once, because of the
// phase.
func (l *Lease) stopReceiving() {
	if l.recvMu.TryLock() {
		l.recvMu.Unlock()
		return
	}
	l.interrupt()
}

// interrupt interrupts the receiver of the data connection, if l still holds the data connection.
func (l *Lease) interrupt() {
	d := l.data
	d.mu.Lock()
	holds := d.lease == l
	d.interrupted = d.interrupted || holds
	d.mu.Unlock()
	if holds {
		d.Interrupt()
	}
}

// endsInput reports whether no more bytes come in phase p. An edge sends flagEnd only after it has handed
// on all bytes from the cloud.
func (l *Lease) endsInput(p phase) bool {
	return p == phaseEndGot || p == phaseEnded || l.isEdge && p == phaseEndSent
}

// inputOver implements way.
func (l *Lease) inputOver() bool { return l.endsInput(l.phase()) }

// eofEndsBoth implements way: flagEnd says that both directions have ended.
func (l *Lease) eofEndsBoth() bool { return true }

// sendsAtOnce implements way.
func (l *Lease) sendsAtOnce(sent int) bool { return sent <= finInline }

// hasRoom implements way: it asks the connection below TLS.
func (l *Lease) hasRoom() bool {
	r, ok := l.data.raw.(interface{ HasRoom() bool })
	return ok && r.HasRoom()
}

// endSaid implements way.
func (l *Lease) endSaid() bool {
	p := l.phase()
	return p == phaseEndSent || p == phaseEnded
}

// pauseAfterFin implements way. After fin comes at most a stop, which the socket's buffer can hold.
func (l *Lease) pauseAfterFin() time.Duration { return pauseAfterFin }
