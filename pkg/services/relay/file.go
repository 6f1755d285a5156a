package relay

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"sync"
	"syscall"
	"time"

	bolt "go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"

	"tunnel.example/tunnel/pkg/services"
	pb "tunnel.example/tunnel/pkg/services/servicesv1"
)

const (
	// fileVersion is the version of the file's contents, which follow. The relay sets aside a file of another version.
	fileVersion = "1"
	// lockTime is how long the relay waits for the file, which the process before this one may still have open.
	lockTime = 5 * time.Second
	// writeInterval is the least time between two transactions: each of them is an fsync.
	writeInterval = time.Second
	// stampInterval bounds an error after a loss of power: the edge may believe that its state is older than it is, by
	// this time at most.
	stampInterval = time.Hour
)

// The file holds the items (path to value), and facts about all of them.
//
//nolint:gochecknoglobals // constants
var (
	bucketItems = []byte("items")
	bucketFacts = []byte("facts")
	keyVersion  = []byte("version")
	keyDigests  = []byte("digests") // of the items, so that a damaged file is noticed
	keySince    = []byte("since")   // when the items were last known to be those of the cloud; RFC 3339
)

// file keeps the state on disk. One transaction has all changes of a second, so the file always has a complete state.
type file struct {
	// Set once.
	path  string
	log   *slog.Logger
	every time.Duration // the least time between two transactions
	stamp time.Duration // the most time between two writes of keySince, as long as the cloud confirms the state
	retry time.Duration // between two attempts to open the file
	wake  chan struct{} // capacity 1: there is something to write; never closed

	// Owned by the goroutine of keep; before keep begins, by Relay.Run, and after it ends, by the goroutine that closes
	// the file.
	opened bool
	since  time.Time // keySince, when the file was opened
	db     *bolt.DB  // nil: the file is not open, or bbolt has failed and must not be used again
	raw    *os.File  // the file that db uses

	mu      sync.Mutex               // guards the following
	pending map[services.Path][]byte // not yet written; nil: deleted
	digests services.Digests         // the digests of the state, pending changes included
	current time.Time                // what the next transaction writes as keySince
	broken  bool                     // bbolt has failed: nothing is written any more
	fresh   bool                     // pending is the whole state: the next transaction replaces all items in the file
}

// closedFile returns a file that is not open yet. Until keep opens the file, changes stay in memory.
func closedFile(path string, log *slog.Logger) *file {
	return &file{
		path: path, log: log, every: writeInterval, stamp: stampInterval, retry: interval, wake: make(chan struct{}, 1),
		pending: make(map[services.Path][]byte), fresh: true,
	}
}

// openFile opens the file and reads the state in it. If the file cannot be read, openFile sets it aside with a warning,
// and returns an empty state. It returns an error if there can be no file: another process has the file open, or the
// folder cannot be written.
func openFile(path string, log *slog.Logger) (*file, *services.State, error) {
	err := os.MkdirAll(filepath.Dir(path), 0o755)
	if err != nil {
		return nil, nil, fmt.Errorf("the state of Services (state in [mode.edge.services]): %w", err)
	}
	f, state, err := readFile(path, log)
	if damaged, ok := errors.AsType[damagedError](err); ok {
		aside := path + ".broken"
		log.Warn("the state of Services cannot be read; this node starts without it until the cloud sends it",
			"file", path, "aside", aside, "err", damaged.error)
		if err = os.Rename(path, aside); err == nil {
			f, state, err = readFile(path, log)
		}
	}
	switch {
	case errors.Is(err, berrors.ErrTimeout):
		return nil, nil, fmt.Errorf("another process has %s: stop the other edge of this machine, or write "+
			"another state in [mode.edge.services]", path)
	case err != nil:
		return nil, nil, fmt.Errorf("the state of Services (state in [mode.edge.services]): %w", err)
	}
	return f, state, nil
}

// damagedError says that the file exists, but is not as this version writes it.
type damagedError struct{ error }

func (e damagedError) Unwrap() error { return e.error }

