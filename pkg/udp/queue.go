package udp

import (
	"cmp"
	"encoding/binary"
	"io"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// queueSize is how many bytes of frames of one conn may wait to be sent. A single flow may take half of
	// the queue. With 50,000 datagrams of 1,200 bytes a second, this half holds 34 ms: a process may wait so
	// long for a processor.
	queueSize = 4 << 20
	// controlReserve is how many bytes beyond queueSize are reserved for ends.
	controlReserve = 64 << 10
	// maxWait is how long a datagram may wait. Later it is of little use, since its sender has sent it
	// again or has given up. It would only delay the datagrams behind it.
	maxWait = 500 * time.Millisecond
	// shortLull is for how long a receiver must have had nothing to do so that the next datagram counts as one that
	// comes alone. A burst is sent faster by Read, which takes many datagrams at a time.
	shortLull = 30 * time.Microsecond
	// keepQueue is the capacity that an idle queue keeps, in bytes.
	keepQueue = 4 << 10
	// entryHeader is the length of the header of an entry: the time in milliseconds since queue.began,
	// and the length of the frame with entryKeep.
	entryHeader = 4 + 4
	// entryKeep marks an entry that is never too late: it begins or ends a flow.
	entryKeep = 1 << 31
)

// queue holds the frames that wait to be sent over a conn. Adding a frame never waits: if the queue is
// full, the frame is dropped. Read gives the bytes of many frames at a time to the sender of the conn.
//
// The queue has two buffers: frames are added to in, and Read takes the frames of out. When Read has
// taken all of out, the buffers change places.
type queue struct {
	// Set once.
	counters *Counters
	passed   *traffic      // counts the datagrams that were handed over
	late     time.Duration // see maxWait
	lull     *lull         // of all queues to which one goroutine adds datagrams
	began    time.Time     // origin of the times in entries
	wake     chan struct{} // wakes Read when a frame waits; capacity 1, since one token is enough

	alone sync.Mutex        // held by sendAlone
	head  [frameHeader]byte // of a datagram that sendAlone sends; guarded by alone

	mu      sync.Mutex // guards the following, and share
	in, out []byte     // entries
	pos     int        // how much of out was taken
	left    int        // bytes of the entry at pos that Read has not taken; 0: pos is at the header of an entry
	cycle   uint32     // how often in and out have changed places; share.bytes is valid for one cycle
	open    time.Time  // since when the conn is open; time before it does not make a datagram late
	waiting bool       // Read waits for wake, so everything that was added before is sent
	ended   error      // no frame can be added; Read returns this error when all frames are taken; nil: not ended

	try func(head, body []byte) bool // see wire.SetTrySend; nil: no frame can be sent at once
}

// lull tells datagrams that come alone from those of a burst.
type lull struct {
	handled atomic.Int64 // when the last datagram was sent or queued, in nanoseconds since 1970
}

// is reports whether no datagram was handled for shortLull.
func (l *lull) is(now time.Time) bool { return now.UnixNano()-l.handled.Load() >= int64(shortLull) }

// ends notes that a datagram was handled.
func (l *lull) ends() { l.handled.Store(time.Now().UnixNano()) }

// share is how much of a queue a flow has taken. The zero value is ready.
type share struct {
	cycle uint32 // the queue's cycle when bytes last changed
	bytes int    // how many bytes of the flow are in queue.in
}

// newQueue returns an empty queue. It counts in c the datagrams that it drops, and in passed the datagrams
// that it hands over. A datagram that has waited for late is dropped; 0: maxWait.
func newQueue(c *Counters, passed *traffic, late time.Duration) *queue {
	now := time.Now()
	return &queue{
		counters: c, passed: passed, late: cmp.Or(late, maxWait), lull: new(lull), began: now,
		open: now, wake: make(chan struct{}, 1),
	}
}

