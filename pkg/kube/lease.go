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

// The defaults of Kubernetes' own components (k8s.io/client-go/tools/leaderelection).
const (
	leaseDuration = 15 * time.Second // a holder that has not renewed for this long has lost it
	renewDeadline = 10 * time.Second // a holder that could not renew for this long stops by itself, before others may begin
	retryPeriod   = 2 * time.Second  // between attempts of anyone; up to a fifth more, so that replicas do not march in step
	releaseWithin = 2 * time.Second
)

// Lease elects one of several processes by an object of coordination.k8s.io. It does
// what client-go's leaderelection does, which would bring the typed API with it.
type Lease struct {
	// Set once.
	objects         objects
	namespace, name string
	identity        string
	log             *slog.Logger

	// Owned by Run.
	seen   lease     // as last read or written
	seenAt time.Time // when it last changed, by our clock: the holder's is not compared with ours

	held atomic.Bool
	err  atomic.Pointer[error] // of the last attempt; nil: none
}

// lease is the object, as far as we look (k8s.io/api/coordination/v1).
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

// Lease returns the Lease of that name for a process that calls itself identity, which
// no other may do.
func (c *Client) Lease(namespace, name, identity string, log *slog.Logger) *Lease {
	return &Lease{objects: c.objects, namespace: namespace, name: name, identity: identity, log: log}
}

// Held reports whether this process holds the lease.
func (l *Lease) Held() bool { return l.held.Load() }

// Err returns why the last attempt to get or renew the lease failed; nil when it did
// not, or when somebody else holds the lease.
func (l *Lease) Err() error {
	if err := l.err.Load(); err != nil {
		return *err
	}
	return nil
}

// Run calls lead whenever this process holds the lease, and ends lead's context when it
// no longer does, before anyone else can hold it. Run returns when ctx is done, lead has
// returned, and the lease has been given back.
func (l *Lease) Run(ctx context.Context, lead func(ctx context.Context)) {
	for ctx.Err() == nil {
		if l.attempt(ctx) {
			l.lead(ctx, lead)
			continue
		}
		sleep(ctx, retryPeriod+rand.N(retryPeriod/5)) //nolint:gosec // jitter
	}
}

// lead runs lead until ctx is done, the lease is somebody else's, or it has not been
// renewed for renewDeadline.
func (l *Lease) lead(ctx context.Context, lead func(ctx context.Context)) {
	l.log.Info("this replica writes from now on", "lease", l.namespace+"/"+l.name)
	leading, stop := context.WithCancel(ctx)
	done := make(chan struct{}) // closed when lead has returned
	l.held.Store(true)
	go func() {
		defer close(done)
		lead(leading)
	}()
	renewed := time.Now()
	for ctx.Err() == nil && time.Since(renewed) < renewDeadline {
		sleep(ctx, min(retryPeriod, renewDeadline-time.Since(renewed)))
		if time.Since(renewed) >= renewDeadline {
			break // an attempt now would only hide why the ones before failed
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
	l.log.Warn("this replica writes no longer", "lease", l.namespace+"/"+l.name, "holder", l.seen.Spec.Holder, "err", l.Err())
}

// attempt gets or renews the lease and reports whether it is ours for another
// leaseDuration.
func (l *Lease) attempt(ctx context.Context) bool {
	ours, err := l.try(ctx)
	if errors.Is(err, context.Canceled) {
		return false
	}
	if apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err) {
		err = nil // somebody was faster: the next attempt reads who
	}
	before := l.Err()
	if err == nil {
		l.err.Store(nil)
	} else {
		l.err.Store(&err)
	}
	if err != nil && before == nil {
		l.log.Warn("the lease that says which replica writes cannot be used", "lease", l.namespace+"/"+l.name, "err", Explain(err))
	}
	return ours
}

func (l *Lease) try(ctx context.Context) (ours bool, err error) {
	// A holder renews what it wrote itself; if anything has happened since, that is a
	// conflict, and the lease is read.
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
		if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
			l.seen.Metadata.ResourceVersion = "" // out of date: read it the next time
			return false, l.read(ctx)
		}
		return false, err
	}
	return true, nil
}

// mine reports whether what was last seen of the lease is what we wrote.
func (l *Lease) mine() bool {
	return l.held.Load() && l.seen.Spec.Holder == l.identity && l.seen.Metadata.ResourceVersion != ""
}

// read looks who holds the lease. That there is none is no error.
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

// release gives the lease back, so that another replica need not wait until it expires.
func (l *Lease) release(ctx context.Context) {
	if l.seen.Spec.Holder != l.identity {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, releaseWithin)
	defer cancel()
	spec := l.seen.Spec
	spec.Holder, spec.Seconds = "", 1
	if err := l.write(ctx, spec); err != nil && !apierrors.IsConflict(err) {
		l.log.Warn("the lease was not given back; another replica takes it when it expires", "lease", l.namespace+"/"+l.name, "err", err)
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
