package tunnel

import (
	"slices"
	"strings"
	"sync"
	"time"
)

// Repeats decides which repetitions of one log line are logged: the first one, and then one after each of
// growing intervals, from a minute to an hour. The zero value is ready to use.
type Repeats struct {
	mu    sync.Mutex // guards the following
	kinds []*repeated
}

// repeated is a line that was logged.
type repeated struct {
	text    string // without digits, since ports in it differ each time
	next    time.Time
	every   time.Duration // the interval that ends at next
	skipped int           // since the last logged one
}

const (
	repeatMin = time.Minute
	repeatMax = time.Hour
	// repeatKinds is how many texts one Repeats remembers. An edge without a cloud has two or three errors
	// that alternate. A peer may vary its text without end: all further texts count as otherText.
	repeatKinds = 8
	otherText   = "\x00" // no text of a log line
)

// Allow reports whether to log a line with this text now. If so, it also returns how many repetitions were
// skipped since the last logged one.
func (r *Repeats) Allow(text string) (skipped int, ok bool) {
	text = withoutDigits(text)
	now := time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.isFullLocked(text, now) {
		text = otherText
	}
	for _, k := range r.kinds {
		if k.text != text {
			continue
		}
		if now.Before(k.next) {
			k.skipped++
			return 0, false
		}
		skipped, k.skipped = k.skipped, 0
		k.every = min(2*k.every, repeatMax)
		k.next = now.Add(k.every)
		return skipped, true
	}
	r.kinds = append(r.kinds, &repeated{text: text, every: repeatMin, next: now.Add(repeatMin)})
	return 0, true
}

// isFullLocked reports whether there is no room for a new text, after it has forgotten the texts that were not
// repeated for long. The caller holds mu.
func (r *Repeats) isFullLocked(text string, now time.Time) bool {
	known := func(k *repeated) bool { return k.text == text }
	if len(r.kinds) < repeatKinds-1 || slices.ContainsFunc(r.kinds, known) {
		return false
	}
	r.kinds = slices.DeleteFunc(r.kinds, func(k *repeated) bool { return now.Sub(k.next) > repeatMax })
	return len(r.kinds) >= repeatKinds-1
}

// Reset forgets all lines: the next one is logged. Call it when the fault is over.
func (r *Repeats) Reset() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.kinds = nil
}

// withoutDigits returns text without digits.
func withoutDigits(text string) string {
	return strings.Map(func(c rune) rune {
		if '0' <= c && c <= '9' {
			return -1
		}
		return c
	}, text)
}
