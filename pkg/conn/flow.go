package conn

import (
	"math"
	"sync/atomic"

	"google.golang.org/grpc/mem"

	"tunnel.example/tunnel/pkg/tunnel"
)

// maxInFlight is how many chunks of a conn may be on their way from SendMsg to the socket. At this limit
// the conn does not read from its source. So small pieces leave in large chunks when the link is the
// bottleneck, and do not wait otherwise. Bulk transfers never reach the limit: gRPC takes only 64 KiB per
// stream.
const maxInFlight = 4

// flow counts the blocks of a conn that its way has taken and not written yet. It is the
// mem.BufferPool to which the way returns them.
type flow struct {
	// Set once.
	blocks *Blocks
	turns  *Turns        // shared by the conns on the session's connection; nil: the conn has its own connection
	room   chan struct{} // signals wait that a block came back; capacity 1, so that signals merge

	inFlight atomic.Int32 // how many blocks the way has

	places atomic.Int32 // how many of the chunks in turns.held are this conn's; written under turns.mu
	round  int          // the round of turns that places belongs to; guarded by turns.mu
	had    int64        // bytes the conn was allowed to send, comparable with turns.now; guarded by turns.mu
}

var _ mem.BufferPool = (*flow)(nil)

func (f *flow) init(b *Blocks) {
	f.blocks = b
	f.room = make(chan struct{}, 1)
}

func (f *flow) add() { f.inFlight.Add(1) }

// Get implements mem.BufferPool. gRPC never calls it on the pool of a buffer.
func (f *flow) Get(int) *[]byte { return f.blocks.get() }

// Put implements mem.BufferPool: the way has written the block.
func (f *flow) Put(block *[]byte) {
	f.blocks.put(block)
	f.inFlight.Add(-1)
	f.turns.settle(f)
	select {
	case f.room <- struct{}{}:
	default:
	}
}

// turn waits until some of n bytes may be sent, or done is closed. It returns how many may.
func (f *flow) turn(n int, done <-chan struct{}) int {
	if f.turns == nil {
		return n
	}
	return f.turns.wait(f, n, done)
}

// leave gives up the places of a conn that has ended, because gRPC may drop its chunks without a Put.
func (f *flow) leave() {
	f.inFlight.Store(math.MinInt32 / 2)
	f.turns.settle(f)
}

// wait returns true when another chunk may be sent, and false when done is closed. ReadFrom and the
// sender may both wait. One signal is enough for both: after one of them has passed, the blocks that are
// still in flight come back later and signal again.
func (f *flow) wait(done <-chan struct{}) bool {
	for f.inFlight.Load() >= maxInFlight {
		select {
		case <-f.room:
		case <-done:
			return false
		}
	}
	return !tunnel.IsClosed(done)
}
