package tunnel

import (
	"container/list"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"
)

// Queue bounds the opens of a node and the conns that come of them. An open that finds no
// room waits, as a TCP connection waits in a backlog:
//
//	if refusal := q.Enter(ctx, s.Done(), r); refusal != nil {
//		return refusal
//	}
//	conn, refusal := dial(ctx, r)
//	q.Dialled(r.Addr, refusal.Answered())
//	…
//	q.Over() // the conn has ended, or the dial has failed
//
// Opens of one source wait in order, and sources take turns, so that a flood of one source
// delays the others by one open each. An open is refused only where waiting is pointless:
// its time is over, the queue is full, or its target or the node has used up its share of
// Dials and does not answer.
//
// Set the fields before the first Enter. Any goroutine may call the methods.
type Queue struct {
	Name     string               // in refusals, "node edge1" for example
	Conns    int                  // conns at once, those being dialled included; 0: no limit. Twice as many may wait
	Dials    int                  // opens without an answer, half of them for targets that have not answered yet; 0: no limit
	Take     func() time.Duration // counts one open of this second and returns 0, or returns how long until there is one; nil: no limit
	Counters *Counters

	mu      sync.Mutex // guards the following
	conns   int
	all     unanswered // opens of the node
	doubts  int        // of all targets
	targets map[string]*target
	idle    list.List // of *target: those without opens and waiters; the first is forgotten first
	sources map[origin]*source
	turns   list.List   // of *source; the first has the next turn
	waiting int         // waiters of all sources
	enough  int         // so much must be left of Dials before a waiter may fit that Dials had no room for
	late    bool        // the first waiter waits for Take
	wake    *time.Timer // calls tick at wakeAt; nil: nothing waits for time to pass
	wakeAt  time.Time
}

const (
	// silence is how long a target, or a node, may leave all its opens without an answer
	// before opens beyond its share are refused. A far link (600 ms), a retransmission and
	// a TCP handshake of the edge pass in less.
	silence = 2 * time.Second
	// trust is how long a target that has answered is believed to answer again.
	trust = 10 * time.Minute
	// tries is how many opens a target may leave without an answer before its first answer.
	tries = 2
	// mostIdle is how many targets without opens are remembered, or twice Dials if that is more.
	mostIdle = 1024
)

// unanswered counts opens without an answer, of a node or of a target.
type unanswered struct {
	n     int
	since time.Time // of the last answer, or of the first of the n opens
	heard time.Time // of the last answer; zero: there was none
}

func (u *unanswered) add(now time.Time) {
	if u.n++; u.n == 1 {
		u.since = now
	}
}

func (u *unanswered) remove(now time.Time, answered bool) {
	if u.n--; answered {
		u.since, u.heard = now, now
	}
}

// quiet reports whether opens wait, and none was answered for a while.
func (u *unanswered) quiet(now time.Time) bool { return u.n > 0 && now.Sub(u.since) >= silence }

// target is what is known of an address.
type target struct {
	unanswered
	addr    string
	doubts  int           // of its opens: those that were let in while it had no more than a small share
	mute    bool          // the last open has ended in silence, though the node answered others
	waiting int           // waiters
	idle    *list.Element // of Queue.idle
}

// origin is where opens come from: an address, or a name where there is no address.
type origin struct {
	group netip.Prefix
	name  string
}

// source is an origin that has waiters.
type source struct {
	origin  origin
	waiters list.List     // of *waiter, in order of arrival
	turn    *list.Element // of Queue.turns
}

// waiter is an open that waits.
type waiter struct {
	target  *target
	from    *source
	place   *list.Element // of from.waiters
	settled bool
	refusal *Refusal      // why it does not get in; set before ready is closed
	ready   chan struct{} // closed when settled
}

