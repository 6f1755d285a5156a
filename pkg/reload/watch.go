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

// A change is to take effect within a second: pollInterval and settleMost together
// leave room for the reading.
const (
	// pollInterval is how often the files are looked at (opened, not read) beside the
	// notifications, which network file systems do not give and a full inotify
	// queue loses.
	pollInterval = 500 * time.Millisecond
	// settleQuiet is how long the files must be left alone before they are read: an
	// editor that writes in place leaves half a file behind for a moment, and two files
	// that belong together are written one after the other.
	settleQuiet = 50 * time.Millisecond
	// settleMost bounds that wait when the directory is never quiet.
	settleMost = 250 * time.Millisecond
)

// Watch calls changed until ctx is done: once at the start, since the files may have
// changed after they were read, and whenever any of them is another one, or in another
// state, than before; within a second, and when nobody has written to them for a
// moment. A file may be missing for a while, or behind symbolic links that are swapped.
// While changed returns true it is called again, twice a second: the files could not be
// read, or not be used yet. It is called by the goroutine that Watch was.
func Watch(ctx context.Context, paths []string, log *slog.Logger, changed func() (again bool)) {
	(&watcher{paths: paths, log: log, changed: changed, notify: notifyDirs}).run(ctx)
}

type watchFunc func(ctx context.Context, paths []string, log *slog.Logger, changed func() (again bool))

// watcher is one call of Watch.
type watcher struct {
	// Set once.
	paths   []string
	log     *slog.Logger
	changed func() (again bool)
	notify  func(dirs []string) (notices, error) // notifyDirs, except in tests

	// Owned by run.
	seen  []fileID // the files as they were before changed was last called
	again bool     // changed wants to be called again
}

// notices is what a file system says about directories.
type notices struct {
	events <-chan fsnotify.Event
	errs   <-chan error
	stop   func() error
}

// notifyDirs watches the directories of files, not the files: a Secret's file changes
// when a symbolic link beside it is replaced.
func notifyDirs(dirs []string) (notices, error) {
	w, err := fsnotify.NewWatcher()
	if err != nil {
		return notices{}, err
	}
	for _, dir := range dirs {
		if err := w.Add(dir); err != nil {
			w.Close()
			return notices{}, err
		}
	}
	return notices{w.Events, w.Errors, w.Close}, nil
}

func (w *watcher) run(ctx context.Context) {
	n, err := w.notify(w.dirs())
	if err != nil {
		w.log.Info("no file notifications, polling", "files", w.paths, "err", err, "every", pollInterval)
	} else {
		defer n.stop() //nolint:errcheck // nothing more is asked of it
	}
	tick := time.NewTicker(pollInterval)
	defer tick.Stop()

	// Set while a change is waiting to be read: since when, and the end of the wait.
	var since time.Time
	var settled <-chan time.Time
	touched := func() {
		now := time.Now()
		if settled == nil {
			since = now
		}
		if now.Sub(since) < settleMost-settleQuiet {
			settled = time.After(settleQuiet)
		}
	}
	w.call()
	for {
		select {
		case <-ctx.Done():
			return
		case e := <-n.events:
			// Another name in the directory matters when it is part of a symlink
			// swap, which shows in the files' own identity.
			if w.ours(e.Name) || w.differs() {
				touched()
			}
		case <-n.errs: //nolint:errcheck // notifications were lost, whatever the reason: look
			touched()
		case <-tick.C:
			if settled == nil && (w.again || w.differs()) {
				touched()
			}
		case <-settled:
			settled = nil
			w.call()
		}
	}
}

// call calls changed.
func (w *watcher) call() {
	// The identities from before the reading: a write during it is a change again.
	w.seen = w.identify()
	w.again = w.changed()
}

// dirs returns where the files are, each directory once.
func (w *watcher) dirs() (all []string) {
	for _, p := range w.paths {
		if dir := filepath.Dir(p); !slices.Contains(all, dir) {
			all = append(all, dir)
		}
	}
	return all
}

// ours reports whether name is one of the files, and not only beside one.
func (w *watcher) ours(name string) bool {
	name = filepath.Clean(name)
	return slices.ContainsFunc(w.paths, func(p string) bool { return filepath.Clean(p) == name })
}

// differs reports whether a path leads to another file, or another state of it, than
// when it was last read.
func (w *watcher) differs() bool { return !slices.EqualFunc(w.seen, w.identify(), fileID.equal) }

func (w *watcher) identify() []fileID {
	all := make([]fileID, len(w.paths))
	for i, p := range w.paths {
		all[i] = identify(p)
	}
	return all
}

// identify opens the file, since that asks the server of a network file system, which a
// stat alone may not do for a minute (nfs(5), close-to-open).
func identify(path string) fileID {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) //nolint:gosec // the operator names the file; a pipe must not hold us up
	if err != nil {
		return fileID{}
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return fileID{}
	}
	return fileID{st}
}

// fileID tells two states of a path apart without reading it.
type fileID struct{ fs.FileInfo } // nil: there was no file

func (a fileID) equal(b fileID) bool {
	if a.FileInfo == nil || b.FileInfo == nil {
		return a.FileInfo == nil && b.FileInfo == nil
	}
	return os.SameFile(a.FileInfo, b.FileInfo) && a.ModTime().Equal(b.ModTime()) && a.Size() == b.Size()
}