// readFile opens a file, or creates it, and reads its state.
func readFile(path string, log *slog.Logger) (f *file, state *services.State, err error) {
	var opened *os.File
	// bbolt maps the file into memory. It panics if pages are wrong, and the kernel sends SIGBUS if pages are missing.
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if p := recover(); p != nil {
			err = damagedError{fmt.Errorf("%v", p)}
		}
		if err != nil && opened != nil {
			opened.Close() // after a panic, the mapping stays; at most one per file that is set aside
		}
	}()
	db, err := bolt.Open(path, 0o600, &bolt.Options{
		Timeout: lockTime, NoStatistics: true, FreelistType: bolt.FreelistMapType,
		OpenFile: func(name string, flag int, mode os.FileMode) (_ *os.File, err error) {
			opened, err = os.OpenFile(name, flag, mode)
			return opened, err
		},
	})
	if errors.Is(err, berrors.ErrTimeout) || isOfSystem(err) {
		return nil, nil, err
	}
	if err != nil {
		return nil, nil, damagedError{err}
	}
	f = closedFile(path, log)
	f.opened, f.fresh, f.db, f.raw = true, false, db, opened
	state = services.NewState()
	if err = db.View(func(tx *bolt.Tx) error { return f.read(tx, state) }); err != nil {
		db.Close() //nolint:errcheck // nothing was written
		if isOfSystem(err) {
			return nil, nil, err
		}
		return nil, nil, damagedError{err}
	}
	f.digests, f.current = state.Digests(), f.since
	return f, state, nil
}

// isOfSystem reports whether an error comes from the operating system, and not from the contents of the file. bbolt
// returns errors of mmap and flock unchanged.
func isOfSystem(err error) bool {
	_, path := errors.AsType[*fs.PathError](err)
	_, number := errors.AsType[syscall.Errno](err)
	return path || number
}

// read reads the file into an empty state.
func (f *file) read(tx *bolt.Tx, state *services.State) error {
	info, err := os.Stat(f.path)
	if err != nil {
		return err
	}
	if tx.Size() > info.Size() {
		return fmt.Errorf("it has %d bytes of %d", info.Size(), tx.Size())
	}
	facts, items := tx.Bucket(bucketFacts), tx.Bucket(bucketItems)
	if facts == nil && items == nil {
		return nil // new
	}
	if facts == nil || items == nil {
		return errors.New("a part of it is missing")
	}
	if v := facts.Get(keyVersion); string(v) != fileVersion {
		return fmt.Errorf("it is of version %q, and this program writes version %s", v, fileVersion)
	}
	// Endpoints come last, although their paths come first. If there are too many items, the state leaves out the last
	// ones, and without the Services and the Nodes, the others would be worth nothing.
	all, endpoints := new(pb.Changes), new(pb.Changes)
	err = items.ForEach(func(k, v []byte) error {
		to := all
		if services.ServiceOf(string(k)) != "" {
			to = endpoints
		}
		to.Set = append(to.Set, &pb.Item{Path: string(k), Value: bytes.Clone(v)})
		return nil
	})
	if err != nil {
		return err
	}
	state.Apply(all, endpoints) //nolint:errcheck // unreadable items were reported when they came; the digests show damage
	digests := state.Digests()
	if !bytes.Equal(digests.Encode(), facts.Get(keyDigests)) {
		return errors.New("its items are not those that were written")
	}
	// The pages of the items have been read without a fault, so Check follows no pointer out of the file.
	for wrong := range tx.Check() {
		err = cmp.Or(err, wrong)
	}
	if err != nil {
		return err
	}
	if text := facts.Get(keySince); text != nil {
		if f.since, err = time.Parse(time.RFC3339, string(text)); err != nil {
			return err
		}
	}
	return nil
}

