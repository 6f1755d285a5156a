package relay

import (
	"bytes"
	"compress/flate"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"runtime"
	"runtime/debug"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"tunnel.example/tunnel/pkg/services"
	pb "tunnel.example/tunnel/pkg/services/servicesv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// These bound what a cloud may send. A cluster of 10,000 Services with 20 endpoints each needs a fourth of them.
const (
	maxBatch  = 1 << 20   // bytes of one batch, when it is not compressed; clouds send 64 KiB
	maxSeries = 128 << 20 // bytes of the batches of one series, with batchCost for each batch
	batchCost = 1 << 10   // what each batch counts in addition, so that empty batches reach maxSeries, too
	maxEntry  = 1 << 20   // items, deletions and buckets of one series: an empty one takes some 100 bytes of memory
	maxPath   = 1 << 10   // bytes
	maxValue  = 64 << 10  // bytes
)

const (
	// After a stream has failed, the relay waits before it opens the next one: a random half to whole of a pause. The
	// pause doubles from minPause to maxPause.
	minPause = time.Second
	maxPause = 30 * time.Second
)

// follow applies what the cloud sends to the state, until ctx is done.
func (r *Relay) follow(ctx context.Context, f *file) {
	kept := make(aside)
	for pause := minPause; ctx.Err() == nil; pause = min(2*pause, maxPause) {
		var applied bool
		err := tunnel.Guard(r.log, r.cfg.Counters, "the stream of Services ends", func() (err error) {
			applied, err = r.followOnce(ctx, f, kept)
			return err
		})
		if ctx.Err() != nil {
			return
		}
		r.noteCurrent(false, explained(err))
		r.log.Debug("the stream of Services has ended", "err", err)
		if applied {
			pause = minPause
		}
		select {
		case <-time.After(pause/2 + rand.N(pause/2)): //nolint:gosec // chance is enough
		case <-ctx.Done():
		}
	}
}

// explained returns the error of a stream in words for an operator.
func explained(err error) error {
	switch status.Code(err) {
	case codes.Unimplemented:
		return errors.New("the cloud sends no Services: write [mode.cloud.services] into its configuration")
	case codes.Canceled, codes.Unavailable:
		return errors.New("there is no session with the cloud")
	}
	return err
}

// errNothingYet is why the state is stale while a stream has brought nothing.
var errNothingYet = errors.New("there is a session, but the cloud has sent nothing yet: " +
	"if this stays, the line services of /readyz?verbose of the cloud says why")

// followOnce applies what one stream sends. applied says that the state was that of the cloud for a moment. kept has
// the buckets that earlier streams have sent of a first series; followOnce adds those of this stream.
func (r *Relay) followOnce(ctx context.Context, f *file, kept aside) (applied bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := r.cfg.Watch(ctx)
	if err != nil {
		return false, err
	}
	r.noteCurrent(false, errNothingYet)
	r.mu.Lock()
	digests := r.state.Digests()
	r.streams = true
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.streams = false
	}()
	kept.claim(&digests)
	next := &pb.Next{Digests: digests.Encode(), Unasked: true}
	for unasked := false; ; {
		if !unasked {
			if err = stream.Send(next); err != nil && !errors.Is(err, io.EOF) { // EOF: Recv has the error
				return applied, err
			}
		}
		next = new(pb.Next)
		bytes, entries := kept.size()
		var series []*pb.Changes
		series, unasked, err = receive(stream, bytes, entries)
		if err != nil {
			if !applied {
				kept.keep(series)
			}
			return applied, err
		}
		if !applied {
			series = kept.complete(series)
		}
		if err := r.take(f, series); err != nil {
			return applied, err
		}
		applied = true
	}
}

// receive returns the batches of one series. It asks for each batch but the first. unasked says that the next series
// comes without a request. size and entries are what was received of the same series before. With an error, receive
// returns the batches before the error.
func receive(stream Stream, size, entries int) (series []*pb.Changes, unasked bool, err error) {
	for {
		batch, err := stream.Recv()
		if err != nil {
			return series, false, err
		}
		data := batch.GetChanges()
		if batch.GetDeflated() {
			if data, err = inflate(data); err != nil {
				return series, false, err
			}
		}
		changes, err := parse(data)
		if err != nil {
			return series, false, err
		}
		size += len(data) + batchCost
		entries += len(changes.GetSet()) + len(changes.GetDeleted()) + len(changes.GetWhole())
		if size > maxSeries || entries > maxEntry {
			return nil, false, fmt.Errorf("the cloud sends more than %d bytes, or %d items, at once: name fewer namespaces in "+
				"[mode.cloud.services]", maxSeries, maxEntry)
		}
		series = append(series, changes)
		if !batch.GetMore() {
			return series, batch.GetUnasked(), nil
		}
		if err := stream.Send(new(pb.Next)); err != nil && !errors.Is(err, io.EOF) {
			return series, false, err
		}
	}
}

