package relay

import (
	"bytes"
	"compress/flate"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"tunnel.example/tunnel/pkg/services"
	pb "tunnel.example/tunnel/pkg/services/servicesv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// What a cloud may send. A cluster of 10,000 Services with 20 endpoints each needs a tenth of it.
const (
	maxBatch  = 1 << 20   // bytes of one batch, when it is not compressed; clouds send 64 KiB
	maxSeries = 128 << 20 // bytes of the batches that belong together
	maxPath   = 1 << 10   // bytes
	maxValue  = 64 << 10  // bytes
)

const (
	// After a stream has failed, the next one is opened after a random part of a time that doubles from minPause to
	// maxPause.
	minPause = time.Second
	maxPause = 30 * time.Second
)

// follow keeps the state as the cloud says, until ctx is done.
func (r *Relay) follow(ctx context.Context, f *file) {
	for pause := minPause; ctx.Err() == nil; pause = min(2*pause, maxPause) {
		var applied bool
		err := tunnel.Guard(r.log, r.cfg.Counters, "the stream of Services ends", func() (err error) {
			applied, err = r.followOnce(ctx, f)
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

// explained returns the error of a stream for an operator.
func explained(err error) error {
	switch status.Code(err) {
	case codes.Unimplemented:
		return errors.New("the cloud sends no Services: write [mode.cloud.services] into its configuration")
	case codes.Canceled, codes.Unavailable:
		return errors.New("there is no session with the cloud")
	}
	return err
}

// followOnce applies what one stream sends. applied: the state was that of the cloud for a moment.
func (r *Relay) followOnce(ctx context.Context, f *file) (applied bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := r.cfg.Watch(ctx)
	if err != nil {
		return false, err
	}
	r.mu.Lock()
	digests := r.state.Digests()
	r.streams = true
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.streams = false
	}()
	next := &pb.Next{Digests: digests.Encode()}
	for {
		if err := stream.Send(next); err != nil && !errors.Is(err, io.EOF) { // EOF: Recv has the error
			return applied, err
		}
		next = new(pb.Next)
		series, err := receive(stream)
		if err != nil {
			return applied, err
		}
		if err := r.take(f, series); err != nil {
			return applied, err
		}
		applied = true
	}
}

// receive returns the batches that belong together. It asks for each but the first.
func receive(stream Stream) (series []*pb.Changes, err error) {
	for size := 0; ; {
		batch, err := stream.Recv()
		if err != nil {
			return nil, err
		}
		data := batch.GetChanges()
		if batch.GetDeflated() {
			if data, err = inflate(data); err != nil {
				return nil, err
			}
		}
		changes, err := parse(data)
		if err != nil {
			return nil, err
		}
		if size += len(data); size > maxSeries {
			return nil, fmt.Errorf("the cloud sends more than %d bytes at once", maxSeries)
		}
		series = append(series, changes)
		if !batch.GetMore() {
			return series, nil
		}
		if err := stream.Send(new(pb.Next)); err != nil && !errors.Is(err, io.EOF) {
			return nil, err
		}
	}
}

// inflate returns what was compressed.
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

// take applies a series to the state, and has it kept. An error ends the stream.
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
	}
	return nil
}

func (r *Relay) applySeries(series []*pb.Changes) (d services.Difference, digests services.Digests, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if d, err = r.state.Apply(series...); !d.Empty() {
		if r.zone != nil {
			r.zone.Update(r.state, &d)
		}
		r.adoptLocked(r.planner.next(r.plan, r.state, &d))
	}
	return d, r.state.Digests(), err
}
