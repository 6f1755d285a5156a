package stream

import (
	"sync"

	"tunnel.example/tunnel/pkg/tunnel"
)

// outbox holds the messages that wait for sendLoop to write them to a control stream. put never
// blocks, so that receive loops and aborts may call it. The queue is a slice and not a channel. It
// must have room for the messages of a thousand conns at once, but an idle node must cost almost no
// memory.
type outbox struct {
	wake chan struct{} // tells sendLoop that the queue has messages; capacity 1: one signal is enough

	mu    sync.Mutex        // guards the following
	queue []*tunnel.Message // oldest first
}

// init must be called before put.
func (o *outbox) init() { o.wake = make(chan struct{}, 1) }

// put appends m, unless limit messages wait already. It reports whether it appended m.
func (o *outbox) put(m *tunnel.Message, limit int) bool {
	o.mu.Lock()
	if len(o.queue) >= limit {
		o.mu.Unlock()
		return false
	}
	o.queue = append(o.queue, m)
	o.mu.Unlock()
	select {
	case o.wake <- struct{}{}:
	default:
	}
	return true
}

// take removes and returns all waiting messages, the oldest first.
func (o *outbox) take() []*tunnel.Message {
	o.mu.Lock()
	defer o.mu.Unlock()
	all := o.queue
	o.queue = nil
	return all
}
