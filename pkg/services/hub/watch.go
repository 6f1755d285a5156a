package hub

import (
	"context"
	"math/bits"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/pkg/services"
	pb "tunnel.example/tunnel/pkg/services/servicesv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// watcher is what the hub keeps for one edge whose Watch runs.
type watcher struct {
	// position and own are guarded by Hub.mu. Only next changes the position.
	position
	own
	whole   bool                    // a series of whole buckets is under way; guarded by Hub.mu
	part    int                     // in such a series: buckets below are being sent; guarded by Hub.mu
	started bool                    // the edge has got a batch; owned by the goroutine of Watch
	end     context.CancelCauseFunc // ends the Watch with a status; set once
}

// position says which buckets and changes an edge has got, and so what the hub sends next.
type position struct {
	buckets set           // the buckets that the hub must still send whole; empty: changes are next
	after   services.Path // the last item of the first of these buckets that was sent; "": none was sent
	cursor  uint64        // the seq of the last change that was sent
	goal    uint64        // the seq of the last change of the series
}

// set is a set of buckets, with one bit for each bucket.
type set [services.Buckets / 64]uint64

func (s *set) add(b int)    { s[b/64] |= 1 << (b % 64) }
func (s *set) remove(b int) { s[b/64] &^= 1 << (b % 64) }

func (s *set) has(b int) bool { return s[b/64]>>(b%64)&1 != 0 }

// cut removes all buckets from n on, and returns them.
func (s *set) cut(n int) (from set) {
	for b := n; b < services.Buckets; b++ {
		if s.has(b) {
			s.remove(b)
			from.add(b)
		}
	}
	return from
}

// join adds the buckets of another set.
func (s *set) join(other set) {
	for i, word := range other {
		s[i] |= word
	}
}

// first returns the lowest bucket of s; -1: s is empty.
func (s *set) first() int {
	for i, word := range s {
		if word != 0 {
			return i*64 + bits.TrailingZeros64(word)
		}
	}
	return -1
}

// Watch sends batches to one edge until the context of the stream is done. Apart from a few small ones (unasked), the
// hub sends a batch only after the edge has asked for it. So an edge that does not ask, or does not read, costs the hub
// no more than its position, and a note of the Services in Hub.apart that have changed. The first batch comes even if
// the edge lacks nothing: the batch tells the edge that its state is current. A newer Watch of the same node ends this
// one at its next batch.
func (h *Hub) Watch(node tunnel.NodeName, stream pb.Services_WatchServer) error {
	asked, err := stream.Recv()
	if err != nil {
		return err
	}
	has, err := services.DecodeDigests(asked.GetDigests())
	if err != nil {
		return status.Error(codes.InvalidArgument, err.Error())
	}
	ahead := unasked{heeded: asked.GetUnasked()}
	ctx, end := context.WithCancelCause(stream.Context())
	defer end(nil)
	w, err := h.begin(ctx, node, has, end)
	if err != nil {
		return err
	}
	defer h.forget(node, w)
	for {
		batch, err := h.next(ctx, w)
		if err != nil {
			return err
		}
		batch.Unasked = ahead.permits(batch)
		if err = stream.Send(batch); err != nil {
			return err
		}
		h.sent.Add(uint64(len(batch.GetChanges())))
		if batch.GetUnasked() {
			continue
		}
		if asked, err = stream.Recv(); err != nil {
			return err
		}
		if len(asked.GetDigests()) > 0 {
			return status.Error(codes.InvalidArgument, "only the first Next has digests: watch again to send others")
		}
	}
}

const (
	// maxUnasked and maxUnaskedBytes bound the batches after the last Next. A request for each batch would cost more than
	// most batches do: half of the cloud's processor time, and on the wire some 100 bytes with all headers.
	maxUnasked      = 16
	maxUnaskedBytes = 4 << 10
)

// unasked counts the batches that were sent after the last Next.
type unasked struct {
	heeded  bool // the edge heeds Batch.unasked
	batches int
	bytes   int
}

// permits reports whether another batch may follow the batch b without a Next. b is about to be sent.
func (u *unasked) permits(b *pb.Batch) bool {
	u.batches++
	u.bytes += len(b.GetChanges())
	if u.heeded && !b.GetMore() && u.batches < maxUnasked && u.bytes < maxUnaskedBytes {
		return true
	}
	u.batches, u.bytes = 0, 0
	return false
}

// begin waits until the hub knows all objects, and registers a watcher. has are the digests of the items that the edge
// has: the hub sends the buckets that differ. The hub calls end to end the Watch.
func (h *Hub) begin(
	ctx context.Context, node tunnel.NodeName, has services.Digests, end context.CancelCauseFunc,
) (*watcher, error) {
	w := &watcher{end: end}
	select {
	case <-h.served:
	case <-h.stopped:
		return nil, errStopped
	case <-ctx.Done():
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if tunnel.IsClosed(h.stopped) {
		return nil, errStopped
	}
	h.beginLocked(w, node, has)
	w.cursor, w.goal = h.seq, h.seq
	if before := h.watchers[node]; before != nil {
		before.end(errReplaced)
	}
	h.watchers[node] = w
	return w, nil
}

// forget forgets a watcher.
func (h *Hub) forget(node tunnel.NodeName, w *watcher) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.watchers[node] == w {
		delete(h.watchers, node)
	}
}

var (
	errStopped  = status.Error(codes.Aborted, "this replica of the cloud is stopping")
	errReplaced = status.Error(codes.Aborted, "a newer Watch of this node has begun")
	errBehind   = status.Error(codes.Aborted, "too many items were deleted since the last batch: watch again")
)

// next waits until there is something for the edge, and returns the batch. It fails when ctx is done.
func (h *Hub) next(ctx context.Context, w *watcher) (*pb.Batch, error) {
	for ctx.Err() == nil {
		h.mu.Lock()
		changed := h.changed.Next()
		batch, more, err := h.advanceLocked(w)
		h.mu.Unlock()
		switch {
		case err != nil:
			return nil, err
		case batch != nil:
			w.started = true
			changes, deflated := batch.finish(h)
			return &pb.Batch{Changes: changes, Deflated: deflated, More: more}, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
		}
	}
	if cause := context.Cause(ctx); status.Code(cause) == codes.Aborted { // watcher.end
		return nil, cause
	}
	return nil, status.FromContextError(ctx.Err()).Err()
}

// advanceLocked returns the next batch for the edge, and moves the edge's position behind the batch. more says that the
// series goes on after the batch. advanceLocked returns nil if there is nothing to send now. The caller holds mu.
func (h *Hub) advanceLocked(w *watcher) (b *batch, more bool, err error) {
	h.settleLocked()
	if w.cursor < h.floor {
		return nil, false, errBehind
	}
	inSeries := func() bool { return w.buckets != set{} || w.cursor < w.goal || len(w.last) > 0 }
	if !inSeries() {
		h.catchUpLocked(w)
		if !inSeries() && w.started {
			return nil, false, nil
		}
	}
	if w.buckets == (set{}) && w.cursor == w.goal && len(w.last) > 0 {
		b, w.last = ownBatch(w.last)
		return b, inSeries(), nil
	}
	at, later := w.position, set{}
	if w.whole {
		if b = w.firstBatch(); b != nil {
			return b, true, nil
		}
		later = at.buckets.cut(w.part)
	}
	b = h.batchLocked(at)
	w.position = b.behind
	w.buckets.join(later)
	if w.whole && w.buckets == (set{}) {
		// The edge has each bucket as it was at some time of the series. The series ends with what has changed meanwhile:
		// otherwise an endpoint could be missing whose Service was put apart before its bucket was sent.
		w.whole = false
		h.catchUpLocked(w)
	}
	return b, inSeries(), nil
}

// firstBatch returns a batch with endpoints of w.first that come next, or nil if batches for all nodes come next. It
// divides the buckets into parts, each with endpoints for about one batch: so a part arrives whole soon, and not only
// after the endpoints of all buckets.
func (w *watcher) firstBatch() *batch {
	if next := w.buckets.first(); next >= w.part {
		w.part = services.Buckets
		size := 0
		for _, c := range w.first {
			if size += len(c.path) + len(c.value); size > maxChanges && c.bucket > next {
				w.part = c.bucket
				break
			}
		}
	}
	n := slices.IndexFunc(w.first, func(c *change) bool { return c.bucket >= w.part })
	if n < 0 {
		n = len(w.first)
	}
	if n == 0 {
		return nil
	}
	b, rest := ownBatch(w.first[:n])
	w.first = w.first[n-len(rest):]
	return b
}

// catchUpLocked makes the series go on to what has changed until now. The caller holds mu.
func (h *Hub) catchUpLocked(w *watcher) {
	w.goal = h.seq
	w.last = h.differenceLocked(&w.own)
}