// add adds a frame with a datagram of a flow: a datagram, or an open. If there is no room, add
// returns why, and adds nothing.
//
// A flow may have at most as many bytes in the queue as are free. So a flow that sends more than the
// conn can carry leaves room for the other flows.
func (q *queue) add(s *share, k kind, id flowID, payload []byte, now time.Time) (drop Reason, ok bool) {
	n := frameHeader + len(payload)
	q.mu.Lock()
	if q.ended != nil {
		q.mu.Unlock()
		return DropLost, false
	}
	if s.cycle != q.cycle {
		s.cycle, s.bytes = q.cycle, 0
	}
	if s.bytes+entryHeader+n > queueSize-q.usedLocked() {
		q.mu.Unlock()
		return DropFull, false
	}
	s.bytes += entryHeader + n
	q.addLocked(k, id, payload, k == kindOpen, now)
	wakes := q.wakesLocked()
	q.mu.Unlock()
	q.wakeIf(wakes) // Read would wait for mu otherwise
	return 0, true
}

// send sends a datagram of an open flow in its caller's goroutine, if the datagram comes alone, no frame waits, and the
// network takes it at once. Otherwise it adds the datagram. It returns why the datagram is dropped.
func (q *queue) send(s *share, id flowID, payload []byte, now time.Time) (drop Reason, ok bool) {
	defer q.lull.ends() // behind a write: on a slow machine the next datagrams have come meanwhile, and are a burst
	if q.lull.is(now) && q.sendAlone(id, payload) {
		q.passed.add(1, len(payload))
		return 0, true
	}
	return q.add(s, kindDatagram, id, payload, now)
}

// sendAlone sends a datagram if no frame waits and the network takes it at once.
func (q *queue) sendAlone(id flowID, payload []byte) bool {
	q.mu.Lock()
	try, waiting := q.try, q.waiting
	q.mu.Unlock()
	if try == nil || !waiting || !q.alone.TryLock() {
		return false
	}
	defer q.alone.Unlock()
	putHeader(q.head[:], kindDatagram, id, len(payload))
	return try(q.head[:], payload)
}

// control adds a frame that is not a datagram. If there is no room, it drops the frame: the other side
// ends idle flows by itself.
func (q *queue) control(k kind, id flowID, payload []byte) {
	q.mu.Lock()
	defer q.mu.Unlock()
	n := frameHeader + len(payload)
	if q.ended != nil || entryHeader+n > queueSize+controlReserve-q.usedLocked() {
		return
	}
	q.addLocked(k, id, payload, true, time.Now())
	q.wakeIf(q.wakesLocked())
}

func (q *queue) usedLocked() int { return len(q.in) + len(q.out) - q.pos }

// addLocked appends an entry. If keep is true, the entry is never too late.
func (q *queue) addLocked(k kind, id flowID, payload []byte, keep bool, now time.Time) {
	size := uint32(frameHeader + len(payload)) //nolint:gosec // less than 24 bits
	if keep {
		size |= entryKeep
	}
	var header [entryHeader + frameHeader]byte
	binary.NativeEndian.PutUint32(header[:], q.stamp(now))
	binary.NativeEndian.PutUint32(header[4:], size)
	putHeader(header[entryHeader:], k, id, len(payload))
	q.in = append(append(q.in, header[:]...), payload...)
}

// stamp returns a time in milliseconds since began. After 49 days the number wraps to 0.
func (q *queue) stamp(t time.Time) uint32 {
	return uint32(t.Sub(q.began).Milliseconds()) //nolint:gosec // it wraps on purpose
}

// wakesLocked reports whether Read waits. The caller then calls wakeIf.
func (q *queue) wakesLocked() bool {
	waits := q.waiting
	q.waiting = false
	return waits
}

// wakeIf wakes Read.
func (q *queue) wakeIf(waits bool) {
	if !waits {
		return
	}
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// opened notes that the conn is open only now. Call it before the first Read.
func (q *queue) opened() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.open = time.Now()
}

// Read implements io.Reader: it takes as many whole frames as fit into p, or waits for a frame. It
// takes a frame in parts only if p is shorter than the frame.
func (q *queue) Read(p []byte) (int, error) {
	for {
		n, err := q.take(p)
		if n > 0 || err != nil || len(p) == 0 {
			return n, err
		}
		<-q.wake
	}
}

