package dns

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"tunnel/pkg/kube"
	"tunnel/pkg/tunnel"
)

// Store keeps the file. *kube.ConfigMap is one.
type Store interface {
	fmt.Stringer
	// Load reads the file; that there is none yet is no error.
	Load(ctx context.Context) (kube.Content, error)
	// Save writes the file if it still is as old says.
	Save(ctx context.Context, old kube.Content, text string) (kube.Content, error)
	// Follow calls changed with the version of each change until ctx is done.
	Follow(ctx context.Context, changed func(version string), said func(error))
}

// Election settles which replica writes. *kube.Lease is one.
type Election interface {
	// Run calls lead while this replica is the one. It returns when ctx is done and lead
	// has returned.
	Run(ctx context.Context, lead func(ctx context.Context))
	// Err returns why it is not known who is; nil if it is.
	Err() error
}

// WriterConfig is what a Writer needs.
type WriterConfig struct {
	Truth    Truth
	Names    Names // nil: every connected node may appear
	Store    Store
	Election Election
	// Replicas returns the addresses of all replicas that exist, so that the lines of
	// one that the truth does not hear stay until it is gone. nil: what is not heard is
	// gone.
	Replicas func(ctx context.Context) ([]netip.Addr, error)
	Log      *slog.Logger
}

// Writer keeps the lines of a hosts file in Kubernetes equal to the truth. It is the
// module "dns-configmap".
type Writer struct {
	// Set once.
	cfg   WriterConfig
	log   *slog.Logger
	stats writerStats

	leading atomic.Bool

	mu    sync.Mutex // guards the following
	state writerState
}

// writerState is what an operator can see of the writing replica.
type writerState struct {
	err         error // why the last attempt failed
	conflicts   int   // attempts in a row that somebody else's write came before
	watchErr    error // why changes by others are seen late
	replicasErr error // why nobody knows which replicas live
	size        int   // bytes of all values of the ConfigMap
	entries     int
	decision    // without its hosts
}

var _ tunnel.Module = (*Writer)(nil)

// NewWriter returns a writer; nothing is written before Run.
func NewWriter(cfg WriterConfig) *Writer {
	return &Writer{cfg: cfg, log: cfg.Log, stats: newWriterStats()}
}

// Name implements tunnel.Module.
func (w *Writer) Name() string { return "dns-configmap" }

// Routes implements tunnel.Module. No peer may ask for any of this.
func (w *Writer) Routes() map[string]tunnel.Handler { return nil }

// Run writes until ctx is done. What cannot be written is tried again, and said in the
// log, in the metrics and by Note; it is no reason to stop.
func (w *Writer) Run(ctx context.Context) error {
	w.cfg.Election.Run(ctx, w.lead)
	return nil
}

// lead keeps the file until ctx is done.
func (w *Writer) lead(ctx context.Context) {
	w.leading.Store(true)
	defer w.leading.Store(false)
	changes := make(chan string) // versions; sent by Follow, never closed
	var following sync.WaitGroup
	following.Go(func() {
		w.cfg.Store.Follow(ctx, func(version string) {
			select {
			case changes <- version:
			case <-ctx.Done():
			}
		}, func(err error) { w.note(func(s *writerState) { s.watchErr = err }) })
		w.note(func(s *writerState) { s.watchErr = nil }) // the next lead watches anew
	})
	defer following.Wait()

	k := keeper{w: w}
	for ctx.Err() == nil {
		// Asked for before anything is looked at, so that no change is missed.
		truth, names := w.cfg.Truth.Changed(), (<-chan struct{})(nil)
		if w.cfg.Names != nil {
			names = w.cfg.Names.Changed()
		}
		again, notBefore := k.look(ctx)
		k.wait(ctx, again, changes, truth, names)
		k.wait(ctx, notBefore, changes, nil, nil)
	}
}

// wait waits until then, or until truth, names or the file has changed: that much only
// if truth is not nil.
func (k *keeper) wait(ctx context.Context, then time.Time, changes <-chan string, truth, names <-chan struct{}) {
	timer := time.NewTimer(time.Until(then))
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
			return
		case <-ctx.Done():
			return
		case <-truth:
			return
		case <-names:
			return
		case version := <-changes:
			if k.changed(version) && truth != nil {
				return
			}
		}
	}
}

// namesKnown reports whether it has been said yet which names may appear.
func (w *Writer) namesKnown() bool {
	if w.cfg.Names == nil {
		return true
	}
	_, known := w.cfg.Names.May("")
	return known
}
