package kube

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"path"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	// The first three values are the defaults of Kubernetes' own components
	// (k8s.io/client-go/tools/leaderelection).

	// leaseDuration is how long a lease lasts after a renewal. Then another process may take it.
	leaseDuration = 15 * time.Second
	// renewDeadline is how long a holder that cannot renew goes on. It is less than leaseDuration,
	// so the holder stops before another process may start.
	renewDeadline = 10 * time.Second
	// retryPeriod is the pause between two attempts of one process. A process without the lease
	// adds up to a fifth at random, so that replicas do not try at the same time.
	retryPeriod = 2 * time.Second
	// releaseTimeout bounds the request that gives the lease back at the end.
	releaseTimeout = 2 * time.Second
)

// Lease elects one of several processes by an object of coordination.k8s.io. It works like
// client-go's leaderelection, but without the typed API, which that package needs.
type Lease struct {
	// Set once.
	objects         objects
	namespace, name string
	identity        string
	log             *slog.Logger

	// Owned by Run.
	seen lease // the object as last read or written
	// seenAt is when the object last changed, by our own clock. The holder's clock is not used,
	// since it may differ from ours.
	seenAt time.Time

	// Written by Run, read by any goroutine.
	held atomic.Bool
	err  atomic.Pointer[error] // why the last attempt failed; nil: it did not fail
}

// lease holds the fields of a Lease (k8s.io/api/coordination/v1) that this package uses.
type lease struct {
	object
	Spec leaseSpec `json:"spec"`
}

type leaseSpec struct {
	Holder      string            `json:"holderIdentity"`
	Seconds     int               `json:"leaseDurationSeconds"`
	Acquired    *metav1.MicroTime `json:"acquireTime,omitempty"`
	Renewed     *metav1.MicroTime `json:"renewTime,omitempty"`
	Transitions int               `json:"leaseTransitions"`
}

// Lease returns the Lease of that name for the process with that identity. No other process
// may use the same identity.
func (c *Client) Lease(namespace, name, identity string, log *slog.Logger) *Lease {
	return &Lease{objects: c.objects, namespace: namespace, name: name, identity: identity, log: log}
}

// Held reports whether this process holds the lease.
func (l *Lease) Held() bool { return l.held.Load() }

// Err returns why the last attempt to get or renew the lease failed. It returns nil if the
// attempt did not fail, or if another process holds the lease.
func (l *Lease) Err() error {
	if err := l.err.Load(); err != nil {
		return *err
	}
	return nil
}

// Run calls lead each time this process gets the lease. It ends the context of lead before another
// process can get the lease. When ctx is done, Run waits for lead, gives the lease back, and returns.
func (l *Lease) Run(ctx context.Context, lead func(ctx context.Context)) {
	for ctx.Err() == nil {
		if l.attempt(ctx) {
			l.lead(ctx, lead)
			continue
		}
		sleep(ctx, retryPeriod+rand.N(retryPeriod/5))
	}
}

// lead calls the function lead, and renews the lease while the function runs. It cancels the function's
// context when ctx is done, when another process holds the lease, or after renewDeadline without a renewal.
func (l *Lease) lead(ctx context.Context, lead func(ctx context.Context)) {
	l.log.Info("this replica writes from now on", "lease", l.namespace+"/"+l.name)
	leading, stop := context.WithCancel(ctx)
	done := make(chan struct{}) // closed when lead has returned; nothing is sent
	l.held.Store(true)
	go func() {
		defer close(done)
		lead(leading)
	}()
	renewed := time.Now()
	for ctx.Err() == nil && time.Since(renewed) < renewDeadline {
		sleep(ctx, min(retryPeriod, renewDeadline-time.Since(renewed)))
		if time.Since(renewed) >= renewDeadline {
			break // another attempt would time out at once and replace the error of the earlier ones
		}
		attempt, cancel := context.WithDeadline(ctx, renewed.Add(renewDeadline))
		if l.attempt(attempt) {
			renewed = time.Now()
		}
		cancel()
		if l.seen.Spec.Holder != l.identity {
			break
		}
	}
	stop()
	<-done
	l.held.Store(false)
	if ctx.Err() != nil {
		l.release(context.WithoutCancel(ctx))
		return
	}
	l.log.Warn("this replica writes no longer",
		"lease", l.namespace+"/"+l.name, "holder", l.seen.Spec.Holder, "err", l.Err())
}

