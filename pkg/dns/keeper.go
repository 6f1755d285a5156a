package dns

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"time"

	"tunnel.example/tunnel/pkg/kube"
)

const (
	// minWriteInterval is the pause after a write. Changes meanwhile go into the next write.
	minWriteInterval = time.Second
	// minReconcileInterval is the pause after a reconciliation without a write.
	minReconcileInterval = 100 * time.Millisecond
	// resyncInterval is how often the keeper reconciles although no change was reported. If the watch fails, the keeper
	// then reads the file again, since it does not learn what other writers do.
	resyncInterval = 5 * time.Minute
	// minRetry is the pause after a first failure. It doubles with each further failure, up to
	// maxRetry.
	minRetry = time.Second
	// minConflictRetry is the pause after a first conflict with another writer. It doubles, too.
	minConflictRetry = 100 * time.Millisecond
	maxRetry         = 15 * time.Second
	// maxRetryAfter is the longest pause if the API server asks for one.
	maxRetryAfter = 5 * time.Minute
	// replicasMaxAge is how long the list of replicas that exist may be used.
	replicasMaxAge = 30 * time.Second
	// maxOwnVersions is how many of our own versions are remembered. At one write a second, the
	// watch lags behind by fewer.
	maxOwnVersions = 16
)

// A keeper keeps the file up to date for one term of a leader. The goroutine of Writer.lead owns
// it.
type keeper struct {
	w      *Writer
	ledger ledger

	file        *kube.Content // as last read or written; nil: to be read again
	hosts       Hosts         // file.Text, parsed
	fileAt      time.Time     // when file was read or written
	ownVersions []string      // versions that our own writes made; the watch reports them, too
	failures    int           // failed attempts in a row

	hasUnknownReplica bool         // the file has a line of a replica that the truth does not cover
	aliveReplicas     []netip.Addr // addresses of the replicas that exist; empty: unknown
	replicasAt        time.Time    // when aliveReplicas was read
}

// fileChanged handles a version of the file that the watch has reported. It returns true if
// another writer has changed the file, which must then be read again.
func (k *keeper) fileChanged(version string) bool {
	if k.file == nil || k.file.Version == version || slices.Contains(k.ownVersions, version) {
		return false
	}
	k.file = nil
	return true
}

// reconcile compares the file with the truth, and writes the file if they differ. again is when
// to reconcile even if nothing changes. notBefore is the earliest time for the next call.
func (k *keeper) reconcile(ctx context.Context) (again, notBefore time.Time) {
	now := time.Now()
	if !k.w.namesKnown() {
		return now.Add(resyncInterval), now
	}
	d, wrote, err := k.writeIfChanged(ctx, now)
	if ctx.Err() != nil {
		return now, now
	}
	now = time.Now()
	if err != nil {
		k.failures++
		k.file = nil // after any error the next attempt reads the file first
		k.w.noteFailure(err)
		retry := now.Add(k.delay(err))
		return retry, retry
	}
	k.failures = 0
	k.w.noteSynced(d, *k.file)
	again = now.Add(resyncInterval)
	if !d.again.IsZero() && d.again.Before(again) {
		again = d.again
	}
	if expiry := k.replicasAt.Add(replicasMaxAge); k.hasUnknownReplica && expiry.Before(again) {
		again = expiry
	}
	if wrote {
		return again, now.Add(minWriteInterval)
	}
	return again, now.Add(minReconcileInterval)
}

// delay returns how long to wait after a failure. After a conflict the first retries come sooner,
// since another writer was only faster. The delay doubles with each failure, so that retries do
// not stay that frequent.
func (k *keeper) delay(err error) time.Duration {
	d := minRetry
	if kube.ReasonFor(err) == kube.Conflict {
		d = minConflictRetry
	}
	d = min(d<<min(k.failures-1, 10), maxRetry)
	return max(d, min(kube.RetryAfter(err), maxRetryAfter))
}

// writeIfChanged reads the file unless k.file has its content. It writes the file if the content must
// change. wrote reports whether it has written the file.
func (k *keeper) writeIfChanged(ctx context.Context, now time.Time) (d decision, wrote bool, _ error) {
	store := k.w.cfg.Store
	if k.file == nil || k.w.isBlind() && now.Sub(k.fileAt) >= resyncInterval {
		loaded, err := store.Load(ctx)
		if err != nil {
			return d, false, err
		}
		k.file, k.hosts, k.fileAt = &loaded, ParseHosts(loaded.Text), now
	}
	d = k.ledger.decide(k.hosts, k.file.Others, facts{
		truth: k.w.cfg.Truth, names: k.w.cfg.Names, alive: k.replicaAlive(ctx, now), now: now,
	})
	text := d.hosts.String()
	// A missing ConfigMap is created even if it stays empty: pods that mount it wait for it.
	if text == k.file.Text && k.file.Version != "" {
		return d, false, nil
	}
	file, err := store.Save(ctx, *k.file, text)
	if err != nil {
		return d, false, err
	}
	k.file, k.hosts, k.fileAt = &file, d.hosts, now
	k.ownVersions = append(k.ownVersions[max(0, len(k.ownVersions)-maxOwnVersions+1):], file.Version)
	k.w.countWrite(len(text))
	return d, true, nil
}

// replicaAlive returns a function that reports whether a replica at an address may still exist. It
// reads the list of replicas only while the file has a line of a replica that the truth does not
// cover.
func (k *keeper) replicaAlive(ctx context.Context, now time.Time) func(netip.Addr) bool {
	list := k.w.cfg.Replicas
	if list == nil {
		return func(netip.Addr) bool { return false }
	}
	hears := k.w.cfg.Truth.Hears
	k.hasUnknownReplica = slices.ContainsFunc(k.hosts.Own, func(e Entry) bool { return !hears(e.Addr) })
	switch {
	case !k.hasUnknownReplica: // every replica with a line is covered by the truth, so the list is not needed
		k.w.update(func(s *writerState) { s.replicasErr = nil })
	case now.Sub(k.replicasAt) >= replicasMaxAge:
		alive, err := list(ctx)
		if err == nil && !slices.ContainsFunc(alive, hears) {
			alive, err = nil, errors.New("this replica is not among the Service's pods: "+
				"is service in [mode.cloud.stream.dns] the right one, and POD_IP the pod's address?")
		}
		if ctx.Err() == nil {
			k.w.update(func(s *writerState) { s.replicasErr = err })
		}
		k.aliveReplicas, k.replicasAt = alive, now
	}
	return func(a netip.Addr) bool { return len(k.aliveReplicas) == 0 || slices.Contains(k.aliveReplicas, a) }
}
