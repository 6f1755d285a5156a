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

// Queue limits the opens and the conns of a node. An open that finds no room waits, as a TCP
// connection waits in a backlog:
//
//	if refusal := q.Enter(ctx, s.Done(), r); refusal != nil {
//		return refusal
//	}
//	conn, refusal := dial(ctx, r)
//	q.Dialled(r.Addr, refusal.Answered())
//	…
//	q.Over() // the conn has ended, or the dial has failed
//
// Opens of one source wait in order. Sources take turns, so a flood from one source delays each
// other source by one open. An open is refused only where waiting is pointless: its context has
// ended, or the queue is full. It is also refused if its target or the node has used up its share
// of Dials and does not answer.
//
// Set the exported fields before the first Enter. Any goroutine may call the methods.
type Queue struct {
	Name string // for the texts of refusals, "node edge1" for example
	// Conns is how many conns may exist at once, conns that are being dialled included; 0: no
	// limit. At most twice the larger of Conns and Dials may wait.
	Conns int
	// Dials is how many opens may be unanswered at once; 0: no limit. Targets that have not
	// answered yet may together have half of Dials.
	Dials int
	// Take applies the limit of opens per second. It either counts one open and returns 0, or it
	// returns how long to wait until the next open is allowed. Queue calls it with mu held. nil:
	// no limit.
	Take     func() time.Duration
	Counters *Counters

	mu       sync.Mutex         // guards the following
	conns    int                // opens that Enter let in and for which Over was not called yet
	all      unanswered         // the node's unanswered opens, of all targets
	unproven int                // sum of target.unproven
	targets  map[string]*target // by address
	idle     list.List          // elements *target: targets without opens and waiters; evicted from the front
	sources  map[origin]*source // sources that have waiters
	turns    list.List          // elements *source; the front source has the next turn
	waiting  int                // waiters of all sources
	// minDialsFree is how much of Dials must be free before any waiter that waits for Dials can
	// get in.
	minDialsFree int
	rateLimited  bool        // Take has refused the next waiter; tickLocked clears it
	looked       time.Time   // when tickLocked last looked for hopeless waiters
	wake         *time.Timer // calls tickLocked at wakeAt; nil: no tick is needed
	wakeAt       time.Time
}

// Budget bounds the dials and conns of an edge. Clouds, proxy-servers and traces share one budget.
type Budget interface {
	// Admit waits for room for a dial and its conn, and counts both. After a refusal neither is counted.
	Admit(ctx context.Context, r Request) *Refusal
	// Dialled is called once for each admitted dial, when the dial has ended with err.
	Dialled(r Request, err error)
	// Over is called once for each admitted dial, when its conn is over or the dial has failed.
	Over()
}

const (
	// silenceTimeout is how long a target or a node may answer none of its opens before opens
	// beyond its share are refused. A distant link (600 ms), a retransmission and the edge's TCP
	// handshake together take less.
	silenceTimeout = 2 * time.Second
	// silenceInterval is how often the queue looks for waiters that wait for such a target or node.
	silenceInterval = silenceTimeout / 4
	// trustPeriod is how long after an answer a target keeps the share of a target that answers.
	trustPeriod = 10 * time.Minute
	// newTargetOpens is how many unanswered opens a target may have before its first answer.
	newTargetOpens = 2
	// maxIdleTargets is how many targets without opens are remembered, or twice Dials if that is
	// more. The share of such a target depends on whether it answered its earlier opens.
	maxIdleTargets = 1024
)

// unanswered counts the unanswered opens of a node or of a target.
type unanswered struct {
	n          int       // unanswered opens
	since      time.Time // the time of the last answer, or when n became 1 if that was later
	lastAnswer time.Time // zero: no answer yet
}

func (u *unanswered) add(now time.Time) {
	if u.n++; u.n == 1 {
		u.since = now
	}
}

func (u *unanswered) remove(now time.Time, answered bool) {
	if u.n--; answered {
		u.since, u.lastAnswer = now, now
	}
}

// quiet reports whether there are unanswered opens and no answer came for silenceTimeout.
func (u *unanswered) quiet(now time.Time) bool { return u.n > 0 && now.Sub(u.since) >= silenceTimeout }

// target is what the queue knows about an address. Queue.mu guards it.
type target struct {
	unanswered
	addr string
	// unproven counts the target's opens that were let in while its share was limited, see shareLocked.
	unproven int
	// fellSilent: an open ended without an answer while the node answered opens of other
	// targets. The next answer clears it.
	fellSilent bool
	waiting    int           // its waiters
	idle       *list.Element // element of this target in Queue.idle; nil: the target has opens or waiters
}

