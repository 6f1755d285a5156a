package tunnel

// Change wakes the goroutines that wait for a change of some state. The zero value is ready for use.
// The lock that guards the state guards the Change, too: the caller of each method holds it.
//
//	mu.Lock()
//	changed := change.Next() // before the state is read, so that no change is missed
//	…                        // read the state
//	mu.Unlock()
//	<-changed
type Change struct {
	next chan struct{} // closed at the next change, never sent to; nil: no goroutine waits
}

// Next returns a channel that is closed at the next call of Notify.
func (c *Change) Next() <-chan struct{} {
	if c.next == nil {
		c.next = make(chan struct{})
	}
	return c.next
}

// Notify closes the channel of Next, which wakes all waiting goroutines.
func (c *Change) Notify() {
	if c.next != nil {
		close(c.next)
		c.next = nil
	}
}