// Enter waits for room for an open, until ctx is done or the channel ended is closed. When
// it returns nil, the caller owes one call of Dialled and one of Over.
func (q *Queue) Enter(ctx context.Context, ended <-chan struct{}, r Request) *Refusal {
	began := time.Now()
	w := &waiter{ready: make(chan struct{})}
	q.mu.Lock()
	q.joinLocked(w, r)
	if w.target.waiting == 1 && q.roomLocked() && q.fitsLocked(w.target, began) { // else others wait for the same
		q.admitLocked(w, began)
	}
	if !w.settled {
		switch most := 2 * max(q.Conns, q.Dials); {
		case r.NoWait:
			_, text := q.limitLocked(w.target, began)
			q.settleLocked(w, Refusef(Overloaded, "%s", text)) // not counted: the caller asks elsewhere
		case q.hopelessLocked(w.target, began):
			q.refuseLocked(w, began, "; no answer has come for %s", silence)
		case q.waiting > most:
			q.refuseLocked(q.lastLocked(w.from), began, "; %d more opens wait", most)
		}
		q.watchLocked()
	}
	q.mu.Unlock()

	select {
	case <-w.ready:
		return w.refusal
	case <-ctx.Done():
	case <-ended:
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	switch now := time.Now(); {
	case w.settled:
	case isDone(ended):
		q.settleLocked(w, Refusef(Gone, "the session of %s has ended", q.Name))
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		q.refuseLocked(w, now, "; this open has waited for %s", now.Sub(began).Round(100*time.Millisecond))
	default:
		q.settleLocked(w, Refusef(Gone, "the caller has gone"))
	}
	return w.refusal
}

// Dialled ends the dial of an open that Enter let in. answered says that its target is
// there, or that the edge knows why not.
func (q *Queue) Dialled(addr string, answered bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	now := time.Now()
	t := q.targets[addr] // it has an open
	if !answered && q.silentLocked(t) {
		t.mute = true
	}
	t.remove(now, answered)
	q.all.remove(now, answered)
	full := q.doubtsFullLocked()
	if answered {
		t.mute = false
	}
	if t.doubts > 0 {
		t.doubts--
		q.doubts--
	}
	of := t // what others wait for is as it was
	if full && !q.doubtsFullLocked() || q.Dials-q.all.n >= q.enough {
		of = nil
	}
	q.advanceLocked(now, of)
	q.restLocked(t)
}

// Over makes room for another conn.
func (q *Queue) Over() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.conns--; q.conns == q.Conns-1 { // else nobody has waited for it
		q.advanceLocked(time.Now(), nil)
	}
}

// InUse returns how many conns there are, and how many of them are being dialled.
func (q *Queue) InUse() (conns, dials int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.conns, q.all.n
}

// joinLocked appends w to the waiters of its source.
func (q *Queue) joinLocked(w *waiter, r Request) {
	o := origin{name: r.Caller}
	if a, err := netip.ParseAddrPort(r.Caller); err == nil {
		o = origin{group: group(a.Addr())}
	}
	if q.sources == nil {
		q.sources, q.targets = make(map[origin]*source), make(map[string]*target)
	}
	s := q.sources[o]
	if s == nil {
		s = &source{origin: o}
		s.turn = q.turns.PushBack(s)
		q.sources[o] = s
	}
	t := q.targets[r.Addr]
	if t == nil {
		t = &target{addr: r.Addr}
		q.targets[r.Addr] = t
	} else if t.idle != nil {
		q.idle.Remove(t.idle)
		t.idle = nil
	}
	w.from, w.target, w.place = s, t, s.waiters.PushBack(w)
	t.waiting++
	q.waiting++
	q.Counters.Waiting.Add(1)
}

// group returns what counts as one source: an IPv4 address, or an IPv6 /64.
func group(a netip.Addr) netip.Prefix {
	a = a.Unmap().WithZone("")
	bits := 32
	if a.Is6() {
		bits = 64
	}
	p, _ := a.Prefix(bits) // it has so many
	return p
}