// origin identifies the caller of an open: its address range, or its name if the caller is
// not given as an address.
type origin struct {
	group netip.Prefix
	name  string
}

// source is an origin that has waiters. Queue.mu guards it.
type source struct {
	origin  origin
	waiters list.List     // elements *waiter, in order of arrival
	turn    *list.Element // element of this source in Queue.turns
}

// waiter is a waiting open. Queue.mu guards it.
type waiter struct {
	target  *target
	from    *source
	place   *list.Element // element of this waiter in from.waiters
	settled bool          // it was let in or refused
	refusal *Refusal      // nil: it was let in; set before ready is closed
	ready   chan struct{} // settleLocked closes it; nothing is sent, so it has no buffer
}

// Enter waits for room for an open, until ctx is done or the channel ended is closed. When
// Enter returns nil, the caller must call Dialled once and Over once. Enter refuses an address above
// MaxAddr, because the queue remembers addresses.
func (q *Queue) Enter(ctx context.Context, ended <-chan struct{}, r Request) *Refusal {
	if len(r.Addr) > MaxAddr {
		return Refusef(Unreachable, "a target has %d bytes at most, and this one has %d", MaxAddr, len(r.Addr))
	}
	began := time.Now()
	q.mu.Lock()
	t := q.targetLocked(r.Addr)
	// With no waiters there is no order to keep: the open needs no place in the queue.
	if q.waiting == 0 && q.roomLocked() && q.fitsLocked(t, began) && q.startLocked(t, began) {
		q.mu.Unlock()
		return nil
	}
	w := &waiter{target: t, ready: make(chan struct{})}
	q.enqueueLocked(w, r.Caller)
	if w.target.waiting == 1 && q.roomLocked() && q.fitsLocked(w.target, began) { // earlier waiters of the target go first
		q.admitLocked(w, began)
	}
	if !w.settled {
		switch maxWaiting := 2 * max(q.Conns, q.Dials); {
		case r.NoWait:
			_, text := q.limitLocked(w.target, began)
			q.settleLocked(w, Refusef(Overloaded, "%s", text)) // not counted: the caller tries another node
		case q.hopelessLocked(w.target, began):
			q.refuseLocked(w, began, "; no answer has come for %s", silenceTimeout)
		case q.waiting > maxWaiting:
			q.refuseLocked(q.evicteeLocked(w.from), began, "; %d more opens wait", maxWaiting)
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
	case IsClosed(ended):
		q.settleLocked(w, Refusef(Gone, "the session of %s has ended", q.Name))
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		q.refuseLocked(w, now, "; this open has waited for %s", now.Sub(began).Round(100*time.Millisecond))
	default:
		q.settleLocked(w, Refusef(Gone, "the caller has gone"))
	}
	return w.refusal
}

// Dialled ends the dial of an open that Enter let in. answered: the target has accepted, or the
// edge knows why it has not.
func (q *Queue) Dialled(addr string, answered bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	now := time.Now()
	t := q.targets[addr] // not nil: the target has an open
	if !answered && q.silentLocked(t) {
		t.fellSilent = true
	}
	t.remove(now, answered)
	q.all.remove(now, answered)
	full := q.unprovenFullLocked()
	if answered {
		t.fellSilent = false
	}
	if t.unproven > 0 {
		t.unproven--
		q.unproven--
	}
	only := t // nil: the room has changed for waiters of all targets
	if full && !q.unprovenFullLocked() || q.Dials-q.all.n >= q.minDialsFree {
		only = nil
	}
	q.advanceLocked(now, only)
	q.setIdleLocked(t)
}

// Over stops counting a conn that Enter let in: the conn has ended, or its dial has failed.
func (q *Queue) Over() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.conns--; q.conns == q.Conns-1 { // only at the limit do opens wait for a conn to end
		q.advanceLocked(time.Now(), nil)
	}
}

// InUse returns the number of conns, and how many of them are being dialled.
func (q *Queue) InUse() (conns, dials int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.conns, q.all.n
}

// targetLocked returns the target with an address. The caller holds mu, as for every method whose name
// ends in Locked. The target is no longer idle: the caller lets an open of it in, or enqueues one.
func (q *Queue) targetLocked(addr string) *target {
	t := q.targets[addr]
	switch {
	case t == nil:
		if q.targets == nil {
			q.targets = make(map[string]*target)
		}
		t = &target{addr: addr}
		q.targets[addr] = t
	case t.idle != nil:
		q.idle.Remove(t.idle)
		t.idle = nil
	}
	return t
}

