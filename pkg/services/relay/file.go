package relay

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime/debug"
	"sync"
	"syscall"
	"time"

	bolt "go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"

	"tunnel.example/tunnel/pkg/services"
	pb "tunnel.example/tunnel/pkg/services/servicesv1"
)

const (
	// fileVersion is of what is below. A file of another version is set aside.
	fileVersion = "1"
	// lockTime is how long to wait for the process before this one, which may still have the file.
	lockTime = 5 * time.Second
	// writeInterval is the least time between two transactions: each of them is an fsync.
	writeInterval = time.Second
	// stampInterval bounds by how much an edge that lost its power believes its state to be older than it is.
	stampInterval = time.Hour
)

// What the file holds: the items (path to value), and facts about all of them.
//
//nolint:gochecknoglobals // constants
var (
	bucketItems = []byte("items")
	bucketFacts = []byte("facts")
	keyVersion  = []byte("version")
	keyDigests  = []byte("digests") // of the items, so that a damaged file is noticed
	keySince    = []byte("since")   // when the items were last known to be those of the cloud; RFC 3339
)

// file keeps the state on disk. Changes of one second are written in one transaction, so the file always has a state
// that was complete.
type file struct {
	// Set once.
	path  string
	log   *slog.Logger
	every time.Duration // the least time between two transactions
	stamp time.Duration // the most time between two writes of keySince, while the state is that of the cloud
	retry time.Duration // between two attempts to open the file
	wake  chan struct{} // capacity 1: there is something to write; never closed

	// Owned by the goroutine of keep, and before and after it by that of Relay.Run.
	opened bool
	since  time.Time // as the file said when it was opened
	db     *bolt.DB  // nil: it is not opened, or bbolt has given it up
	raw    *os.File  // under db

	mu      sync.Mutex               // guards the following
	pending map[services.Path][]byte // not yet written; nil: deleted
	digests services.Digests         // of the state with pending
	current time.Time                // for keySince
	fresh   bool                     // pending is all of the state: what the file has is not part of it
}

// closedFile returns a file that is not open yet. What is added before keep opens it stays in memory.
func closedFile(path string, log *slog.Logger) *file {
	return &file{
		path: path, log: log, every: writeInterval, stamp: stampInterval, retry: interval, wake: make(chan struct{}, 1),
		pending: make(map[services.Path][]byte), fresh: true,
	}
}

// openFile opens the file and reads the state in it. A file that cannot be read is set aside with a warning, and the
// state is empty. The error says that there can be no file: another process has it, or its folder cannot be written.
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

// damagedError says that a file is there and is not what this version writes.
type damagedError struct{ error }

func (e damagedError) Unwrap() error { return e.error }

// readFile opens a file or makes it, and reads it.
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

// isOfSystem reports whether an error is of the file system, and not of what a file holds. bbolt returns errors of mmap
// and flock as they are.
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
	all := new(pb.Changes)
	err = items.ForEach(func(k, v []byte) error {
		all.Set = append(all.Set, &pb.Item{Path: string(k), Value: bytes.Clone(v)})
		return nil
	})
	if err != nil {
		return err
	}
	state.Apply(all) //nolint:errcheck // it was told of unreadable items when they came; the digests tell of damage
	digests := state.Digests()
	if !bytes.Equal(digests.Encode(), facts.Get(keyDigests)) {
		return errors.New("its items are not those that were written")
	}
	// The pages of the items are right, so nothing here leads out of the file.
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

// add has a change written. digests are those of the state with the change. now: the state is that of the cloud.
func (f *file) add(d services.Difference, digests services.Digests, now time.Time) {
	f.mu.Lock()
	defer f.mu.Unlock()
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

// keep writes changes until ctx is done, at most once in every. It calls note with the outcome. If the file is not
// open, keep tries to open it, and offers adopt the state in it. since returns when the state was last known to be that
// of the cloud; keep writes that down from time to time, even if nothing changes.
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

// renew sets when the state was last known to be that of the cloud, and reports whether that is news.
func (f *file) renew(since time.Time) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if since.IsZero() || !since.After(f.current) {
		return false
	}
	f.current = since
	return true
}

// open opens the file, and offers adopt the state in it. If adopt does not take the state, the next transaction writes
// all that was added since in its place.
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

// close writes what is left, and closes the file. since: when the state was last known to be that of the cloud.
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

// errUnusable is the error of a file that bbolt has given up.
var errUnusable = errors.New("the file is damaged: start the edge again, which sets it aside")

// write writes what is pending in one transaction. If that fails, it stays pending.
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
			f.db, err = nil, fmt.Errorf("%w (%v)", errUnusable, p) // locks inside of it are held for ever
			f.raw.Close()
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
		for p, value := range pending {
			if value == nil {
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

// again makes a change pending that could not be written. Later changes have precedence.
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
