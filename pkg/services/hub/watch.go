package hub

import (
	"context"
	"math/bits"

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
	started  bool          // the edge has got a batch; owned by the goroutine of Watch
	replaced chan struct{} // closed by a newer Watch of the node, never sent to
}

// position says which buckets and changes an edge has got, and so what the hub sends next.
type position struct {
	buckets set           // the buckets that the hub must still send whole; empty: changes are next
	after   services.Path // the last item of the first of these buckets that was sent; "": none was sent
	cursor  uint64        // the seq of the last change that was sent
	goal    uint64        // the seq of the change that ends the series of batches; equal to cursor: no series has begun
}

// set is a set of buckets, with one bit for each bucket.
type set [services.Buckets / 64]uint64

func (s *set) add(b int)    { s[b/64] |= 1 << (b % 64) }
func (s *set) remove(b int) { s[b/64] &^= 1 << (b % 64) }

func (s *set) has(b int) bool { return s[b/64]>>(b%64)&1 != 0 }

// first returns the lowest bucket of s; -1: s is empty.
func (s *set) first() int {
	for i, word := range s {
		if word != 0 {
			return i*64 + bits.TrailingZeros64(word)
		}
	}
	return -1
}

// Watch sends batches to one edge until the context of the stream is done. The hub sends a batch only after the edge
// has asked for it. So an edge that does not ask, or does not read, costs the hub no more than its position. The first
// batch comes even if the edge lacks nothing: the batch tells the edge that its state is current. A newer Watch of the
// same node ends this one at its next batch.
func (h *Hub) Watch(node tunnel.NodeName, stream pb.Services_WatchServer) error {
	asked, err := stream.Recv()
	if err != nil {
		return err
	}
	has, err := services.DecodeDigests(asked.GetDigests())
	if err != nil {
		return status.Error(codes.InvalidArgument, err.Error())
	}
	ctx := stream.Context()
	w, err := h.begin(ctx, node, has)
	if err != nil {
		return err
	}
	defer h.end(node, w)
	for {
		batch, err := h.next(ctx, w)
		if err != nil {
			return err
		}
		if err = stream.Send(batch); err != nil {
			return err
		}
		h.sent.Add(uint64(len(batch.GetChanges())))
		if asked, err = stream.Recv(); err != nil {
			return err
		}
		if len(asked.GetDigests()) > 0 {
			return status.Error(codes.InvalidArgument, "only the first Next has digests: watch again to send others")
		}
	}
}

// begin waits until the hub knows all objects, and registers a watcher. has are the digests of the items that the edge
// has: the hub sends the buckets that differ.
func (h *Hub) begin(ctx context.Context, node tunnel.NodeName, has services.Digests) (*watcher, error) {
	w := &watcher{replaced: make(chan struct{})}
	select {
	case <-h.served:
	case <-h.stopped:
		return nil, errStopped
	case <-ctx.Done():
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	w.own = h.ownLocked(node)
	digests := h.digests
	for e := range w.endpoints() {
		digests.Flip(e.path, e.value)
	}
	for b := range has {
		if has[b] != digests[b] {
			w.buckets.add(b)
		}
	}
	for e := range w.endpoints() {
		if w.buckets.has(services.Bucket(e.path)) {
			w.first = append(w.first, e)
		}
	}
	w.cursor, w.goal = h.seq, h.seq
	if before := h.watchers[node]; before != nil {
		close(before.replaced)
	}
	h.watchers[node] = w
	return w, nil
}

// end forgets a watcher.
func (h *Hub) end(node tunnel.NodeName, w *watcher) {
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

// next waits until there is something for the edge, and returns the batch.
func (h *Hub) next(ctx context.Context, w *watcher) (*pb.Batch, error) {
	for {
		h.mu.Lock()
		changed := h.changed.Next()
		batch, more, err := h.advanceLocked(w)
		h.mu.Unlock()
		switch {
		case err != nil:
			return nil, err
		case batch != nil:
			w.started = true
			encoded := batch.finish(h)
			if more && !encoded.GetMore() {
				encoded = &pb.Batch{Changes: encoded.GetChanges(), Deflated: encoded.GetDeflated(), More: true}
			}
			return encoded, nil
		}
		select {
		case <-changed:
		case <-w.replaced:
			return nil, errReplaced
		case <-h.stopped:
			return nil, errStopped
		case <-ctx.Done():
			return nil, status.FromContextError(ctx.Err()).Err()
		}
	}
}

// advanceLocked returns the next batch for the edge, and moves the edge's position behind the batch. more says that the
// series goes on after the batch. advanceLocked returns nil if there is nothing to send now. The caller holds mu.
func (h *Hub) advanceLocked(w *watcher) (b *batch, more bool, err error) {
	select {
	case <-w.replaced:
		return nil, false, errReplaced
	case <-h.stopped:
		return nil, false, errStopped
	default:
	}
	h.settleLocked()
	if w.cursor < h.floor {
		return nil, false, errBehind
	}
	shared := func() bool { return w.buckets != set{} || w.cursor < w.goal }
	if !shared() && len(w.first)+len(w.last) == 0 { // a series begins
		w.goal = h.seq
		w.last = h.differenceLocked(&w.own)
		if !shared() && len(w.last) == 0 && w.started {
			return nil, false, nil
		}
	}
	switch {
	case len(w.first) > 0:
		b, w.first = ownBatch(w.first)
	case !shared() && len(w.last) > 0:
		b, w.last = ownBatch(w.last)
	default:
		b = h.batchLocked(w.position)
		w.position = b.behind
	}
	return b, shared() || len(w.first)+len(w.last) > 0, nil
}
