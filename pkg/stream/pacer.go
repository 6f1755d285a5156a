package stream

import (
	"sync"
	"sync/atomic"
	"time"
)

// pacer slows a session's data connections down while they keep the session's own connection from
// working. TCP gives each connection the same share of a link. Where a dozen data connections send
// over 100 kbit/s, the session's own has less than one kilobyte a second. Opens and heartbeats then
// wait behind packets that are lost again and again.
//
// The pacer bounds what this end sends, on narrow links alone. It looks at the connections while a
// data connection sends.
type pacer struct {
	// Set before the first data connection.
	own   *carrier            // the session's own connection
	guard func(func()) func() // keeps a panic inside the session
	began func()              // called when the link turns out to be narrow; nil: nobody wants to know

	watching    atomic.Bool  // look is about to be called
	narrowUntil atomic.Int64 // Unix time in nanoseconds; until then the link counts as narrow

	mu       sync.Mutex             // guards the following; taken after session.mu
	data     map[*carrier]*progress // the data connections
	ours     progress               // of the session's own connection
	lastLook time.Time              // zero: the next look has nothing to compare with
	needed   int                    // looks at which the session's own connection lacked something, since one without
	arrival  int64                  // what arrives, smoothed, in bytes a second; 0: not known
	ownRate  int64                  // what arrives of the session's own connection, smoothed
	before   int64                  // ownRate when the bound began
	bounded  int                    // at how many looks there was a bound
	notUntil time.Time              // until then no bound begins: the last one did not help
	capacity int64                  // the most that arrival was of late
	rate     int64                  // bound of all data connections together, in bytes a second; 0: none
	quiet    int                    // at how many looks in a row nobody needed the bound
}

// progress is what the kernel told of a connection at the last look.
type progress struct {
	sending
	known bool
	bound int64 // that the kernel was told, in bytes a second; 0: none
}

const (
	// paceInterval is how often the pacer looks.
	paceInterval = 500 * time.Millisecond
	// sureLooks is at how many looks in a row the session's own connection lacks something before a
	// bound begins: a link that was cut for a moment is slow for a moment.
	sureLooks = 4
	// helpLooks is at how many looks the session's own connection may lack something under a bound
	// before the bound must have helped.
	helpLooks = 8
	// wideRate is from what rate on a link counts as wide, whatever it carries, in bytes a second.
	wideRate = 3 * narrowRate
	// leastTrip is the shortest round trip at which there is a bound. Below it the kernel sends up to
	// 64 KiB at a time, and at a low rate then nothing for minutes (tcp_tso_autosize).
	leastTrip = 3 * time.Millisecond
	// leastPace is what a data connection may always send, in bytes a second. The kernel sends two
	// segments at a time: some 2.8 KiB every 8 s. The queueing discipline fq drops packets that are
	// scheduled more than 10 s ahead.
	leastPace = 384
	// paceGrowth: the bound grows by one part in so many at each look that finds no need for it.
	paceGrowth = 4
	// arrivalSmooth: a new measurement of what arrives counts for one part in so many.
	arrivalSmooth = 4
	// capacityDecay: the capacity shrinks by one part in so many at each look.
	capacityDecay = 16
	// longTrip: a round trip that is longer than the shortest by this much shows a long queue.
	longTrip = time.Second
	// manyRetries: the kernel has sent the oldest packet again so often, and got no answer.
	manyRetries = 2
	// lostOverNarrow takes the place of lostAfter while the link is narrow.
	lostOverNarrow = time.Minute
	// narrowTime is how long a link counts as narrow after a bound.
	narrowTime = time.Minute
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

// remove ends that.
func (p *pacer) remove(c *carrier) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.data, c)
}

// narrow reports whether the data connections were slowed down during the last narrowTime.
func (p *pacer) narrow() bool {
	until := p.narrowUntil.Load()
	return until > 0 && time.Now().UnixNano() < until
}

// sends notes that a data connection sends, and has look called.
func (p *pacer) sends() {
	if !p.watching.Load() && !p.watching.Swap(true) {
		time.AfterFunc(paceInterval, p.guard(p.look))
	}
}

func (p *pacer) look() {
	if p.adjust() && p.began != nil {
		p.began()
	}
}

// adjust asks the kernel how the connections fare. It bounds the data connections' rate, or lifts
// the bound, and has look called again while a data connection waits for the network. began reports
// whether there was no bound before.
func (p *pacer) adjust() (began bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.watching.Store(false) // from here on sends has look called again
	now := time.Now()
	took, first := now.Sub(p.lastLook), p.lastLook.IsZero()
	p.lastLook = now

	ownArrived, waits := p.ours.update(p.own, took)
	need := none
	switch {
	case !waits || first:
	case p.ours.retries >= manyRetries || p.ours.trip >= p.ours.shortestTrip+longTrip:
		need = starving
	default:
		need = waiting
	}
	arrived, moves := ownArrived, false
	var busy []*progress
	for c, of := range p.data {
		n, waits := of.update(c, took)
		arrived += n
		if waits {
			busy = append(busy, of)
			moves = moves || n > 0
		}
	}
	switch {
	case need == none:
		p.needed = 0
	case moves: // else the link may be cut, which says nothing of its capacity
		p.needed++
	}
	was := p.rate
	if !first {
		p.measure(arrived, ownArrived, took)
		p.decide(need, arrived > 0, len(busy), now)
	}
	began = was == 0 && p.rate > 0
	for c, of := range p.data {
		of.setBound(c, p.boundOf(of, busy))
	}
	switch {
	case p.rate > 0:
		p.narrowUntil.Store(now.Add(narrowTime).UnixNano())
		p.sends()
	case len(busy) > 0 || first && len(p.data) > 0:
		p.sends()
	default:
		p.lastLook, p.arrival, p.ownRate, p.capacity = time.Time{}, 0, 0, 0
	}
	return began
}

