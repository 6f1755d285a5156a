package dns

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"tunnel.example/tunnel/pkg/kube"
	"tunnel.example/tunnel/pkg/tunnel"
)

// Store stores the hosts file. *kube.ConfigMap implements it.
type Store interface {
	fmt.Stringer
	// Load reads the file. A missing file is no error.
	Load(ctx context.Context) (kube.Content, error)
	// Save writes the file if it still has the version of old. It returns the new content.
	Save(ctx context.Context, old kube.Content, text string) (kube.Content, error)
	// Follow calls changed with the version of each change until ctx is done. It calls report
	// with the outcome of each request: nil, or why it failed.
	Follow(ctx context.Context, changed func(version string), report func(error))
}

// Election elects the replica that writes. *kube.Lease implements it.
type Election interface {
	// Run calls lead while this replica is the leader. It returns when ctx is done and lead
	// has returned.
	Run(ctx context.Context, lead func(ctx context.Context))
	// Err returns why the leader is unknown; nil: it is known.
	Err() error
}

// WriterConfig configures a Writer.
type WriterConfig struct {
	Truth    Truth
	Names    Names // nil: every connected node may be published
	Store    Store
	Election Election
	// Replicas returns the addresses of all replicas that exist. The Writer keeps the lines of a
	// replica that Truth does not cover until that replica no longer exists. nil: a replica that
	// Truth does not cover does not exist.
	Replicas func(ctx context.Context) ([]netip.Addr, error)
	Log      *slog.Logger
}

// Writer keeps its lines of a hosts file in Kubernetes equal to the truth. It is the
// module "dns-configmap".
type Writer struct {
	// Set once.
	cfg   WriterConfig
	log   *slog.Logger
	stats writerStats // its counters are atomic

	leading atomic.Bool // this replica writes; set by lead

	mu    sync.Mutex // guards the following
	state writerState
}

// writerState is the state of the writing replica that operators see.
type writerState struct {
	err         error // why the last attempt failed; nil: it did not
	conflicts   int   // conflicts with other writers in a row
	watchErr    error // why changes by other writers are noticed late; nil: they are not
	replicasErr error // why the list of replicas is unknown; nil: it is known, or not needed
	size        int   // bytes of all values of the ConfigMap
	entries     int   // the Writer's lines in the file
	decision          // the last one, without its hosts
}

var _ tunnel.Module = (*Writer)(nil)

// NewWriter returns a Writer. It reads and writes nothing before Run.
func NewWriter(cfg WriterConfig) *Writer {
	return &Writer{cfg: cfg, log: cfg.Log, stats: newWriterStats()}
}

// Name implements tunnel.Module.
func (w *Writer) Name() string { return "dns-configmap" }

// Run keeps the file up to date until ctx is done. If a write fails, Run tries again; the log,
// the metrics and Note report the failure.
func (w *Writer) Run(ctx context.Context) error {
	w.cfg.Election.Run(ctx, w.lead)
	return nil
}

// lead keeps the file up to date until ctx is done, that is, while this replica is the leader.
func (w *Writer) lead(ctx context.Context) {
	w.leading.Store(true)
	defer w.leading.Store(false)
	// Follow sends versions, and keeper.wait receives them. No buffer, since a version may wait until
	// the keeper has time. It is never closed; both sides end with ctx.
	changes := make(chan string)
	var following sync.WaitGroup
	following.Go(func() {
		w.cfg.Store.Follow(ctx, func(version string) {
			select {
			case changes <- version:
			case <-ctx.Done():
			}
		}, func(err error) { w.update(func(s *writerState) { s.watchErr = err }) })
		w.update(func(s *writerState) { s.watchErr = nil }) // the next term starts a new watch
	})
	defer following.Wait()

	k := keeper{w: w}
	for ctx.Err() == nil {
		// Get these channels before reading anything, so that no change is missed.
		truth, names := w.cfg.Truth.Changed(), (<-chan struct{})(nil)
		if w.cfg.Names != nil {
			names = w.cfg.Names.Changed()
		}
		again, notBefore := k.reconcile(ctx)
		k.wait(ctx, again, changes, truth, names)
		k.wait(ctx, notBefore, changes, nil, nil)
	}
}

// wait waits until then. It returns earlier when truth, names or the file has changed. If truth
// is nil, changes of the file are noted but do not end the wait.
func (k *keeper) wait(
	ctx context.Context, then time.Time, changes <-chan string, truth, names <-chan struct{},
) {
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
			if k.fileChanged(version) && truth != nil {
				return
			}
		}
	}
}

// namesKnown reports whether it is known which names may be published.
func (w *Writer) namesKnown() bool {
	if w.cfg.Names == nil {
		return true
	}
	_, known := w.cfg.Names.May("")
	return known
}