// add queues a change for the next transaction. digests are those of the state after the change. now is the current
// time: the state is that of the cloud.
func (f *file) add(d services.Difference, digests services.Digests, now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.broken {
		return
	}
	for _, p := range d.Deleted {
		f.pending[p] = nil
		if f.fresh {
			delete(f.pending, p)
		}
	}
	for _, item := range d.Set {
		value := item.GetValue()
		if value == nil {
			value = []byte{}
		}
		f.pending[item.GetPath()] = value
	}
	f.digests, f.current = digests, now
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// keep writes changes until ctx is done, at most once in f.every. It calls note with each result. While the file is not
// open, keep tries to open it, and then offers the state in it to adopt. since returns when the state was last known to
// be that of the cloud. keep writes this time now and then, even if nothing changes.
func (f *file) keep(
	ctx context.Context, note func(error), adopt func(*services.State, time.Time) bool, since func() time.Time,
) {
	for !f.opened {
		select {
		case <-time.After(f.retry):
			note(f.open(adopt))
		case <-ctx.Done():
			return
		}
	}
	for {
		select {
		case <-f.wake:
			note(f.write())
		case <-time.After(f.stamp):
			if f.renew(since()) {
				note(f.write())
			}
		case <-ctx.Done():
			return
		}
		select {
		case <-time.After(f.every):
		case <-ctx.Done():
			return
		}
	}
}

// renew stores when the state was last known to be that of the cloud. It reports whether that time is later than the
// stored one.
func (f *file) renew(since time.Time) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if since.IsZero() || !since.After(f.current) {
		return false
	}
	f.current = since
	return true
}

// open opens the file, and offers the state in it to adopt. If adopt does not take that state, the next transaction
// replaces it by what was queued meanwhile.
func (f *file) open(adopt func(state *services.State, since time.Time) bool) error {
	from, state, err := openFile(f.path, f.log)
	if err != nil {
		return err
	}
	f.opened, f.since, f.db, f.raw = true, from.since, from.db, from.raw
	f.mu.Lock()
	defer f.mu.Unlock()
	if adopt(state, from.since) {
		f.fresh, f.digests, f.current = false, from.digests, from.current
	}
	return nil
}

// close writes what is pending, and closes the file. since says when the state was last known to be that of the cloud.
func (f *file) close(since time.Time) {
	renewed := f.renew(since)
	f.mu.Lock()
	changed := renewed || len(f.pending) > 0
	f.mu.Unlock()
	if changed && !since.IsZero() {
		f.write() //nolint:errcheck // keep has told of the error; the file has an older state then
	}
	if f.db != nil {
		f.db.Close() //nolint:errcheck // each transaction has been written already
	}
}

// errUnusable is the error of a file in which bbolt has panicked.
var errUnusable = errors.New("the file is damaged: start the edge again, which sets it aside")

// write writes all pending changes in one transaction. If that fails, the changes stay pending.
func (f *file) write() (err error) {
	f.mu.Lock()
	if f.db == nil {
		f.mu.Unlock()
		return errUnusable
	}
	pending, digests, current, fresh := f.pending, f.digests, f.current, f.fresh
	f.pending, f.fresh = make(map[services.Path][]byte), false
	f.mu.Unlock()
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if p := recover(); p != nil {
			f.db, err = nil, fmt.Errorf("%w (%v)", errUnusable, p) // after a panic, bbolt holds its locks for ever
			f.raw.Close()
			f.mu.Lock()
			f.broken, f.pending = true, nil
			f.mu.Unlock()
		}
		if err != nil && f.db != nil {
			f.again(pending, fresh)
		}
	}()
	return f.db.Update(func(tx *bolt.Tx) error {
		if fresh && tx.Bucket(bucketItems) != nil {
			if err := tx.DeleteBucket(bucketItems); err != nil {
				return err
			}
		}
		facts, err := tx.CreateBucketIfNotExists(bucketFacts)
		if err != nil {
			return err
		}
		items, err := tx.CreateBucketIfNotExists(bucketItems)
		if err != nil {
			return err
		}
		// bbolt moves all items behind a new one, so the items come in order.
		for _, p := range slices.Sorted(maps.Keys(pending)) {
			if value := pending[p]; value == nil {
				err = items.Delete([]byte(p))
			} else {
				err = items.Put([]byte(p), value)
			}
			if err != nil {
				return err
			}
		}
		return errors.Join(facts.Put(keyVersion, []byte(fileVersion)), facts.Put(keyDigests, digests.Encode()),
			facts.Put(keySince, []byte(current.UTC().Format(time.RFC3339))))
	})
}

// again makes changes pending again that could not be written. A later change of the same item has precedence.
func (f *file) again(pending map[services.Path][]byte, fresh bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fresh = fresh
	for p, value := range pending {
		if _, later := f.pending[p]; !later {
			f.pending[p] = value
		}
	}
	select {
	case f.wake <- struct{}{}:
	default:
	}
}
