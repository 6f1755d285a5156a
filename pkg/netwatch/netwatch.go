// Package netwatch calls a function when the addresses or routes of this machine change.
//
//	w := netwatch.New(client.NetworkChanged, log)
//	err := w.Run(ctx)
//
// So an edge need not wait for a timeout after its machine has moved to another network. On systems other than
// Linux, Run only waits for the end of ctx.
//
// The package does not say what has changed. Most changes on a Kubernetes node are about pods, so the function has
// to check whether a change concerns it.
package netwatch

import (
	"context"
	"log/slog"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

const (
	// settle is the wait between a change and the call of changed. One call stands for all changes in this time: a
	// machine that joins a network gets addresses and routes one after the other.
	settle = 300 * time.Millisecond
	// pause is the shortest time between two calls. Pods that start and stop change routes all the time.
	pause = 2 * time.Second
	// again is the shortest time between two subscriptions.
	again = 10 * time.Second
)

// Watcher is the module "netwatch".
type Watcher struct {
	changed func()
	log     *slog.Logger
	// subscribe sends to events when something has changed, until ctx is done or it fails. opened says that the kernel
	// reported changes until then. Tests replace subscribe.
	subscribe func(ctx context.Context, events chan<- struct{}) (opened bool, err error)
}

var _ tunnel.Module = (*Watcher)(nil)

// New returns a Watcher that calls changed, one call at a time.
func New(changed func(), log *slog.Logger) *Watcher {
	return &Watcher{changed: changed, log: log.With("module", "netwatch"), subscribe: subscribe}
}

// Name implements tunnel.Module.
func (w *Watcher) Name() string { return "netwatch" }

// Run implements tunnel.Module. On a system without notifications it waits until ctx is done.
func (w *Watcher) Run(ctx context.Context) error {
	events := make(chan struct{}, 1) // capacity 1: all changes before the next call count as one
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

// watch subscribes, and again after a failure, until ctx is done. An open subscription fails when the kernel drops
// messages that come too fast. It may have lost changes, so its failure counts as a change: the next subscription is
// open long before changed is called.
func (w *Watcher) watch(ctx context.Context, events chan<- struct{}) {
	warned, gap := false, false // gap: a subscription has broken off, and no other one was open since
	for ctx.Err() == nil {
		began := time.Now()
		opened, err := w.subscribe(ctx, events)
		if ctx.Err() != nil {
			return
		}
		if !opened && !warned {
			warned = true
			w.log.Info("the kernel reports no route changes: the edge notices them by timeouts", "err", err)
		}
		if !opened || time.Since(began) < again {
			wait(ctx, again)
		}
		if opened {
			w.log.Debug("the kernel's reports of route changes broke off, and are asked for again", "err", err)
		}
		if gap = gap || opened; gap {
			tell(events)
		}
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