// settleLocked decides about a waiter: a refusal, or nil lets it in.
func (q *Queue) settleLocked(w *waiter, refusal *Refusal) {
	w.settled, w.refusal = true, refusal
	close(w.ready)
	q.waiting--
	q.Counters.Waiting.Add(-1)
	s := w.from
	s.waiters.Remove(w.place)
	if s.waiters.Len() == 0 {
		q.turns.Remove(s.turn)
		delete(q.sources, s.origin)
	}
	w.target.waiting--
	q.restLocked(w.target)
}

// restLocked puts a target aside that has no opens and no waiters. A target that has not
// answered is forgotten before those that have.
func (q *Queue) restLocked(t *target) {
	switch {
	case t.n > 0 || t.waiting > 0 || t.idle != nil:
		return
	case !t.heard.IsZero():
		t.idle = q.idle.PushBack(t)
	case t.mute:
		t.idle = q.idle.PushFront(t)
	default: // nothing is known of it
		delete(q.targets, t.addr)
	}
	if q.idle.Len() > max(mostIdle, 2*q.Dials) {
		old := q.idle.Remove(q.idle.Front()).(*target)
		delete(q.targets, old.addr)
	}
}

// refuseLocked refuses a waiter because of the limit that it waits for, and counts that.
func (q *Queue) refuseLocked(w *waiter, now time.Time, why string, args ...any) {
	limit, text := q.limitLocked(w.target, now)
	q.Counters.Limited(limit)
	q.settleLocked(w, Refusef(Overloaded, "%s", text+fmt.Sprintf(why, args...)))
}

// advanceLocked lets in all waiters that there is room for, each source in its turn. of is
// the only target whose waiters may fit, nil if all may.
func (q *Queue) advanceLocked(now time.Time, of *target) {
	for {
		w := q.nextLocked(now, of)
		if w == nil || !q.admitLocked(w, now) {
			break
		}
	}
	q.watchLocked()
}

// admitLocked lets a waiter in, unless the rate is reached.
func (q *Queue) admitLocked(w *waiter, now time.Time) bool {
	if q.Take != nil {
		if wait := q.Take(); wait > 0 {
			q.late = true
			q.wakeLocked(wait)
			return false
		}
	}
	t := w.target
	if _, doubt := q.shareLocked(t, now); doubt {
		t.doubts++
		q.doubts++
	}
	q.conns++
	q.all.add(now)
	t.add(now)
	q.turns.MoveToBack(w.from.turn) // the other sources come first now
	q.settleLocked(w, nil)
	return true
}

// watchLocked has tick look whether the target or the node of a waiter falls silent.
func (q *Queue) watchLocked() {
	if q.waiting > 0 && (q.Conns == 0 || q.conns < q.Conns) {
		q.wakeLocked(silence / 4)
	}
}

// roomLocked reports whether an open may be let in, of some target.
func (q *Queue) roomLocked() bool {
	if q.Dials > 0 && q.all.n >= q.Dials {
		q.enough = 1
		return false
	}
	return !q.late && (q.Conns == 0 || q.conns < q.Conns)
}

// nextLocked returns the waiter who is the next to get in; nil: there is no room.
func (q *Queue) nextLocked(now time.Time, of *target) *waiter {
	if q.waiting == 0 || of != nil && (of.waiting == 0 || !q.fitsLocked(of, now)) || !q.roomLocked() {
		return nil
	}
	if of == nil {
		q.enough = q.Dials
	}
	for e := q.turns.Front(); e != nil; e = e.Next() {
		var full *target // that was looked at last: neighbours often have the same
		for f := e.Value.(*source).waiters.Front(); f != nil; f = f.Next() {
			w := f.Value.(*waiter)
			if w.target == of || of == nil && w.target != full && q.fitsLocked(w.target, now) {
				return w
			}
			full = w.target
		}
	}
	return nil
}

// silentLocked reports whether a target leaves its opens without an answer while the node
// answers others. Where nothing is answered, the link may be slow or cut.
func (q *Queue) silentLocked(t *target) bool { return t.n > 0 && q.all.heard.Sub(t.since) >= silence }

