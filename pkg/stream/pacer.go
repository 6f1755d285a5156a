package stream

import (
	"math"
	"sync"
	"sync/atomic"
	"time"
)

// pacer slows a session's data connections down while they keep the session's own connection from
// working. TCP gives each connection the same share of a link. Where a dozen data connections send
// over 100 kbit/s, the session's own has less than one kilobyte a second, and opens and heartbeats
// wait behind packets that are lost again and again.
//
// It bounds what this end sends. While no data connection sends, it does nothing.
type pacer struct {
	// Set before the first data connection.
	own   *carrier            // the session's own connection
	guard func(func()) func() // keeps a panic inside the session
	began func()              // called when the link turns out to be narrow; nil: nobody wants to know

	watching atomic.Bool // look is about to be called

	mu    sync.Mutex             // guards the following
	data  map[*carrier]*progress // the data connections
	ours  progress               // of the session's own connection
	since time.Time              // when look was last called; zero: not since watching began
	total int64                  // what all connections together have, smoothed, in bytes a second
	rate  int64                  // of all data connections together, in bytes a second; 0: unbounded
}

// progress is what the kernel told of a connection when it was last asked.
type progress struct {
	acked   uint64        // bytes that have arrived
	waiting time.Duration // how long the connection has waited for the network
	known   bool
	paced   int64 // the bound that the kernel has, in bytes a second; 0: none
}

const (
	// paceInterval is how often the pacer looks while data connections send.
	paceInterval = 500 * time.Millisecond
	// leastPace is what all data connections together may always send, in bytes a second.
	leastPace = 1 << 10
	// paceSmooth is the part of a new measurement in the smoothed one.
	paceSmooth = 4
	// paceGrowth is the part by which their rate grows in each interval without trouble.
	paceGrowth = 8
	// pacedBackoff takes the place of dataBackoff: where most packets are lost, the kernel would give
	// up after a minute. It tries for more than four with a tcp_retries2 of 15.
	pacedBackoff = 30 * time.Second
	// longTrip is how much longer than the link's own a round trip is where queues are too long.
	longTrip = time.Second
	// manyRetries is how often in a row the kernel has sent a packet again in vain.
	manyRetries = 2
)

// add begins to watch a data connection.
func (p *pacer) add(c *carrier) {
	if c.tcp == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.data == nil {
		p.data = make(map[*carrier]*progress)
	}
	p.data[c] = &progress{}
	c.pacer = p
}

func (p *pacer) remove(c *carrier) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.data, c)
}

// paces reports whether data connections are slowed down now.
func (p *pacer) paces() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.rate > 0
}

// sends notes that a data connection sends.
func (p *pacer) sends() {
	if !p.watching.Load() && !p.watching.Swap(true) {
		time.AfterFunc(paceInterval, p.guard(p.look))
	}
}

// look asks the kernel how the connections fare, and bounds the data connections' rate or lifts the
// bound. It has itself called again while a data connection waits for the network.
func (p *pacer) look() {
	if p.lookOnce() && p.began != nil {
		p.began()
	}
}

// lookOnce reports whether the bound is a new one.
func (p *pacer) lookOnce() (began bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.watching.Store(false) // from here on sends has look called again
	now := time.Now()
	took := now.Sub(p.since)
	fresh := p.since.IsZero() // then what has happened is of an unknown time
	p.since = now

	total, waited, state := p.ours.read(p.own)
	own := none
	switch {
	case state.starves():
		own = starves
	case waited >= took/2:
		own = waits
	}
	busy, pending := 0, false
	for c, of := range p.data {
		acked, waited, state := of.read(c)
		total += acked
		if waited >= took/2 {
			busy++
		}
		pending = pending || state.pending
	}
	if fresh {
		p.total = 0
	} else {
		rate := int64(float64(total) / took.Seconds())
		if p.total == 0 {
			p.total = rate
		}
		p.total += (rate - p.total) / paceSmooth
		was := p.rate
		p.rate = nextPace(p.rate, p.total, busy, own)
		began = was == 0 && p.rate > 0
		for c, of := range p.data {
			of.bound(c, p.rate, busy)
		}
	}
	if !pending && p.rate == 0 {
		p.since = time.Time{}
		return began
	}
	p.sends()
	return began
}

// nextPace returns the rate that all data connections together may have from now on; 0: any. They
// had rate until now. All connections of the session have total, in bytes a second. So many data
// connections wait for the network, and the session's own does as well or not.
func nextPace(rate, total int64, busy int, own need) int64 {
	limit := int64(math.MaxInt64)
	switch own {
	case waits:
		limit = max(leastPace, total/2)
	case starves:
		limit = max(leastPace, total/4)
	}
	switch {
	case busy == 0 || rate == 0 && (own == none || total >= narrowRate) || total >= 2*narrowRate:
		return 0
	case rate == 0:
		return limit
	case own == none && rate >= narrowRate:
		return 0
	}
	return min(rate+rate/paceGrowth, limit)
}

// read asks the kernel about a connection. It returns how many bytes have arrived since it was last
// asked, and how long the connection has waited for the network meanwhile.
func (p *progress) read(c *carrier) (acked uint64, waited time.Duration, state sending) {
	if c.tcp == nil {
		return 0, 0, sending{}
	}
	before := *p
	c.raw.Control(func(fd uintptr) { //nolint:errcheck // c is closed, and sends nothing
		var ok bool
		if state, ok = sendingOf(fd); ok {
			p.acked, p.waiting, p.known = state.acked, state.waiting, true
		}
	})
	if !before.known {
		return 0, 0, state
	}
	return p.acked - before.acked, p.waiting - before.waiting, state
}

// bound has the kernel send no faster than one of n connections may that share a rate.
func (p *progress) bound(c *carrier, rate int64, n int) {
	if rate > 0 {
		rate = max(1, rate/int64(max(1, n)))
	}
	if p.paced == rate {
		return
	}
	p.paced = rate
	backoff := dataBackoff
	if rate > 0 {
		backoff = pacedBackoff
	}
	c.raw.Control(func(fd uintptr) { //nolint:errcheck // c is closed, and sends nothing
		boundRate(fd, rate)
		boundBackoff(fd, backoff)
	})
}

// need is what the session's own connection lacks.
type need int

const (
	none need = iota
	// waits: it has something to send, and waits for the network.
	waits
	// starves: what it sends does not get through, or only after a long wait in a queue on the way.
	starves
)

func (s sending) starves() bool {
	return s.retries >= manyRetries || s.trip >= s.leastTrip+longTrip
}

// isNarrow reports whether the link is too narrow for data connections.
func (s *session) isNarrow() bool { return s.own.narrow.Load() || s.pacer.paces() }
