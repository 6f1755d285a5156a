package dns

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"

	"tunnel.example/tunnel/pkg/tunnel"
)

const (
	// hostsPoll is how often the file is read without a notification. Some file systems give
	// none.
	hostsPoll = 10 * time.Second
	// hostsMinInterval is the shortest time between two comparisons, however often the file or
	// the truth changes.
	hostsMinInterval = time.Second
	// maxHostsSize is the size of the largest file that is read, in bytes: twice the limit of a
	// ConfigMap.
	maxHostsSize = 2 << 20
)

// HostsFile reads the hosts file that CoreDNS mounts and reports how far it lags behind the
// truth. If the file cannot be read, HostsFile uses what it read last, or an empty file before
// the first successful read. It is the module "dns-hosts".
type HostsFile struct {
	// Set once.
	path   string
	truth  Truth
	names  Names // nil: every name may be published
	log    *slog.Logger
	notify func(dir string) (*fsnotify.Watcher, error) // watchDir, except in tests
	poll   time.Duration                               // hostsPoll, except in tests

	// Owned by Run.
	digest     [sha256.Size]byte // of the text from which hosts was parsed
	hosts      Hosts             // the file as read last
	lateLogged bool              // the last log line about the lag said that the file is late

	mu    sync.Mutex // guards state. Only Run writes it, so Run reads it without mu
	state hostsState
}

// hostsState is the result of the last read and the last comparison.
type hostsState struct {
	readTried    bool                          // Run has tried to read the file
	err          error                         // why the last read failed; nil: it did not
	namesUnknown bool                          // Names does not know yet which names may be published
	differs      map[tunnel.NodeName]time.Time // the result of the func differences; replaced as a whole, never changed
}

var _ tunnel.Module = (*HostsFile)(nil)

// NewHostsFile returns a reader of the file at path. names may be nil. It reads nothing before
// Run.
func NewHostsFile(path string, truth Truth, names Names, log *slog.Logger) *HostsFile {
	return &HostsFile{path: path, truth: truth, names: names, log: log, notify: watchDir, poll: hostsPoll}
}

// Name implements tunnel.Module.
func (h *HostsFile) Name() string { return "dns-hosts" }

// Run follows the file and the truth until ctx is done. It never returns an error: Note and the
// log report problems with the file.
func (h *HostsFile) Run(ctx context.Context) error {
	var events <-chan fsnotify.Event
	var errs <-chan error
	w, err := h.notify(filepath.Dir(h.path))
	if err != nil {
		h.log.Info("no file notifications, polling the hosts file", "target", h.path, "err", err, "every", h.poll)
	} else {
		defer w.Close()
		events, errs = w.Events, w.Errors
	}
	tick := time.NewTicker(h.poll)
	defer tick.Stop()

	for mustRead, mustCompare := true, true; ; {
		// Get these channels before reading anything, so that no change is missed.
		truth, names := h.truth.Changed(), (<-chan struct{})(nil)
		if h.names != nil {
			names = h.names.Changed()
		}
		if mustRead && h.read() || mustCompare {
			h.compare(time.Now())
		}
		h.logLag(time.Now())

		mustRead, mustCompare = false, false
		for pause := time.After(hostsMinInterval); pause != nil || !mustRead && !mustCompare; {
			select {
			case <-ctx.Done():
				return nil
			case <-pause:
				pause = nil
			case <-events: // any name in the directory may be part of a symlink swap
				mustRead = true
			case <-errs: //nolint:errcheck // any error means lost notifications: read the file
				mustRead = true
			case <-tick.C:
				mustRead = true
			case <-truth:
				truth, mustCompare = nil, true
			case <-names:
				names, mustCompare = nil, true
			}
		}
	}
}

// watchDir watches the directory instead of the file: kubelet updates a ConfigMap's file by
// replacing a symlink beside it.
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

// read reads the file and reports whether its text has changed. It logs the first failure and the
// first success after a failure.
func (h *HostsFile) read() bool {
	text, err := readHosts(h.path)
	h.mu.Lock()
	before := h.state.err
	h.state.readTried, h.state.err = true, err
	h.mu.Unlock()
	switch {
	case err != nil && (before == nil || before.Error() != err.Error()):
		h.log.Warn("the hosts file that CoreDNS mounts cannot be read; the lag is that of the last content read",
			"target", h.path, "err", err)
	case err == nil && before != nil:
		h.log.Info("the hosts file can be read again", "target", h.path)
	}
	if err != nil {
		return false
	}
	digest := sha256.Sum256(text)
	if digest == h.digest {
		return false
	}
	h.digest, h.hosts = digest, ParseHosts(string(text))
	return true
}

// readHosts returns the text of the file. Its errors do not contain the path.
func readHosts(path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, withoutPath(err)
	}
	if !info.Mode().IsRegular() { // opening a named pipe would wait for a writer
		return nil, errors.New("it is not a regular file")
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, withoutPath(err)
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxHostsSize+1))
	if err != nil {
		return nil, withoutPath(err)
	}
	if len(text) > maxHostsSize {
		return nil, fmt.Errorf("it is longer than %d bytes, the most that a ConfigMap may hold", maxHostsSize)
	}
	return text, nil
}

// withoutPath removes the operation and the path from an error of package os.
func withoutPath(err error) error {
	if pe, ok := errors.AsType[*fs.PathError](err); ok {
		return pe.Err
	}
	return err
}
