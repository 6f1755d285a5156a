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

	"tunnel/pkg/tunnel"
)

const (
	// hostsPoll is how often the file is read beside the notifications, which some
	// file systems do not give.
	hostsPoll = 10 * time.Second
	// hostsPause is the least time between two looks, however much changes.
	hostsPause = time.Second
	// hostsLimit is the largest file, in bytes. A ConfigMap is half of it at most.
	hostsLimit = 2 << 20
)

// HostsFile reads the hosts file that CoreDNS mounts and says how far it lags behind the
// truth. What cannot be read counts as it was read last, and as empty before that. It is
// the module "dns-hosts".
type HostsFile struct {
	// Set once.
	path   string
	truth  Truth
	names  Names // nil: every name may appear
	log    *slog.Logger
	notify func(dir string) (*fsnotify.Watcher, error)

	// Owned by Run.
	digest [sha256.Size]byte // of what hosts was made from
	hosts  Hosts
	said   bool // that the file is late

	mu    sync.Mutex // guards the following, which Run alone writes
	state hostsState
}

// hostsState is what a look has found.
type hostsState struct {
	looked  bool                          // at all
	err     error                         // why the file could not be read
	waiting bool                          // nobody has said yet which names may appear
	differs map[tunnel.NodeName]time.Time // see differences; never changed, only replaced
}

var _ tunnel.Module = (*HostsFile)(nil)

// NewHostsFile returns a reader of the file at path; names may be nil. Nothing is read
// before Run.
func NewHostsFile(path string, truth Truth, names Names, log *slog.Logger) *HostsFile {
	return &HostsFile{path: path, truth: truth, names: names, log: log, notify: watchDir}
}

// Name implements tunnel.Module.
func (h *HostsFile) Name() string { return "dns-hosts" }

// Routes implements tunnel.Module. No peer may ask for any of this.
func (h *HostsFile) Routes() map[string]tunnel.Handler { return nil }

// Run follows the file and the truth until ctx is done. It never returns an error: what
// is wrong with the file is said by Note and in the log.
func (h *HostsFile) Run(ctx context.Context) error {
	var events <-chan fsnotify.Event
	var errs <-chan error
	w, err := h.notify(filepath.Dir(h.path))
	if err != nil {
		h.log.Info("no file notifications, polling the hosts file", "target", h.path, "err", err, "every", hostsPoll)
	} else {
		defer w.Close()
		events, errs = w.Events, w.Errors
	}
	tick := time.NewTicker(hostsPoll)
	defer tick.Stop()

	for file, facts := true, true; ; {
		// Asked for before anything is looked at, so that no change is missed.
		truth, names := h.truth.Changed(), (<-chan struct{})(nil)
		if h.names != nil {
			names = h.names.Changed()
		}
		if file && h.read() || facts {
			h.compare(time.Now())
		}
		h.warn(time.Now())

		file, facts = false, false
		for rest := time.After(hostsPause); rest != nil || !file && !facts; {
			select {
			case <-ctx.Done():
				return nil
			case <-rest:
				rest = nil
			case <-events: // any name in the directory may be part of a symlink swap
				file = true
			case <-errs: //nolint:errcheck // notifications were lost, whatever the reason: look
				file = true
			case <-tick.C:
				file = true
			case <-truth:
				truth, facts = nil, true
			case <-names:
				names, facts = nil, true
			}
		}
	}
}

// watchDir watches the directory, not the file: kubelet changes a ConfigMap's file by
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

// read reads the file and reports whether it says something else than before.
func (h *HostsFile) read() bool {
	text, err := readHosts(h.path)
	h.mu.Lock()
	before := h.state.err
	h.state.looked, h.state.err = true, err
	h.mu.Unlock()
	switch {
	case err != nil && (before == nil || before.Error() != err.Error()):
		h.log.Warn("the hosts file that CoreDNS mounts cannot be read; its lag is that of what was read last", "target", h.path, "err", err)
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

// readHosts returns what is in the file. Its errors do not name it.
func readHosts(path string) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, withoutPath(err)
	}
	if !info.Mode().IsRegular() { // opening a pipe would wait for its writer
		return nil, errors.New("it is not a regular file")
	}
	f, err := os.Open(path) //nolint:gosec // the operator names the file
	if err != nil {
		return nil, withoutPath(err)
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, hostsLimit+1))
	if err != nil {
		return nil, withoutPath(err)
	}
	if len(text) > hostsLimit {
		return nil, fmt.Errorf("it is longer than %d bytes, and a ConfigMap is not", hostsLimit)
	}
	return text, nil
}

func withoutPath(err error) error {
	if pe, ok := errors.AsType[*fs.PathError](err); ok {
		return pe.Err
	}
	return err
}