// shareLocked returns how many unanswered opens a target may have, and whether they are
// doubts: all doubts have half of Dials together.
func (q *Queue) shareLocked(t *target, now time.Time) (share int, doubt bool) {
	known := !t.mute && !t.heard.IsZero() && now.Sub(t.heard) < trust
	switch silent := q.silentLocked(t); {
	case known && !silent:
		return q.Dials, false
	case known:
		return max(tries, q.Dials/8), true
	case t.mute || silent:
		return 1, true
	}
	return tries, true
}

func (q *Queue) doubtsFullLocked() bool { return q.doubts >= (q.Dials+1)/2 }

// fitsLocked reports whether Dials has room for one more open of a target. A target may have
// as many unanswered opens as there is room left: one target uses half of Dials. So targets
// that never answer leave room for those that do.
func (q *Queue) fitsLocked(t *target, now time.Time) bool {
	if q.Dials == 0 {
		return true
	}
	share, doubt := q.shareLocked(t, now)
	switch left := q.Dials - q.all.n; {
	case t.n >= share || doubt && q.doubtsFullLocked():
		return false
	case t.n >= left:
		q.enough = min(q.enough, t.n+1)
		return false
	}
	return true
}

// hopelessLocked reports whether an open would wait for answers that do not come: of its
// target where that has used up its share, else of the node.
func (q *Queue) hopelessLocked(t *target, now time.Time) bool {
	if q.fitsLocked(t, now) {
		return false
	}
	if share, _ := q.shareLocked(t, now); t.n >= share {
		return t.quiet(now)
	}
	return q.all.quiet(now)
}

// limitLocked returns what an open of t waits for.
func (q *Queue) limitLocked(t *target, now time.Time) (l Limit, text string) {
	switch {
	case q.Conns > 0 && q.conns >= q.Conns:
		l, text = LimitConns, fmt.Sprintf("%s has %d conns", q.Name, q.conns)
	case q.fitsLocked(t, now):
		l, text = LimitOpens, fmt.Sprintf("%s has had as many opens as it may in a second", q.Name)
	case t.n > 0:
		l, text = LimitDials, fmt.Sprintf("%s has %d opens to answer, %d of them of %s", q.Name, q.all.n, t.n, t.addr)
	default:
		l, text = LimitDials, fmt.Sprintf("%s has %d opens to answer", q.Name, q.all.n)
	}
	return l, fmt.Sprintf("limit %s: %s", l, text)
}

// lastLocked returns the waiter who goes when the queue is full: the last one of the source
// that has most, or of s if that has as many.
func (q *Queue) lastLocked(s *source) *waiter {
	for e := q.turns.Front(); e != nil; e = e.Next() {
		if o := e.Value.(*source); o.waiters.Len() > s.waiters.Len() {
			s = o
		}
	}
	return s.waiters.Back().Value.(*waiter)
}

// wakeLocked has tick called after a while, or earlier.
func (q *Queue) wakeLocked(in time.Duration) {
	in = max(in, time.Millisecond)
	at := time.Now().Add(in)
	if q.wake != nil {
		if !at.Before(q.wakeAt) {
			return
		}
		q.wake.Stop() // its tick may wait for mu already, and finds that it is not the one
	}
	q.wakeAt = at
	var own *time.Timer
	own = time.AfterFunc(in, func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		if q.wake == own {
			q.tickLocked()
		}
	})
	q.wake = own
}

// tickLocked looks at the waiters again because time has passed.
func (q *Queue) tickLocked() {
	q.wake, q.late = nil, false
	now := time.Now()
	for e := q.turns.Front(); e != nil; {
		s := e.Value.(*source)
		e = e.Next()
		for f := s.waiters.Front(); f != nil; {
			w := f.Value.(*waiter)
			f = f.Next()
			if q.hopelessLocked(w.target, now) {
				q.refuseLocked(w, now, "; no answer has come for %s", silence)
			}
		}
	}
	q.advanceLocked(now, nil)
}

func isDone(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
