package conn

import (
	"sync"
	"time"
)

// deadline is a point in time at which a blocked Read or Write gives up. It can be moved while they wait.
// The zero value is a deadline that is not set.
type deadline struct {
	mu      sync.Mutex    // guards the following
	timer   *time.Timer   // calls passLocked; nil: there is no deadline, or it has passed
	expired chan struct{} // closed when the deadline has passed; nil until it is needed, see expiredLocked
	passed  bool          // expired is closed
}

// set moves the deadline to t; the zero time means none.
func (d *deadline) set(t time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
	if d.passed {
		d.expired, d.passed = nil, false
	}
	if t.IsZero() {
		return
	}
	left := time.Until(t)
	if left <= 0 {
		d.passLocked()
		return
	}
	// A timer that could not be stopped in time finds another channel or another
	// timer in place, and does nothing.
	var timer *time.Timer
	timer = time.AfterFunc(left, func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		if d.timer == timer {
			d.passLocked()
		}
	})
	d.timer = timer
}

func (d *deadline) passLocked() {
	if !d.passed {
		close(d.expiredLocked())
		d.passed = true
	}
}

// expiredLocked returns expired. It makes the channel at the first call, since most conns never need one.
func (d *deadline) expiredLocked() chan struct{} {
	if d.expired == nil {
		d.expired = make(chan struct{})
	}
	return d.expired
}

// wait returns a channel that is closed when the deadline has passed.
func (d *deadline) wait() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.expiredLocked()
}
