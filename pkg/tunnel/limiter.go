package tunnel

import (
	"sync"
	"time"
)

// Limiter limits log lines that a peer can cause. It allows a few events in each interval
// and counts the others. The zero value allows one event a minute.
type Limiter struct {
	Every time.Duration // the interval; 0: a minute
	Burst int           // events allowed in each interval; 0: one

	mu      sync.Mutex // guards the following
	until   time.Time  // the end of the interval; the first event after it starts the next interval
	allowed int        // events allowed in this interval
	skipped int        // events not allowed since the last allowed one
}

// Allow reports whether to log now. If so, it also returns how many events were skipped
// since the last allowed one.
func (l *Limiter) Allow() (skipped int, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	if !now.Before(l.until) {
		every := l.Every
		if every == 0 {
			every = time.Minute
		}
		l.until, l.allowed = now.Add(every), 0
	}
	if l.allowed >= max(1, l.Burst) {
		l.skipped++
		return 0, false
	}
	l.allowed++
	skipped, l.skipped = l.skipped, 0
	return skipped, true
}
