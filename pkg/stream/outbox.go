package stream

import (
	"sync"

	"tunnel/pkg/tunnel"
)

// outbox holds the messages that wait to be written to a control stream. Putting one
// in never waits, so that receive loops and aborts may do it. It is a slice and not a
// channel, because it must have room for what a thousand conns may say at once and
// cost next to nothing while a node is idle.
type outbox struct {
	wake chan struct{} // to sendLoop: something is there; one token is enough

	mu    sync.Mutex // guards the following
	queue []*tunnel.Message
}

func (o *outbox) init() { o.wake = make(chan struct{}, 1) }

// put appends m, unless limit messages wait already.
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

// take returns all that waits, in order.
func (o *outbox) take() []*tunnel.Message {
	o.mu.Lock()
	defer o.mu.Unlock()
	all := o.queue
	o.queue = nil
	return all
}
