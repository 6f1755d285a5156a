package wsconn

import (
	"sync"
	"time"
)

// deadline tells a waiting reader that its time is over. The caller may set it again at any time, also
// after it has passed.
type deadline struct {
	mu    sync.Mutex // guards the following
	timer *time.Timer
	over  chan struct{} // closed when the deadline has passed
}

func newDeadline() *deadline { return &deadline{over: make(chan struct{})} }

// passed returns a channel that is closed when the deadline passes. A reader that waits for the channel
// also notices a deadline that is set meanwhile, unless the old one has passed before.
func (d *deadline) passed() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.over
}

// set sets the deadline. The zero time means none.
func (d *deadline) set(t time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.timer != nil && !d.timer.Stop() {
		<-d.over // the timer has fired: its func closes the channel without the mutex
	}
	d.timer = nil
	isOver := false
	select {
	case <-d.over:
		isOver = true
	default:
	}
	left := time.Until(t)
	switch {
	case t.IsZero() || left > 0:
		if isOver {
			d.over = make(chan struct{})
		}
		if !t.IsZero() {
			over := d.over
			d.timer = time.AfterFunc(left, func() { close(over) })
		}
	case !isOver:
		close(d.over)
	}
}