// enqueueLocked appends w to the waiters of its source.
func (q *Queue) enqueueLocked(w *waiter, caller string) {
	o := origin{name: caller}
	if a, err := netip.ParseAddrPort(caller); err == nil {
		o = origin{group: group(a.Addr())}
	}
	if q.sources == nil {
		q.sources = make(map[origin]*source)
	}
	s := q.sources[o]
	if s == nil {
		s = &source{origin: o}
		s.turn = q.turns.PushBack(s)
		q.sources[o] = s
	}
	w.from, w.place = s, s.waiters.PushBack(w)
	w.target.waiting++
	q.waiting++
	q.Counters.Waiting.Add(1)
}

// group returns the range of addresses that counts as one source: an IPv4 address, or an IPv6
// /64.
func group(a netip.Addr) netip.Prefix {
	a = a.Unmap().WithZone("")
	bits := 32
	if a.Is6() {
		bits = 64
	}
	p, _ := a.Prefix(bits) // no error: an address of this family has at least that many bits
	return p
}

// settleLocked removes w from the queue: with a refusal, or let in if refusal is nil.
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
	q.setIdleLocked(w.target)
}

// setIdleLocked moves t to the idle targets if it has no opens and no waiters. The queue remembers idle
// targets because shareLocked gives a smaller share to a target that did not answer. If there are too
// many idle targets, setIdleLocked evicts one, first one that never answered.
func (q *Queue) setIdleLocked(t *target) {
	switch {
	case t.n > 0 || t.waiting > 0 || t.idle != nil:
		return
	case !t.lastAnswer.IsZero():
		t.idle = q.idle.PushBack(t)
	case t.fellSilent:
		t.idle = q.idle.PushFront(t)
	default: // the target never answered and never fell silent: there is nothing to remember
		delete(q.targets, t.addr)
	}
	if q.idle.Len() > max(maxIdleTargets, 2*q.Dials) {
		old := q.idle.Remove(q.idle.Front()).(*target)
		delete(q.targets, old.addr)
	}
}

// refuseLocked refuses w, naming the limit that w waits for, and counts that limit.
func (q *Queue) refuseLocked(w *waiter, now time.Time, why string, args ...any) {
	limit, text := q.limitLocked(w.target, now)
	q.Counters.Limited(limit)
	q.settleLocked(w, Refusef(Overloaded, "%s", text+fmt.Sprintf(why, args...)))
}

// advanceLocked lets in waiters while there is room, each source in its turn. only is the one
// target whose waiters may fit; nil: any target's waiters may fit.
func (q *Queue) advanceLocked(now time.Time, only *target) {
	for {
		w := q.nextLocked(now, only)
		if w == nil || !q.admitLocked(w, now) {
			break
		}
	}
	q.watchLocked()
}

// admitLocked lets w in, unless Take says that the limit of opens per second is reached. It
// reports whether w is in.
func (q *Queue) admitLocked(w *waiter, now time.Time) bool {
	if !q.startLocked(w.target, now) {
		return false
	}
	q.turns.MoveToBack(w.from.turn) // the other sources have their turns first
	q.settleLocked(w, nil)
	return true
}

// startLocked counts an open of t that is let in, unless Take says that the limit of opens per second
// is reached. It reports whether the open is in.
func (q *Queue) startLocked(t *target, now time.Time) bool {
	if q.Take != nil {
		if wait := q.Take(); wait > 0 {
			q.rateLimited = true
			q.wakeLocked(wait)
			return false
		}
	}
	if _, unproven := q.shareLocked(t, now); unproven {
		t.unproven++
		q.unproven++
	}
	q.conns++
	q.all.add(now)
	t.add(now)
	return true
}

// watchLocked schedules tickLocked while opens wait for answers. tickLocked refuses waiters whose
// target or node has become silent.
func (q *Queue) watchLocked() {
	if q.waiting > 0 && (q.Conns == 0 || q.conns < q.Conns) {
		q.wakeLocked(time.Until(q.looked.Add(silenceInterval)))
	}
}

// roomLocked reports whether the node has room for one more open, whatever its target.
func (q *Queue) roomLocked() bool {
	if q.Dials > 0 && q.all.n >= q.Dials {
		q.minDialsFree = 1
		return false
	}
	return !q.rateLimited && (q.Conns == 0 || q.conns < q.Conns)
}

