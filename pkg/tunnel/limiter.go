package tunnel

import (
	"sync"
	"time"
)

// Limiter bounds the log lines that somebody else decides on: it lets a few events
// through in each interval and counts the others. The zero value lets one through a
// minute.
type Limiter struct {
	Every time.Duration // the interval; 0: a minute
	Burst int           // events in each; 0: one

	mu      sync.Mutex // guards the following
	until   time.Time  // the end of the interval; the next one begins with an event
	passed  int        // in the interval
	skipped int
}

// Allow reports whether to log now, and how many were skipped since the last time.
func (l *Limiter) Allow() (skipped int, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	if !now.Before(l.until) {
		every := l.Every
		if every == 0 {
			every = time.Minute
		}
		l.until, l.passed = now.Add(every), 0
	}
	if l.passed >= max(1, l.Burst) {
		l.skipped++
		return 0, false
	}
	l.passed++
	skipped, l.skipped = l.skipped, 0
	return skipped, true
}
