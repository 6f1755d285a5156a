package auth

import (
	"context"
	"crypto/sha256"
	"os"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"
)

// A change of the file is to reach the sessions within a second: pollInterval and
// settleMost together leave room for the reading.
const (
	// pollInterval is how often the file is looked at (one stat) beside the
	// notifications, which network file systems do not give and a full inotify
	// queue loses.
	pollInterval = 500 * time.Millisecond
	// settleQuiet is how long the file must be left alone before it is read: an
	// editor that writes in place leaves half a file behind for a moment, and nodes
	// that are in the other half must not lose their sessions.
	settleQuiet = 50 * time.Millisecond
	// settleMost bounds that wait when the directory is never quiet.
	settleMost = 250 * time.Millisecond
)

// Run follows the file until ctx is done. A file that is missing or bad leaves the
// last good state in force, is logged once, and is read again at its next change. It
// never returns an error.
func (t *Tokens) Run(ctx context.Context) error {
	var events <-chan fsnotify.Event
	var errs <-chan error
	w, err := t.notify(filepath.Dir(t.path))
	if err != nil {
		t.log.Info("no file notifications, polling the token file", "err", err, "every", t.poll)
	} else {
		defer w.Close()
		events, errs = w.Events, w.Errors
	}
	tick := time.NewTicker(t.poll)
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
	for {
		select {
		case <-ctx.Done():
			return nil
		case e := <-events:
			// Another name in the directory matters when it is part of a symlink
			// swap, which shows in the file's own identity.
			if filepath.Base(e.Name) == filepath.Base(t.path) || t.changed() {
				touched()
			}
		case <-errs: //nolint:errcheck // notifications were lost, whatever the reason: look
			touched()
		case <-tick.C:
			if settled == nil && t.changed() {
				touched()
			}
		case <-settled:
			settled = nil
			t.reload()
		}
	}
}

// watchDir watches the directory, not the file: a Secret's file changes when a
// symlink beside it is replaced.
func watchDir(dir string) (*fsnotify.Watcher, error) {
	w, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, err
	}
	if err := w.Add(dir); err != nil {
		w.Close()
		return nil, err
	}
	return w, nil
}

// changed reports whether the path leads to another file, or another state of it,
// than when it was last read.
func (t *Tokens) changed() bool { return !t.identify().equal(t.file) }

func (t *Tokens) identify() fileID {
	st, err := os.Stat(t.path)
	if err != nil {
		return fileID{}
	}
	return fileID{info: st, modified: st.ModTime(), size: st.Size()}
}

// reload reads the file and adopts it when it is good.
func (t *Tokens) reload() {
	// The identity from before the read: a write during the read is a change again.
	t.file = t.identify()
	content, _, err := readSecretFile(t.path, maxTokenFile, t.log)
	if err != nil {
		t.file = fileID{} // it looks changed as long as it is there, so it is tried again
		t.keep(err.Error(), err)
		return
	}
	digest := sha256.Sum256(content)
	if digest == t.content {
		t.badness = ""
		return
	}
	tb, err := parseTokens(t.path, string(content), t.allowShared)
	if err != nil {
		t.keep(string(digest[:]), err)
		return
	}
	t.content, t.badness = digest, ""
	revoked := t.adopt(tb)
	t.log.Info("token file read again", "nodes", len(tb.own), "revoked", revoked)
	tb.warn(t.log)
}

// keep logs, once for the same fault, that the last good state stays in force.
func (t *Tokens) keep(badness string, err error) {
	if t.badness == badness {
		return
	}
	t.badness = badness
	t.log.Error("token file is bad; the tokens read before it stay in force", "err", err)
}
