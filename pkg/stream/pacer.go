package stream

import (
	"sync"
	"sync/atomic"
	"time"
)

// pacer slows down a session's data connections while they starve the session's own connection.
// TCP gives each connection the same share of a link. If a dozen data connections send over a link of
// 100 kbit/s, the session's own connection gets less than one kilobyte a second. Opens and heartbeats
// then wait behind packets that are lost again and again.
//
// The pacer limits only what this end sends, and only on narrow links. Its limit is called the bound: the
// rate at which all data connections together may send. While a data connection sends, the pacer checks
// all connections every paceInterval (a look). At a look, data connections that lose packets are switched
// to another congestion control.
//
// The session's own connection has need if it has bytes that the network does not take, or loses packets.
type pacer struct {
	// Set before the first data connection.
	own   *carrier            // the session's own connection
	guard func(func()) func() // confines a panic to the session
	began func()              // called when the link turns out to be narrow; may be nil

	watching    atomic.Bool               // a call of look is scheduled
	narrowUntil atomic.Pointer[time.Time] // until then the link counts as narrow; nil: it does not

	mu       sync.Mutex             // guards the fields below; locked after session.mu
	data     map[*carrier]*progress // the data connections
	ours     progress               // progress of the session's own connection
	lastLook time.Time              // time of the last look; zero: the next look has nothing to compare with
	needed   int                    // looks with need while bytes arrived, since the last look without need; see adjust
	arrival  int64                  // smoothed rate at which the other end gets bytes, in bytes a second; 0: not known
	ownRate  int64                  // like arrival, for the session's own connection alone
	before   int64                  // ownRate when the bound began
	bounded  int                    // looks under the bound at which the session's own connection had need
	notUntil time.Time              // before this time no bound begins, since the last bound did not help
	capacity int64                  // highest recent value of arrival; decays
	rate     int64                  // bound of all data connections together, in bytes a second; 0: none
	quiet    int                    // looks in a row under the bound at which the session's own connection had no need
}

// progress is what the kernel reported about a connection at the last look.
type progress struct {
	sending
	known bool  // false until the kernel has reported once
	bound int64 // the bound that the kernel was given, in bytes a second; 0: none
}

const (
	// paceInterval is the time between two looks.
	paceInterval = 500 * time.Millisecond
	// sureLooks is how many looks in a row the session's own connection must have need before a bound
	// begins. One look is not enough, because a link is also slow just after a short cut.
	sureLooks = 4
	// helpLooks is at how many looks under a bound the session's own connection may have need. If its
	// rate has not grown by then, the bound does not help, and the pacer lifts it.
	helpLooks = 8
	// wideRate is the rate at which a link counts as wide, regardless of its load, in bytes a
	// second.
	wideRate = 3 * narrowRate
	// leastTrip is the shortest round trip at which a bound applies. Over a shorter round trip the
	// kernel sends up to 64 KiB at a time, and so sends nothing for minutes at a low rate
	// (tcp_tso_autosize).
	leastTrip = 3 * time.Millisecond
	// leastPace is the rate that every data connection keeps, in bytes a second. The kernel sends
	// two segments at a time: some 2.8 KiB every 8 s. The queueing discipline fq drops packets
	// that are scheduled more than 10 s ahead.
	leastPace = 384
	// paceGrowth is the divisor for growth: at a look the bound grows by 1/paceGrowth. While the session's
	// own connection has need, the bound grows no further than its share of the capacity.
	paceGrowth = 4
	// arrivalSmooth is the divisor for smoothing. A new measurement of the arrival rate has the
	// weight 1/arrivalSmooth.
	arrivalSmooth = 4
	// capacityDecay is the divisor for decay. At each look the capacity shrinks by
	// 1/capacityDecay.
	capacityDecay = 16
	// longTrip is how much longer than the shortest round trip a round trip must be to show a
	// long queue.
	longTrip = time.Second
	// manyRetries is how many unanswered retransmissions of its oldest packet make a connection
	// count as starving.
	manyRetries = 2
	// lostOverNarrow replaces lostAfter while the link is narrow.
	lostOverNarrow = time.Minute
	// narrowTime is how long a link still counts as narrow after the pacer has lifted the bound. If a
	// bound did not help, narrowTime is how long the pacer sets no new bound.
	narrowTime = time.Minute
)

// add starts to watch a data connection.
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

// remove stops watching a data connection.
func (p *pacer) remove(c *carrier) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.data, c)
}