// aside holds the buckets that a cloud has sent whole, in a first series that broke off. The next stream tells the
// cloud that this edge has these buckets, so that the cloud sends only the others. So the first series arrives in parts
// over a thin link that breaks often. A bucket is applied only with the whole series, since the endpoints of one
// Service are in several buckets.
type aside map[uint32][]*pb.Item

// keep takes the buckets that have arrived whole in a series that broke off. The last bucket may lack items.
func (a aside) keep(series []*pb.Changes) {
	named := make(aside)
	last := uint32(0)
	for _, c := range series {
		for _, b := range c.GetWhole() {
			last = b % services.Buckets
			named[last] = nil // the items are in this batch and in later ones
		}
	}
	items := make(map[services.Path]*pb.Item) // a series may set an item more than once: the last one counts
	for _, c := range series {
		for _, item := range c.GetSet() {
			items[item.GetPath()] = item
		}
		for _, p := range c.GetDeleted() {
			delete(items, p)
		}
	}
	for p, item := range items {
		b := uint32(services.Bucket(p)) //nolint:gosec // it is below services.Buckets
		if _, whole := named[b]; whole {
			named[b] = append(named[b], item)
		}
	}
	delete(named, last)
	maps.Copy(a, named)
}

// claim replaces digests of the state by those of the buckets in a.
func (a aside) claim(digests *services.Digests) {
	for b, items := range a {
		digests[b] = 0
		for _, item := range items {
			digests.Flip(item.GetPath(), item.GetValue())
		}
	}
}

// size returns how many bytes and items a holds.
func (a aside) size() (bytes, entries int) {
	for _, items := range a {
		entries += len(items)
		for _, item := range items {
			bytes += len(item.GetPath()) + len(item.GetValue())
		}
	}
	return bytes, entries
}

// complete returns the series together with the buckets of a that the cloud has not sent again, and empties a.
func (a aside) complete(series []*pb.Changes) []*pb.Changes {
	for _, c := range series {
		for _, b := range c.GetWhole() {
			delete(a, b%services.Buckets)
		}
	}
	before := new(pb.Changes)
	for b, items := range a {
		before.Whole = append(before.Whole, b)
		before.Set = append(before.Set, items...)
	}
	clear(a)
	if len(before.GetWhole()) == 0 {
		return series
	}
	return append([]*pb.Changes{before}, series...)
}

// inflate returns decompressed data (RFC 1951).
func inflate(data []byte) ([]byte, error) {
	all, err := io.ReadAll(io.LimitReader(flate.NewReader(bytes.NewReader(data)), maxBatch+1))
	if err != nil {
		return nil, fmt.Errorf("the cloud sends a batch that cannot be decompressed: %w", err)
	}
	return all, nil
}

// parse returns the changes of a batch.
func parse(data []byte) (*pb.Changes, error) {
	if len(data) > maxBatch {
		return nil, fmt.Errorf("the cloud sends a batch of more than %d bytes", maxBatch)
	}
	changes := new(pb.Changes)
	if err := proto.Unmarshal(data, changes); err != nil {
		return nil, fmt.Errorf("the cloud sends a batch that cannot be read: %w", err)
	}
	for _, item := range changes.GetSet() {
		if n := len(item.GetPath()); n == 0 || n > maxPath || len(item.GetValue()) > maxValue {
			return nil, fmt.Errorf("the cloud sends an item that is too long: %.100q", item.GetPath())
		}
	}
	return changes, nil
}

// take applies a series of changes to the state, and queues the difference for file.keep to write. An error ends the
// stream.
func (r *Relay) take(f *file, series []*pb.Changes) error {
	d, digests, err := r.applySeries(series)
	if errors.Is(err, services.ErrTooMany) {
		return err
	}
	if err != nil {
		if n, ok := r.warnItem.Allow(); ok {
			r.log.Warn("the cloud sends items of Services that this version cannot use", "err", err, "skipped", n)
		}
	}
	r.noteCurrent(true, nil)
	if !d.Empty() {
		f.add(d, digests, time.Now())
		r.watchers.tell(&d)
		r.releaseMemory(len(d.Set) + len(d.Deleted))
	}
	return nil
}

// releaseMemory has garbage given back to the system some seconds after a change of n items, if n is large, or after
// many small changes. Until a change is in the file and in the kernel, it takes several times the memory of its items,
// and a change of one item as much as one of sixty-four. Go would keep such memory for long.
func (r *Relay) releaseMemory(n int) {
	const many, least, done = 2048, 64, 5 * time.Second
	if r.garbage.Add(int64(max(n, least))) >= many {
		r.garbage.Store(0)
		r.release.Reset(done)
	}
}

// collect gives garbage back to the system. bbolt keeps pages in a sync.Pool, which lets go of them at the second
// collection.
func collect() {
	runtime.GC()
	debug.FreeOSMemory()
}

func (r *Relay) applySeries(series []*pb.Changes) (d services.Difference, digests services.Digests, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if d, err = r.state.Apply(series...); !d.Empty() {
		if r.zone != nil {
			r.zone.Update(r.state, &d)
		}
		r.planner.update(r.plan, r.state, &d)
		r.plannedLocked()
	}
	return d, r.state.Digests(), err
}