// take is Read without waiting: it returns 0 and nil if there is no frame. Then the next frame that is
// added puts a token into wake.
func (q *queue) take(p []byte) (n int, err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	now := time.Now()
	datagrams, bytes := 0, 0
	for n < len(p) {
		if q.left == 0 {
			if !q.nextLocked(now, len(p)-n, n == 0) {
				break
			}
			if size, ok := datagramSize(q.out[q.pos : q.pos+q.left]); ok {
				datagrams, bytes = datagrams+1, bytes+size
			}
		}
		m := copy(p[n:], q.out[q.pos:q.pos+q.left])
		n, q.pos, q.left = n+m, q.pos+m, q.left-m
	}
	if n > 0 {
		q.passed.add(datagrams, bytes)
		return n, nil
	}
	if q.ended != nil {
		return 0, q.ended
	}
	q.waiting = true
	return 0, nil
}

// nextLocked moves pos to the next entry that is not too late. It returns false if there is no such
// entry, or if the entry has more than room bytes. If first is true, the entry may be longer than room.
func (q *queue) nextLocked(now time.Time, room int, first bool) bool {
	for {
		if q.pos == len(q.out) {
			if len(q.in) == 0 {
				return false
			}
			q.in, q.out, q.pos = q.out[:0], q.in, 0
			q.cycle++
		}
		stamp := binary.NativeEndian.Uint32(q.out[q.pos:])
		size := binary.NativeEndian.Uint32(q.out[q.pos+4:])
		n := int(size &^ entryKeep)
		switch {
		case size&entryKeep == 0 && q.lateLocked(now, stamp):
			q.counters.Drop(DropLate, 1)
			q.pos += entryHeader + n
			continue
		case n > room && !first:
			return false
		}
		q.pos, q.left = q.pos+entryHeader, n
		return true
	}
}

// lateLocked reports whether a datagram with this stamp has waited too long.
func (q *queue) lateLocked(now time.Time, stamp uint32) bool {
	waited := time.Duration(q.stamp(now)-stamp) * time.Millisecond
	return waited > q.late && now.Sub(q.open) > q.late
}

// end ends the queue: no frame can be added. Read returns the frames that wait, and then io.EOF.
func (q *queue) end() { q.close(io.EOF) }

func (q *queue) close(err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.ended == nil {
		q.ended = err
	}
	q.waiting = false
	q.wakeIf(true)
}

// abort ends the queue, drops the frames that wait, and counts their datagrams under the reason why.
// Read then returns err.
func (q *queue) abort(err error, why Reason) {
	q.close(err)
	q.mu.Lock()
	defer q.mu.Unlock()
	q.ended = err
	q.pos += q.left // skip the rest of an entry that Read has begun to take; the entry counts as sent
	lost := countDatagrams(q.out[q.pos:]) + countDatagrams(q.in)
	q.counters.Drop(why, lost)
	q.in, q.out, q.pos, q.left = nil, nil, 0, 0
}

// datagramSize returns the size of the datagram in a frame that add has added. ok is false for an end.
func datagramSize(frame []byte) (size int, ok bool) {
	payload := frame[frameHeader:]
	switch kind(frame[0]) {
	case kindDatagram:
		return len(payload), true
	case kindOpen:
		return openingSize(payload), true
	default:
		return 0, false
	}
}

// countDatagrams counts the entries that hold a datagram.
func countDatagrams(entries []byte) (n uint64) {
	for len(entries) > 0 {
		size := int(binary.NativeEndian.Uint32(entries[4:]) &^ entryKeep)
		if _, ok := datagramSize(entries[entryHeader : entryHeader+size]); ok {
			n++
		}
		entries = entries[entryHeader+size:]
	}
	return n
}

// trim frees memory if no frame waits.
func (q *queue) trim() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.usedLocked() == 0 && q.left == 0 && cap(q.in)+cap(q.out) > 2*keepQueue {
		q.in, q.out, q.pos = nil, nil, 0
	}
}
