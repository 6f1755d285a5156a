package tunnel

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
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
// its time is over, the queue is full, or neither its target nor the node answers.
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
	doubts  int                    // of all targets
	all     unanswered             // opens of the node
	targets map[string]*unanswered // by address: those with opens, and some that had
	sources []*source              // sources with waiters; the first has the next turn
	waiting int                    // waiters of all sources
	wake    *time.Timer            // calls tick at wakeAt; nil: nothing waits for time to pass
	wakeAt  time.Time
}

const (
	// silence is how long a target, or a node, may leave all its opens without an answer
	// before more of them are refused. A far link (600 ms), a retransmission and a TCP
	// handshake of the edge pass in less.
	silence = 2 * time.Second
	// trust is how long a target that has answered is believed to answer again.
	trust = 10 * time.Minute
	// tries is how many opens a target may leave without an answer before its first answer.
	tries = 2
	// mostTargets is how many targets are remembered that have no open.
	mostTargets = 1024
)

// unanswered counts opens without an answer, of a node or of a target.
type unanswered struct {
	n      int
	doubts int       // of the n: opens that were let in before the target was known to answer
	since  time.Time // of the last answer, or of the first of the n opens
	heard  time.Time // of the last answer; zero: there was none
	mute   bool      // the last open has ended in silence
}

func (u *unanswered) add(now time.Time, doubt bool) {
	if u.n++; u.n == 1 {
		u.since = now
	}
	if doubt {
		u.doubts++
	}
}

// remove undoes add, and reports whether one of the doubts has ended.
func (u *unanswered) remove(now time.Time, answered bool) (doubt bool) {
	switch {
	case answered:
		u.since, u.heard, u.mute = now, now, false
	case now.Sub(u.since) >= silence: // else the caller was in a hurry
		u.mute = true
	}
	u.n--
	if doubt = u.doubts > 0; doubt {
		u.doubts--
	}
	return doubt
}

// silent reports whether opens wait, and none was answered for a while.
func (u *unanswered) silent(now time.Time) bool { return u.n > 0 && now.Sub(u.since) >= silence }

func (u *unanswered) answers(now time.Time) bool {
	return !u.heard.IsZero() && now.Sub(u.heard) < trust && !u.mute && !u.silent(now)
}

// source is a caller's address, or its name where it has no address.
type source struct {
	group   netip.Prefix
	name    string
	waiters []*waiter // in order of arrival
}

// waiter is an open that waits.
type waiter struct {
	addr    string
	from    *source
	settled bool
	refusal *Refusal      // why it does not get in; set before ready is closed
	ready   chan struct{} // closed when settled
}

// Enter waits for room for an open, until ctx is done or the channel ended is closed. When
// it returns nil, the caller owes one call of Dialled and one of Over.
func (q *Queue) Enter(ctx context.Context, ended <-chan struct{}, r Request) *Refusal {
	began := time.Now()
	w := &waiter{addr: r.Addr, ready: make(chan struct{})}
	q.mu.Lock()
	q.joinLocked(w, r.Caller)
	q.advanceLocked(began)
	if !w.settled {
		switch most := 2 * max(q.Conns, q.Dials); {
		case r.NoWait:
			_, text := q.limitLocked(w.addr, began)
			q.settleLocked(w, Refusef(Overloaded, "%s", text)) // not counted: the caller asks elsewhere
		case q.hopelessLocked(w.addr, began):
			q.refuseLocked(w, began, "; no answer has come for %s", silence)
		case q.waiting > most:
			q.refuseLocked(q.lastLocked(w.from), began, "; %d more opens wait", most)
		}
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
	q.all.remove(now, answered)
	if t := q.targets[addr]; t != nil {
		if t.remove(now, answered) {
			q.doubts--
		}
	}
	q.advanceLocked(now)
}

// Over makes room for another conn.
func (q *Queue) Over() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.conns--; q.conns == q.Conns-1 { // else nobody has waited for it
		q.advanceLocked(time.Now())
	}
}

// InUse returns how many conns there are, and how many of them are being dialled.
func (q *Queue) InUse() (conns, dials int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.conns, q.all.n
}

// joinLocked appends w to the waiters of its source.
func (q *Queue) joinLocked(w *waiter, caller string) {
	s := source{name: caller}
	if a, err := netip.ParseAddrPort(caller); err == nil {
		s.name, s.group = "", group(a.Addr())
	}
	at := slices.IndexFunc(q.sources, func(o *source) bool { return o.group == s.group && o.name == s.name })
	if at < 0 {
		at = len(q.sources)
		q.sources = append(q.sources, &s)
	}
	w.from = q.sources[at]
	w.from.waiters = append(w.from.waiters, w)
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
	s := w.from
	at := slices.Index(s.waiters, w)
	if at == 0 {
		s.waiters = s.waiters[1:]
	} else {
		s.waiters = slices.Delete(s.waiters, at, at+1)
	}
	q.waiting--
	q.Counters.Waiting.Add(-1)
	if len(s.waiters) == 0 {
		q.sources = slices.DeleteFunc(q.sources, func(o *source) bool { return o == s })
	}
}

// refuseLocked refuses a waiter because of the limit that it waits for, and counts that.
func (q *Queue) refuseLocked(w *waiter, now time.Time, why string, args ...any) {
	limit, text := q.limitLocked(w.addr, now)
	q.Counters.Limited(limit)
	q.settleLocked(w, Refusef(Overloaded, "%s", text+fmt.Sprintf(why, args...)))
}