// narrow reports whether the pacer slowed down the data connections during the last narrowTime. A
// bound that did not help does not count.
func (p *pacer) narrow() bool {
	until := p.narrowUntil.Load()
	return until != nil && time.Now().Before(*until)
}

// sends notes that a data connection sends, and schedules a call of look.
func (p *pacer) sends() {
	if !p.watching.Load() && !p.watching.Swap(true) {
		time.AfterFunc(paceInterval, p.guard(p.look))
	}
}

// look adjusts the bound. It calls began if a bound has begun.
func (p *pacer) look() {
	if p.adjust() && p.began != nil {
		p.began()
	}
}

// adjust asks the kernel about the progress of the connections. It bounds the data connections'
// rate, or lifts the bound. It schedules another look while a bound applies or a data connection
// waits for the network. began reports whether a bound has begun.
func (p *pacer) adjust() (began bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.watching.Store(false) // from here on, a call of the method sends schedules look again
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
		before := of.segments
		n, waits := of.update(c, took)
		c.losses.resume(before, now.Add(-paceInterval)) // a look follows half a second after a connection has begun to send
		counted := of.segments
		if p.ours.known { // a data connection may have begun when a queue was there already
			counted.trip = min(counted.trip, p.ours.shortestTrip)
		}
		c.judge(counted)
		arrived += n
		if waits {
			busy = append(busy, of)
			moves = moves || n > 0
		}
	}
	switch {
	case need == none:
		p.needed = 0
	case moves: // without moving bytes the link may be cut, so a look says nothing about its capacity
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
		p.narrowUntil.Store(new(now.Add(narrowTime)))
		p.sends()
	case len(busy) > 0 || first && len(p.data) > 0:
		p.sends()
	default:
		p.lastLook, p.arrival, p.ownRate, p.capacity = time.Time{}, 0, 0, 0
	}
	return began
}

// measure updates arrival, ownRate and capacity with the bytes that have arrived within took: all bytes,
// and those of the session's own connection. It caps each rate at wideRate, a few times narrowRate. So
// a link that was fast counts as narrow soon after it has become narrow.
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

// decide sets the bound. arrives says that bytes have arrived since the last look. busy is how
// many data connections wait for the network.
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
			// The session's own connection still gets little, so the data connections do not cause its need.
			p.rate, p.notUntil = 0, now.Add(narrowTime)
			p.narrowUntil.Store(nil)
			return
		}
		if arrives {
			p.rate = nextPace(p.rate, p.capacity, need)
		}
	}
	if p.rate > 0 {
		p.rate = max(p.rate, int64(busy)*leastPace) // boundOf gives each busy data connection at least leastPace
	}
}

// boundOf returns the bound of one data connection. A connection that sends little needs no bound.
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

// need is how badly the session's own connection lacks bandwidth.
type need int

const (
	none     need = iota
	waiting       // the connection has bytes to send that the network does not take
	starving      // the connection's packets are lost, or wait in a long queue
)

// nextPace returns the next bound of all data connections together, in bytes a second; 0: none. rate
// is the current bound, and capacity is the rate that the link can take. own is the need of the session's
// own connection.
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

// update asks the kernel about a connection. arrived is how many bytes have arrived since the
// last update. waits says that the connection waits for the network. It had bytes in flight for at
// least half of the interval, and has bytes that it cannot send or that were lost.
func (p *progress) update(c *carrier, interval time.Duration) (arrived int64, waits bool) {
	if c.tcp == nil {
		return 0, false
	}
	last, known := p.sending, p.known
	c.raw.Control(func(fd uintptr) {
		if s, ok := sendingOf(fd); ok {
			p.sending, p.known = s, true
		}
	})
	if !known {
		return 0, false
	}
	p.shortestTrip = min(p.shortestTrip, last.shortestTrip) // the kernel forgets the minimum after five minutes
	waits = p.busy-last.busy >= interval/2 && (p.unsent > 0 || p.retries > 0)
	return max(0, p.arrived-last.arrived), waits
}

// setBound makes the kernel send at most at rate, in bytes a second; 0: no bound.
func (p *progress) setBound(c *carrier, rate int64) {
	if p.bound != rate {
		p.bound = rate
		c.raw.Control(func(fd uintptr) { boundRate(fd, rate) })
	}
}

// isNarrow reports whether the link is too narrow for data connections.
func (s *session) isNarrow() bool { return s.own.narrow.Load() || s.pacer.narrow() }
