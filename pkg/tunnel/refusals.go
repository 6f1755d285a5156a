package tunnel

import (
	"strings"
	"sync"
	"time"
)

const (
	maxRefusals    = 100 // how many events Refusals keeps
	maxRefusalText = 300 // bytes kept of each text in an event, since callers choose names and paths
)

// Refusals keeps the last events whose result is not [ResultOK], for the status page. The zero value is ready to use.
// Any goroutine may call any method.
type Refusals struct {
	mu   sync.Mutex // guards the following
	last []Event    // a ring, once it has maxRefusals elements
	next int        // index of the oldest element of a full ring
}

// Record keeps e, if its result is not [ResultOK]. It is a [Trail].
func (r *Refusals) Record(e Event) {
	if e.Result == ResultOK {
		return
	}
	if e.Time.IsZero() {
		e.Time = time.Now()
	}
	e.Time = e.Time.UTC()
	for _, text := range []*string{&e.Caller, &e.Remote, &e.Door, &e.Target, &e.Method, &e.Path, &e.By, &e.Err} {
		*text = beginning(*text)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.last) < maxRefusals {
		r.last = append(r.last, e)
		return
	}
	r.last[r.next] = e
	r.next = (r.next + 1) % maxRefusals
}

// beginning returns a copy of the first maxRefusalText bytes of a text. Without the copy, a text that is part of a
// longer string, such as a request line, would keep the whole string in memory.
func beginning(text string) string {
	if len(text) > maxRefusalText {
		return strings.ToValidUTF8(text[:maxRefusalText], "") + "…"
	}
	return strings.Clone(text)
}

// Last returns the events, the newest first.
func (r *Refusals) Last() []Event {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := make([]Event, 0, len(r.last))
	for i := range r.last {
		all = append(all, r.last[(r.next+len(r.last)-1-i)%len(r.last)])
	}
	return all
}

// And returns a trail that hands each event to both trails. Either may be nil.
func (t Trail) And(other Trail) Trail {
	switch {
	case t == nil:
		return other
	case other == nil:
		return t
	}
	return func(e Event) {
		t(e)
		other(e)
	}
}