// advanceLocked lets in all waiters that there is room for, each source in its turn.
func (q *Queue) advanceLocked(now time.Time) {
	for q.waiting > 0 {
		w := q.nextLocked(now)
		if w == nil {
			break
		}
		if q.Take != nil {
			if wait := q.Take(); wait > 0 {
				q.wakeLocked(wait)
				return
			}
		}
		q.conns++
		q.all.add(now, false)
		if q.Dials > 0 {
			t := q.targetLocked(w.addr)
			doubt := !t.answers(now)
			t.add(now, doubt)
			if doubt {
				q.doubts++
			}
		}
		s := w.from
		q.settleLocked(w, nil)
		if len(q.sources) > 1 && len(s.waiters) > 0 { // the other sources come first now
			at := slices.Index(q.sources, s)
			q.sources = append(slices.Delete(q.sources, at, at+1), s)
		}
	}
	if q.waiting > 0 && (q.Conns == 0 || q.conns < q.Conns) {
		q.wakeLocked(silence / 4) // the target or the node may fall silent
	}
}

// nextLocked returns the waiter who is the next to get in; nil: there is no room.
func (q *Queue) nextLocked(now time.Time) *waiter {
	if q.Conns > 0 && q.conns >= q.Conns || q.Dials > 0 && q.all.n >= q.Dials {
		return nil
	}
	for _, s := range q.sources {
		full := "" // the address that was looked at last: neighbours often have the same
		for _, w := range s.waiters {
			if w.addr != full || full == "" {
				if q.fitsLocked(w.addr, now) {
					return w
				}
				full = w.addr
			}
		}
	}
	return nil
}

// targetLocked returns what is known of an address, and remembers it from now on.
func (q *Queue) targetLocked(addr string) *unanswered {
	t := q.targets[addr]
	if t != nil {
		return t
	}
	if q.targets == nil {
		q.targets = make(map[string]*unanswered)
	}
	if len(q.targets) >= mostTargets {
		for old, o := range q.targets {
			if o.n == 0 {
				delete(q.targets, old)
				break
			}
		}
	}
	t = new(unanswered)
	q.targets[addr] = t
	return t
}

// fitsLocked reports whether Dials has room for one more open of addr. A target may have as
// many unanswered opens as there is room left: one target uses half of Dials. Targets that
// have not answered yet have two each, those that were silent one, and half of Dials
// together. So targets that never answer leave room for those that do.
func (q *Queue) fitsLocked(addr string, now time.Time) bool {
	if q.Dials == 0 {
		return true
	}
	t := q.targets[addr]
	if t == nil {
		t = new(unanswered)
	}
	switch left := q.Dials - q.all.n; {
	case t.n >= left:
		return false
	case t.answers(now):
		return true
	case q.doubts >= (q.Dials+1)/2:
		return false
	case t.mute || t.silent(now):
		return t.n == 0
	}
	return t.n < tries
}

// hopelessLocked reports whether an open of addr would wait for answers that do not come.
func (q *Queue) hopelessLocked(addr string, now time.Time) bool {
	if q.fitsLocked(addr, now) {
		return false
	}
	t := q.targets[addr]
	return t != nil && t.silent(now) || q.all.silent(now)
}

// limitLocked returns what an open of addr waits for.
func (q *Queue) limitLocked(addr string, now time.Time) (l Limit, text string) {
	switch {
	case q.Conns > 0 && q.conns >= q.Conns:
		l, text = LimitConns, fmt.Sprintf("%s has %d conns", q.Name, q.conns)
	case q.fitsLocked(addr, now):
		l, text = LimitOpens, fmt.Sprintf("%s has had as many opens as it may in a second", q.Name)
	case q.targets[addr] != nil && q.targets[addr].n > 0:
		l, text = LimitDials, fmt.Sprintf("%s has %d opens to answer, %d of them of %s", q.Name, q.all.n, q.targets[addr].n, addr)
	default:
		l, text = LimitDials, fmt.Sprintf("%s has %d opens to answer", q.Name, q.all.n)
	}
	return l, fmt.Sprintf("limit %s: %s", l, text)
}

// lastLocked returns the waiter who goes when the queue is full: the last one of the source
// that has most, or of s if that has as many.
func (q *Queue) lastLocked(s *source) *waiter {
	for _, o := range q.sources {
		if len(o.waiters) > len(s.waiters) {
			s = o
		}
	}
	return s.waiters[len(s.waiters)-1]
}

// wakeLocked has tick called after a while, or earlier.
func (q *Queue) wakeLocked(in time.Duration) {
	in = max(in, time.Millisecond)
	at := time.Now().Add(in)
	switch {
	case q.wake == nil:
		q.wake = time.AfterFunc(in, q.tick)
	case at.Before(q.wakeAt):
		q.wake.Reset(in)
	default:
		return
	}
	q.wakeAt = at
}

// tick looks at the waiters again because time has passed.
func (q *Queue) tick() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.wake = nil
	now := time.Now()
	for _, s := range slices.Clone(q.sources) {
		for _, w := range slices.Clone(s.waiters) {
			if q.hopelessLocked(w.addr, now) {
				q.refuseLocked(w, now, "; no answer has come for %s", silence)
			}
		}
	}
	q.advanceLocked(now)
}

func isDone(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