// attempt gets or renews the lease. It reports whether this process holds the lease for another
// leaseDuration.
func (l *Lease) attempt(ctx context.Context) bool {
	ours, err := l.try(ctx)
	if errors.Is(err, context.Canceled) {
		return false
	}
	if apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) {
		err = nil // another process was faster; the next attempt reads which process
	}
	before := l.Err()
	if err == nil {
		l.err.Store(nil)
	} else {
		l.err.Store(&err)
	}
	if err != nil && before == nil {
		l.log.Warn("the lease that elects the writing replica cannot be used",
			"lease", l.namespace+"/"+l.name, "err", Explain(err))
	}
	return ours
}

// try makes one attempt to get or renew the lease. attempt handles its errors.
func (l *Lease) try(ctx context.Context) (ours bool, err error) {
	// A holder renews without reading the lease first. If another process has changed the lease,
	// the write ends in a conflict, and then the lease is read.
	if !l.mine() {
		if err := l.read(ctx); err != nil {
			return false, err
		}
		if holder := l.seen.Spec; holder.Holder != "" && holder.Holder != l.identity &&
			time.Since(l.seenAt) < time.Duration(holder.Seconds)*time.Second {
			return false, nil
		}
	}
	now := metav1.NowMicro()
	spec := l.seen.Spec
	if spec.Holder != l.identity {
		spec.Holder, spec.Acquired = l.identity, &now
		if l.seen.Metadata.ResourceVersion != "" {
			spec.Transitions++
		}
	}
	spec.Seconds, spec.Renewed = int(leaseDuration.Seconds()), &now
	if err := l.write(ctx, spec); err != nil {
		update := l.seen.Metadata.ResourceVersion != "" // what is not found by a create is the namespace
		if apierrors.IsConflict(err) || apierrors.IsNotFound(err) && update {
			l.seen.Metadata.ResourceVersion = "" // no longer valid: if the read below fails, the next attempt reads again
			return false, l.read(ctx)
		}
		return false, err
	}
	return true, nil
}

// mine reports whether the lease as last seen is the one that this process wrote.
func (l *Lease) mine() bool {
	return l.held.Load() && l.seen.Spec.Holder == l.identity && l.seen.Metadata.ResourceVersion != ""
}

// read reads the lease. A missing lease is no error.
func (l *Lease) read(ctx context.Context) error {
	var now lease
	err := l.objects.get(ctx, l.path(), &now)
	if err != nil && !apierrors.IsNotFound(err) {
		return err
	}
	if now.Metadata.ResourceVersion != l.seen.Metadata.ResourceVersion || l.seenAt.IsZero() {
		l.seenAt = time.Now()
	}
	l.seen = now
	return nil
}

// write creates or updates the lease at the version last seen.
func (l *Lease) write(ctx context.Context, spec leaseSpec) error {
	write := lease{object: named(l.namespace, l.name, l.seen.Metadata.ResourceVersion), Spec: spec}
	var now object
	var err error
	if write.Metadata.ResourceVersion == "" {
		err = l.objects.create(ctx, leases(l.namespace), write, &now)
	} else {
		err = l.objects.patch(ctx, l.path(), write, &now)
	}
	if err != nil {
		return err
	}
	write.object, l.seenAt = now, time.Now()
	l.seen = write
	return nil
}

// release gives the lease back, so that another replica does not have to wait until it expires.
func (l *Lease) release(ctx context.Context) {
	if l.seen.Spec.Holder != l.identity {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, releaseTimeout)
	defer cancel()
	spec := l.seen.Spec
	spec.Holder, spec.Seconds = "", 1
	if err := l.write(ctx, spec); err != nil && !apierrors.IsConflict(err) {
		l.log.Warn("the lease was not released; another replica takes it when it expires",
			"lease", l.namespace+"/"+l.name, "err", err)
	}
}

func (l *Lease) path() string { return path.Join(leases(l.namespace), l.name) }

// sleep waits for d, or until ctx is done.
func sleep(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}
