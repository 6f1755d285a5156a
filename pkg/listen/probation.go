package listen

import (
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// Probation is a connection of a stranger: until Met it has a place among the strangers,
// has to be done in time, and may send so many bytes. What it sends beyond them waits in
// the kernel, and so with the sender, whatever the protocol's own windows allow.
//
// The owner closes the connection and then calls Release.
type Probation struct {
	// Set once.
	conn  net.Conn
	terms Terms
	place *Stranger

	left   int           // bytes that may still be read; owned by Read
	spoken atomic.Bool   // something has been read
	over   atomic.Bool   // no bound applies any more; set under mu
	ended  chan struct{} // closed when over is set

	mu    sync.Mutex // guards the following
	end   time.Time  // when its time is over
	timer *time.Timer
}

// Terms are what a stranger's connection may cost.
type Terms struct {
	Time    time.Duration // until Met; the first byte has FirstByte, if that is less
	Bytes   int           // that may be read until Met
	Late    func()        // called when the time is over, before the connection is closed
	Evicted func()        // called when a newcomer has taken the place, likewise
}

// Probation admits a connection, or says why there is no place.
func (s *Strangers) Probation(c net.Conn, t Terms) (*Probation, Full) {
	p := &Probation{conn: c, terms: t, end: time.Now().Add(t.Time), left: t.Bytes, ended: make(chan struct{})}
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

// expire closes the connection if it is silent, or if its time is over.
func (p *Probation) expire() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if left := time.Until(p.end); left > 0 && !p.over.Load() && (p.spoken.Load() || Unread(p.conn)) {
		p.place.Spoke() // also if its bytes have not been read yet
		p.timer.Reset(left)
		return
	}
	p.settleLocked(func() {
		p.place.Release()
		p.terms.Late()
		p.conn.Close()
	})
}

// Read reads from the connection.
func (p *Probation) Read(b []byte) (int, error) {
	if p.over.Load() {
		return p.conn.Read(b)
	}
	if p.left == 0 {
		<-p.ended
		return p.conn.Read(b)
	}
	n, err := p.conn.Read(b[:min(len(b), p.left)])
	p.left -= n
	if n > 0 && !p.spoken.Swap(true) {
		p.place.Spoke()
	}
	return n, err
}

// Extend puts the end off: it comes after d, from now.
func (p *Probation) Extend(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.over.Load() {
		p.end = time.Now().Add(d)
		p.timer.Reset(d)
	}
}

// Met ends it: the other side has proven who it is, and its source is known.
func (p *Probation) Met() { p.settle(p.place.Met) }

// Release ends it: the connection is closed, or is about to be.
func (p *Probation) Release() { p.settle(p.place.Release) }

// evict closes the connection, unless the probation is over.
func (p *Probation) evict() {
	p.settle(func() {
		p.terms.Evicted()
		p.conn.Close()
	})
}

// settle ends the probation and calls how, unless it has ended before.
func (p *Probation) settle(how func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.settleLocked(how)
}

// settleLocked is settle. The caller holds mu.
func (p *Probation) settleLocked(how func()) {
	if p.over.Load() {
		return
	}
	if p.timer != nil { // nil: another goroutine evicts a connection that was just admitted
		p.timer.Stop()
	}
	how()
	p.over.Store(true)
	close(p.ended)
}
