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
// Closing it is for whoever embeds it, who calls Release then.
type Probation struct {
	// Set once.
	conn  net.Conn
	place *Stranger
	end   time.Time // when its time is over
	timer *time.Timer

	left   int         // bytes that may still be read; owned by Read
	spoken bool        // something has been read; owned by Read
	over   atomic.Bool // fast for Read: no bound any more
	once   sync.Once
	ended  chan struct{} // closed when it is over
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
	p := &Probation{conn: c, end: time.Now().Add(t.Time), left: t.Bytes, ended: make(chan struct{})}
	closeFor := func(why func()) {
		p.once.Do(func() {
			why()
			p.finish()
		})
		c.Close()
	}
	place, full := s.Admit(AddrOf(c.RemoteAddr()), func() { closeFor(t.Evicted) })
	if place == nil {
		return nil, full
	}
	p.place = place
	p.timer = time.AfterFunc(min(FirstByte, t.Time), func() {
		closeFor(func() {
			place.Release()
			t.Late()
		})
	})
	return p, Full{}
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
	if n > 0 && !p.spoken {
		p.spoken = true
		p.place.Spoke()
		if p.timer.Stop() {
			p.timer.Reset(time.Until(p.end))
		}
	}
	return n, err
}

// Extend puts the end off: it comes after d, from now.
func (p *Probation) Extend(d time.Duration) { p.timer.Reset(d) }

// Met ends it: the other side has proven who it is, and its source is known.
func (p *Probation) Met() { p.settle(p.place.Met) }

// Release ends it: the connection is closed, or is about to be.
func (p *Probation) Release() { p.settle(p.place.Release) }

func (p *Probation) settle(how func()) {
	p.once.Do(func() {
		p.timer.Stop()
		how()
		p.finish()
	})
}

func (p *Probation) finish() {
	p.over.Store(true)
	close(p.ended)
}
