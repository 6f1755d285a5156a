package reload

import (
	"context"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/fsnotify/fsnotify"
)

// A change takes effect within a second: pollInterval plus maxQuietWait leaves time to read the
// files.
const (
	// pollInterval is how often the files are checked (opened, not read) in addition to
	// notifications. Network file systems send none, and a full inotify queue loses some.
	pollInterval = 500 * time.Millisecond
	// quietPeriod is how long the files must stay unchanged before they are read. An editor that
	// writes in place leaves half a file for a moment, and the two files of a pair are written one
	// after the other.
	quietPeriod = 50 * time.Millisecond
	// maxQuietWait bounds the wait for a quiet period if writes to the directory never stop.
	maxQuietWait = 250 * time.Millisecond
)

// Watch calls changed once at the start, since the files may have changed after they were read.
// Until ctx is done, it calls changed again whenever one of the files has been replaced or modified.
// It does so within a second, once no file has changed for a moment. A file may be missing for
// a while, or be reached through symbolic links that are swapped. changed returns true when the
// files cannot be read or used yet. Watch then calls changed again, twice a second, until changed
// returns false. Watch calls changed in the goroutine that called Watch.
func Watch(ctx context.Context, paths []string, log *slog.Logger, changed func() (retry bool)) {
	(&watcher{paths: paths, log: log, changed: changed, notify: notifyDirs}).run(ctx)
}

// watchFunc is the type of Watch; tests pass another one.
type watchFunc func(ctx context.Context, paths []string, log *slog.Logger, changed func() (retry bool))

// watcher is one call of Watch.
type watcher struct {
	// Set once.
	paths   []string
	log     *slog.Logger
	changed func() (retry bool)
	notify  func(dirs []string) (notifications, error) // notifyDirs; replaced in tests

	// Owned by run.
	seen  []FileID // identities of the files just before the last call of changed
	retry bool     // the last call of changed returned true
}

// notifications are a file system's events about directories.
type notifications struct {
	events <-chan fsnotify.Event
	errs   <-chan error
	stop   func() error
}

// notifyDirs watches the directories of the files, not the files: a Secret's file changes when a
// symbolic link in its directory is replaced.
func notifyDirs(dirs []string) (notifications, error) {
	w, err := fsnotify.NewWatcher()
	if err != nil {
		return notifications{}, err
	}
	for _, dir := range dirs {
		if err := w.Add(dir); err != nil {
			w.Close()
			return notifications{}, err
		}
	}
	return notifications{w.Events, w.Errors, w.Close}, nil
}

// run is Watch. It owns the watcher.
func (w *watcher) run(ctx context.Context) {
	n, err := w.notify(w.dirs())
	if err != nil {
		w.log.Info("no file notifications, polling", "files", w.paths, "err", err, "every", pollInterval)
	} else {
		defer n.stop() //nolint:errcheck // on an error, no file is watched any more either
	}
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()

	// Both are set while changes wait for a quiet period: the time of the first change, and the end of the wait.
	var firstChange time.Time
	var settled <-chan time.Time
	// schedule starts the wait for the quiet period, or extends it up to maxQuietWait.
	schedule := func() {
		now := time.Now()
		if settled == nil {
			firstChange = now
		}
		if now.Sub(firstChange) < maxQuietWait-quietPeriod {
			settled = time.After(quietPeriod)
		}
	}
	w.call()
	for {
		select {
		case <-ctx.Done():
			return
		case e := <-n.events:
			// An event for another name in the directory matters only if it is part of a swap of
			// symbolic links. The identity of our files shows that.
			if w.isWatched(e.Name) || w.differs() {
				schedule()
			}
		case <-n.errs: //nolint:errcheck // any error means lost notifications: compare the files
			schedule()
		case <-tick.C:
			if settled == nil && (w.retry || w.differs()) {
				schedule()
			}
		case <-settled:
			settled = nil
			w.call()
		}
	}
}

// call remembers the identities of the files and calls changed.
func (w *watcher) call() {
	// The files are identified before changed reads them, so that a write during the reading counts as a change.
	w.seen = w.identify()
	w.retry = w.changed()
}

// dirs returns the directories of the files, each once.
func (w *watcher) dirs() (all []string) {
	for _, p := range w.paths {
		if dir := filepath.Dir(p); !slices.Contains(all, dir) {
			all = append(all, dir)
		}
	}
	return all
}

// isWatched reports whether name is one of the files, rather than a neighbour in its directory.
func (w *watcher) isWatched(name string) bool {
	name = filepath.Clean(name)
	return slices.ContainsFunc(w.paths, func(p string) bool { return filepath.Clean(p) == name })
}

// differs reports whether any of the files was replaced, modified, removed or created since the last
// call of changed.
func (w *watcher) differs() bool { return !slices.EqualFunc(w.seen, w.identify(), FileID.Equal) }

// identify returns the identities of all files.
func (w *watcher) identify() []FileID {
	all := make([]FileID, len(w.paths))
	for i, p := range w.paths {
		all[i] = Identify(p)
	}
	return all
}

// Identify returns the state of a file. It opens the file, because that makes a network file system ask its
// server. A stat alone may be answered from a cache for up to a minute (nfs(5), close-to-open).
func Identify(path string) FileID {
	// O_NONBLOCK: opening a pipe must not block.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return FileID{}
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return FileID{}
	}
	return FileID{st}
}

// FileID tells two states of a file apart without reading the file. The zero value means that there is no file.
type FileID struct{ info fs.FileInfo }

// Equal reports whether a and b are the same file, unchanged.
func (a FileID) Equal(b FileID) bool {
	if a.info == nil || b.info == nil {
		return a.info == nil && b.info == nil
	}
	return os.SameFile(a.info, b.info) && a.info.ModTime().Equal(b.info.ModTime()) && a.info.Size() == b.info.Size()
}
