package listen

import (
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// Probation is a connection whose peer has not authenticated yet. Until Met is called, the
// connection occupies a place in [Strangers], has a deadline, and may send a limited number of
// bytes. Further bytes wait in the kernel, and then at the sender, even if the windows of a protocol
// such as HTTP/2 would permit more bytes.
//
// The owner closes the connection and then calls Release.
type Probation struct {
	// Set once.
	conn  net.Conn
	terms Terms
	place *Stranger

	budget        int           // bytes that Read may still return; owned by Read
	firstByteRead atomic.Bool   // at least one byte has been read
	ended         atomic.Bool   // the limits no longer apply; set under mu
	done          chan struct{} // closed when ended is set; frees a Read that has used up its bytes

	// A goroutine that needs both mu and the mutex of Strangers locks mu first. So Strangers calls evict without its
	// mutex.
	mu       sync.Mutex // guards the following
	deadline time.Time  // deadline for Met
	// timer is nil until Probation has admitted the connection. It fires first after FirstByte,
	// then at deadline.
	timer *time.Timer
}

// Terms limit what a connection of an unauthenticated peer may cost.
type Terms struct {
	Time    time.Duration // longest time from admission to Met; the first byte must come within FirstByte, too
	Bytes   int           // how many bytes may be read before Met
	Late    func()        // called at the deadline, before the connection is closed
	Evicted func()        // called when a newcomer takes the place, before the connection is closed
}

// Probation admits a connection. If there is no place, it returns nil and the reason.
func (s *Strangers) Probation(c net.Conn, t Terms) (*Probation, Full) {
	p := &Probation{conn: c, terms: t, deadline: time.Now().Add(t.Time), budget: t.Bytes, done: make(chan struct{})}
	place, full := s.Admit(c, p.evict)
	if place == nil {
		return nil, full
	}
	p.place = place
	p.mu.Lock()
	defer p.mu.Unlock()
	p.timer = time.AfterFunc(min(FirstByte, t.Time), p.expire)
	return p, Full{}
}

// expire runs after FirstByte and at the deadline. It closes the connection if its peer has sent
// nothing, or if the deadline has passed.
func (p *Probation) expire() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if left := time.Until(p.deadline); left > 0 && !p.ended.Load() && (p.firstByteRead.Load() || Unread(p.conn)) {
		p.place.Spoke() // also when the first bytes are still unread in the kernel
		p.timer.Reset(left)
		return
	}
	p.finishLocked(func() {
		p.place.Release()
		p.terms.Late()
		p.conn.Close()
	})
}

// Read reads from the connection. After Terms.Bytes bytes it blocks until the probation ends.
func (p *Probation) Read(b []byte) (int, error) {
	if p.ended.Load() {
		return p.conn.Read(b)
	}
	if p.budget == 0 {
		<-p.done
		return p.conn.Read(b)
	}
	n, err := p.conn.Read(b[:min(len(b), p.budget)])
	p.budget -= n
	if n > 0 && !p.firstByteRead.Swap(true) {
		p.place.Spoke()
	}
	return n, err
}

// Extend moves the deadline to d from now.
func (p *Probation) Extend(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.ended.Load() {
		p.deadline = time.Now().Add(d)
		p.timer.Reset(d)
	}
}

// Met ends the probation: the peer has authenticated. The source of the connection is a known source
// from now on.
func (p *Probation) Met() { p.finish(p.place.Met) }

// Release ends the probation: the connection is closed, or is about to be.
func (p *Probation) Release() { p.finish(p.place.Release) }

// evict closes the connection, unless the probation has ended.
func (p *Probation) evict() {
	p.finish(func() {
		p.terms.Evicted()
		p.conn.Close()
	})
}

// finish ends the probation and calls action. It does nothing if the probation has already ended.
func (p *Probation) finish(action func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.finishLocked(action)
}

// finishLocked is finish. The caller holds mu.
func (p *Probation) finishLocked(action func()) {
	if p.ended.Load() {
		return
	}
	if p.timer != nil { // nil: another goroutine evicts a connection that was admitted a moment ago
		p.timer.Stop()
	}
	action()
	p.ended.Store(true)
	close(p.done)
}
