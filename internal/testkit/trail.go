package testkit

import (
	"slices"
	"sync"
)

// Trail collects values, such as events of the audit. The zero value is empty and ready for use. Its methods are
// safe for concurrent use.
type Trail[E any] struct {
	mu  sync.Mutex // guards the following
	all []E
}

// Record adds a value.
func (t *Trail[E]) Record(e E) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.all = append(t.all, e)
}

// All returns the values in their order.
func (t *Trail[E]) All() []E {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.all)
}