// nextLocked returns the waiter that gets in next; nil: there is room for none. If only is not
// nil, only waiters of that target are considered.
func (q *Queue) nextLocked(now time.Time, only *target) *waiter {
	if q.waiting == 0 || only != nil && (only.waiting == 0 || !q.fitsLocked(only, now)) || !q.roomLocked() {
		return nil
	}
	if only == nil {
		q.minDialsFree = q.Dials // fitsLocked lowers it below
	}
	for e := q.turns.Front(); e != nil; e = e.Next() {
		// full is the last target without room. Neighbouring waiters often have the same target,
		// so this saves most calls of fitsLocked.
		var full *target
		for f := e.Value.(*source).waiters.Front(); f != nil; f = f.Next() {
			w := f.Value.(*waiter)
			if w.target == only || only == nil && w.target != full && q.fitsLocked(w.target, now) {
				return w
			}
			full = w.target
		}
	}
	return nil
}

// silentLocked reports whether a target answers none of its opens while the node answers opens
// of other targets. If the node answers nothing at all, no target counts as silent: the link may
// be slow or cut.
func (q *Queue) silentLocked(t *target) bool {
	return t.n > 0 && q.all.lastAnswer.Sub(t.since) >= silenceTimeout
}

// shareLocked returns how many unanswered opens a target may have, and whether the next one
// counts as unproven. Unproven opens of all targets together may use half of Dials.
func (q *Queue) shareLocked(t *target, now time.Time) (share int, unproven bool) {
	known := !t.fellSilent && !t.lastAnswer.IsZero() && now.Sub(t.lastAnswer) < trustPeriod
	switch silent := q.silentLocked(t); {
	case known && !silent:
		return q.Dials, false
	case known:
		return max(newTargetOpens, q.Dials/8), true
	case t.fellSilent || silent:
		return 1, true
	}
	return newTargetOpens, true
}

func (q *Queue) unprovenFullLocked() bool { return q.unproven >= (q.Dials+1)/2 }

// fitsLocked reports whether Dials has room for one more open of a target. A target may have at
// most as many unanswered opens as Dials has free, so one target alone uses half of Dials.
// Targets that never answer therefore leave room for targets that do.
func (q *Queue) fitsLocked(t *target, now time.Time) bool {
	if q.Dials == 0 {
		return true
	}
	share, unproven := q.shareLocked(t, now)
	switch left := q.Dials - q.all.n; {
	case t.n >= share || unproven && q.unprovenFullLocked():
		return false
	case t.n >= left:
		q.minDialsFree = min(q.minDialsFree, t.n+1)
		return false
	}
	return true
}

// hopelessLocked reports whether an open would wait for answers that do not come: answers of its
// target if the target has used up its share, else answers of the node.
func (q *Queue) hopelessLocked(t *target, now time.Time) bool {
	if q.fitsLocked(t, now) {
		return false
	}
	if share, _ := q.shareLocked(t, now); t.n >= share {
		return t.quiet(now)
	}
	return q.all.quiet(now)
}

// limitLocked returns the limit that an open of t waits for, and a text about it.
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

// evicteeLocked returns the waiter that a full queue refuses: the newest one of the source with
// the most waiters. If s has as many as any other source, it is s.
func (q *Queue) evicteeLocked(s *source) *waiter {
	for e := q.turns.Front(); e != nil; e = e.Next() {
		if o := e.Value.(*source); o.waiters.Len() > s.waiters.Len() {
			s = o
		}
	}
	return s.waiters.Back().Value.(*waiter)
}

// wakeLocked schedules tickLocked after in, unless an earlier tick is already scheduled.
func (q *Queue) wakeLocked(in time.Duration) {
	in = max(in, time.Millisecond)
	at := time.Now().Add(in)
	if q.wake != nil {
		if !at.Before(q.wakeAt) {
			return
		}
		// If the old timer's function already waits for mu, it finds that q.wake is another timer
		// and does nothing.
		q.wake.Stop()
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

// tickLocked refuses waiters that became hopeless with time, and lets in waiters that the limit
// of opens per second held back. That limit may cause a tick every millisecond, so most ticks do not look at all
// waiters.
func (q *Queue) tickLocked() {
	q.wake, q.rateLimited = nil, false
	now := time.Now()
	if now.Sub(q.looked) >= silenceInterval {
		q.looked = now
		q.refuseHopelessLocked(now)
	}
	q.advanceLocked(now, nil)
}

// refuseHopelessLocked refuses each waiter that waits for answers that do not come.
func (q *Queue) refuseHopelessLocked(now time.Time) {
	for e := q.turns.Front(); e != nil; {
		s := e.Value.(*source)
		e = e.Next()
		for f := s.waiters.Front(); f != nil; {
			w := f.Value.(*waiter)
			f = f.Next()
			if q.hopelessLocked(w.target, now) {
				q.refuseLocked(w, now, "; no answer has come for %s", silenceTimeout)
			}
		}
	}
}
