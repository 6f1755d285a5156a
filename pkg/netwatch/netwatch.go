// Package netwatch tells when the addresses or routes of this machine change.
//
//	w := netwatch.New(client.NetworkChanged, log)
//	err := w.Run(ctx)
//
// So an edge need not wait for a timeout after its machine has moved to another network. Only Linux tells; on other
// systems Run only waits.
//
// The package does not say what has changed: most changes on a Kubernetes node are about pods. Who listens checks
// what concerns it.
package netwatch

import (
	"context"
	"log/slog"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

const (
	// settle is how long changes may follow each other before they are told: a machine that joins a network gets
	// addresses and routes one after the other.
	settle = 300 * time.Millisecond
	// pause is the time between two calls, at least. Pods that come and go change routes all the time.
	pause = 2 * time.Second
	// again is how long after a failure the Watcher subscribes again.
	again = 10 * time.Second
)

// Watcher is the module "netwatch".
type Watcher struct {
	changed func()
	log     *slog.Logger
	// subscribe sends to events when something has changed, until ctx is done or it fails. Tests replace it.
	subscribe func(ctx context.Context, events chan<- struct{}) error
}

var _ tunnel.Module = (*Watcher)(nil)

// New returns a Watcher that calls changed, one call at a time.
func New(changed func(), log *slog.Logger) *Watcher {
	return &Watcher{changed: changed, log: log.With("module", "netwatch"), subscribe: subscribe}
}

// Name implements tunnel.Module.
func (w *Watcher) Name() string { return "netwatch" }

// Run implements tunnel.Module. Without a way to watch it waits until ctx is done.
func (w *Watcher) Run(ctx context.Context) error {
	events := make(chan struct{}, 1) // capacity 1: any number of changes before the next call is one
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		w.watch(ctx, events)
	}()
	for {
		select {
		case <-events:
		case <-ctx.Done():
			<-ended
			return nil
		}
		if wait(ctx, settle) {
			select {
			case <-events:
			default:
			}
			w.changed()
			wait(ctx, pause)
		}
	}
}

// watch subscribes until ctx is done. A subscription ends when the kernel has dropped messages, since they came too
// fast: that is a change, too. If one subscription after another fails, only the first failure is told.
func (w *Watcher) watch(ctx context.Context, events chan<- struct{}) {
	warned, told := false, false
	for ctx.Err() == nil {
		began := time.Now()
		err := w.subscribe(ctx, events)
		if ctx.Err() != nil {
			return
		}
		if !warned {
			warned = true
			w.log.Info("changes of routes are noticed late, by timeouts", "err", err)
		}
		// A subscription that has lived for a while has worked, so changes can have been lost at its end.
		if !told || time.Since(began) >= again {
			told = true
			tell(events)
		}
		wait(ctx, again)
	}
}

// tell sends an event, unless one waits already.
func tell(events chan<- struct{}) {
	select {
	case events <- struct{}{}:
	default:
	}
}

// wait waits for d. It returns false if ctx is done first.
func wait(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}