// measure notes what has arrived. More than a few times narrowRate makes no difference: a link that was
// fast counts as narrow soon after it has become so.
func (p *pacer) measure(all, own int64, took time.Duration) {
	if all == 0 {
		return
	}
	second := func(n int64) int64 { return min(int64(float64(n)/took.Seconds()), wideRate) }
	if p.arrival == 0 {
		p.arrival, p.ownRate = second(all), second(own)
	}
	p.arrival += (second(all) - p.arrival) / arrivalSmooth
	p.ownRate += (second(own) - p.ownRate) / arrivalSmooth
	p.capacity = max(p.capacity-p.capacity/capacityDecay, p.arrival)
}

// decide sets the bound. arrives says that something has arrived since the last look.
func (p *pacer) decide(need need, arrives bool, busy int, now time.Time) {
	switch {
	case busy == 0 || p.ours.shortestTrip < leastTrip:
		p.rate = 0
	case p.rate == 0:
		if p.needed >= sureLooks && !now.Before(p.notUntil) {
			p.rate = nextPace(0, p.capacity, need)
			p.before, p.bounded, p.quiet = p.ownRate, 0, 0
		}
	case need == none:
		if p.quiet++; p.quiet > sureLooks {
			p.rate *= 2
		}
		p.rate = nextPace(p.rate, p.capacity, need)
	default:
		p.quiet = 0
		if p.bounded++; p.bounded == helpLooks && p.ownRate < 2*p.before && p.ownRate < p.capacity/4 {
			// The loss is not of our making.
			p.rate, p.notUntil = 0, now.Add(narrowTime)
			p.narrowUntil.Store(0)
			return
		}
		if arrives {
			p.rate = nextPace(p.rate, p.capacity, need)
		}
	}
	if p.rate > 0 {
		p.rate = max(p.rate, int64(busy)*leastPace) // what boundOf gives them
	}
}

// boundOf returns the bound of one data connection. One that sends little needs none.
func (p *pacer) boundOf(of *progress, busy []*progress) int64 {
	if p.rate > 0 {
		for _, one := range busy {
			if one == of {
				return max(leastPace, p.rate/int64(len(busy)))
			}
		}
	}
	return 0
}

// need is what the session's own connection lacks.
type need int

const (
	none     need = iota
	waiting       // it has something to send that the network does not take
	starving      // its packets are lost, or stand in a long queue
)

// nextPace returns the bound of all data connections together, in bytes a second; 0: none. rate is
// the bound until now, and capacity what the link can take.
func nextPace(rate, capacity int64, own need) int64 {
	switch {
	case rate == 0 && (own == none || capacity >= narrowRate), capacity >= 2*narrowRate:
		return 0
	case own == none && rate >= narrowRate:
		return 0
	case own == none:
		return rate + rate/paceGrowth + 1
	}
	share := capacity / 2
	if own == starving {
		share = capacity / 4
	}
	if rate == 0 {
		return max(1, share)
	}
	return min(rate+rate/paceGrowth+1, max(1, share))
}

// update asks the kernel about a connection. It returns how many bytes have arrived since the last
// time, and whether the connection waits for the network: it did so for at least half of the
// interval, and has bytes that it cannot send or that were lost.
func (p *progress) update(c *carrier, interval time.Duration) (arrived int64, waits bool) {
	if c.tcp == nil {
		return 0, false
	}
	last, known := p.sending, p.known
	c.raw.Control(func(fd uintptr) { //nolint:errcheck // c is closed, and sends nothing
		if s, ok := sendingOf(fd); ok {
			p.sending, p.known = s, true
		}
	})
	if !known {
		return 0, false
	}
	p.shortestTrip = min(p.shortestTrip, last.shortestTrip) // the kernel forgets it after five minutes
	waits = p.busy-last.busy >= interval/2 && (p.unsent > 0 || p.retries > 0)
	return max(0, p.arrived-last.arrived), waits
}

// setBound has the kernel send no faster.
func (p *progress) setBound(c *carrier, rate int64) {
	if p.bound != rate {
		p.bound = rate
		c.raw.Control(func(fd uintptr) { boundRate(fd, rate) }) //nolint:errcheck // c is closed, and sends nothing
	}
}

// isNarrow reports whether the link is too narrow for more data connections.
func (s *session) isNarrow() bool { return s.own.narrow.Load() || s.pacer.narrow() }
