package conn

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Turns shares a session's connection among the conns that have streams on it, while the conns send more
// than the link takes. The zero value is ready: no conn waits until SetRate.
//
// gRPC sends the queued bytes of its streams round robin, up to 16 KiB of each stream in a round. The
// control stream is one of the streams. Behind a hundred bulk transfers over 1 Mbit/s, a control message
// would wait for 15 s. So Turns gives gRPC only few and small chunks at a time, and makes further chunks
// wait here. Control messages never wait here.
//
// A conn is fresh if it has less than a chunk to send, and has sent less than a chunk since the other conns
// had their last turn. Fresh conns go first: they send a request or a keystroke.
type Turns struct {
	rate atomic.Int64 // see SetRate
	busy atomic.Bool  // see SetBusy

	mu    sync.Mutex  // guards the following, and flow.round and flow.had
	held  int         // chunks that gRPC has and has not written
	round int         // goes up when stalled forgives chunks: held counts only chunks of this round
	now   int64       // how many bytes a conn was allowed so far if it always had more to send; compare flow.had
	fresh []*turn     // waiting conns that are fresh, the first one first
	rest  []*turn     // other waiting conns, the first one first
	ahead int         // turns of fresh conns in a row
	moved bool        // gRPC has written a chunk since stalled last looked
	timer *time.Timer // calls stalled; nil while no conn waits
}

// turn is one conn's wait for its turn.
type turn struct {
	flow    *flow
	n       int           // how many bytes wait; once granted is closed, how many of them may be sent
	granted chan struct{} // serveLocked closes it when bytes may be sent
}

const (
	// sharedRate is the rate from which no conn waits, in bytes a second.
	sharedRate = 16 << 20
	// leastChunk is the smallest chunk, in bytes: each chunk has some 50 bytes of overhead.
	leastChunk = 1 << 10
	// chunkTime is how long the link may take for a chunk.
	chunkTime = 16 * time.Millisecond
	// heldTime is how long the link may take for all chunks that gRPC has.
	heldTime = 4 * chunkTime
	// fewest and most bound how many chunks gRPC has, whatever the link's rate is.
	fewest, most = 2, 32
	// freshInRow is how many fresh conns in a row may go before another conn goes.
	freshInRow = 3
	// stallTime is how long gRPC may have chunks and write none of them, while the connection would take
	// bytes. After stallTime, the windows of the chunks' streams must be full, and stalled forgives the chunks.
	stallTime = 200 * time.Millisecond
)

// SetRate notes how many bytes a second the link takes; 0: unknown, and no conn waits.
func (t *Turns) SetRate(bytesPerSecond int64) { t.rate.Store(bytesPerSecond) }

// SetBusy notes whether the connection is in a write, which may wait for the link.
func (t *Turns) SetBusy(busy bool) { t.busy.Store(busy) }

// chunk returns how many bytes a chunk should have at most.
func (t *Turns) chunk() int {
	if t == nil {
		return MaxPayload
	}
	rate := t.rate.Load()
	if rate == 0 || rate >= sharedRate {
		return MaxPayload
	}
	return int(min(max(leastChunk, rate*int64(chunkTime)/int64(time.Second)), MaxPayload))
}

// isFreeLocked reports whether another chunk may go to gRPC.
func (t *Turns) isFreeLocked() bool {
	rate := t.rate.Load()
	return rate == 0 || rate >= sharedRate ||
		t.held < int(min(max(fewest, rate*int64(heldTime)/int64(time.Second)/int64(t.chunk())), most))
}

// wait waits until some of n bytes of f may be sent, and returns how many. If done is closed, it returns n.
func (t *Turns) wait(f *flow, n int, done <-chan struct{}) int {
	if rate := t.rate.Load(); n == 0 || rate == 0 || rate >= sharedRate {
		return n
	}
	t.mu.Lock()
	if len(t.fresh)+len(t.rest) == 0 && t.isFreeLocked() {
		n = t.grantLocked(f, n, false)
		t.mu.Unlock()
		return n
	}
	w := &turn{flow: f, n: n, granted: make(chan struct{})}
	if n < t.chunk() && f.had+int64(n) <= t.now+int64(t.chunk()) {
		t.fresh = append(t.fresh, w)
	} else {
		t.rest = append(t.rest, w)
	}
	if t.timer == nil {
		t.moved = true
		t.timer = time.AfterFunc(stallTime, t.stalled)
	}
	t.mu.Unlock()
	select {
	case <-w.granted:
		return w.n
	case <-done:
	}
	t.mu.Lock()
	is := func(other *turn) bool { return other == w }
	t.fresh, t.rest = slices.DeleteFunc(t.fresh, is), slices.DeleteFunc(t.rest, is)
	t.mu.Unlock()
	t.settle(f)
	return n
}

// grantLocked counts a chunk for f. It returns the chunk's bytes: n, or fewer if a chunk may not have so many now.
func (t *Turns) grantLocked(f *flow, n int, fresh bool) int {
	n = min(n, t.chunk())
	f.had = max(f.had, t.now)
	if !fresh {
		t.now = f.had
	}
	f.had += int64(n)
	if f.round != t.round {
		f.round = t.round
		f.places.Store(0)
	}
	f.places.Add(1)
	t.held++
	return n
}

// serveLocked grants turns while another chunk may go to gRPC.
func (t *Turns) serveLocked() {
	for len(t.fresh)+len(t.rest) > 0 && t.isFreeLocked() {
		from, fresh := &t.rest, false
		if len(t.fresh) > 0 && (len(t.rest) == 0 || t.ahead < freshInRow) {
			from, fresh = &t.fresh, true
			t.ahead++
		} else {
			t.ahead = 0
		}
		w := (*from)[0]
		*from = slices.Delete(*from, 0, 1)
		w.n = t.grantLocked(w.flow, w.n, fresh)
		close(w.granted)
	}
}

// settle gives up the places of f whose chunks gRPC no longer has.
func (t *Turns) settle(f *flow) {
	if t == nil || f.places.Load() == 0 {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if f.round != t.round {
		f.places.Store(0)
	}
	if back := f.places.Load() - max(0, f.inFlight.Load()); back > 0 {
		f.places.Add(-back)
		t.held -= int(back)
		t.moved = true
		t.serveLocked()
	}
}

// stalled runs every stallTime while a conn waits. It forgives chunks that gRPC cannot write: they no longer
// count as held. So conns with stalled readers do not hold up other conns.
func (t *Turns) stalled() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.fresh)+len(t.rest) == 0 {
		t.timer = nil
		return
	}
	if !t.moved && !t.busy.Load() {
		t.round++
		t.held = 0
		t.serveLocked()
	}
	t.moved = false
	t.timer.Reset(stallTime)
}
