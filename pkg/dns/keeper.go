package dns

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"time"

	"tunnel/pkg/kube"
)

const (
	writePause    = time.Second            // between two writes: what happens meanwhile goes into the next
	lookPause     = 100 * time.Millisecond // between two looks that led to no write
	idleLook      = 5 * time.Minute        // when nothing is known to have changed
	firstRetry    = time.Second            // after a failure; it doubles
	firstConflict = 100 * time.Millisecond // after a write that somebody else's came before; it doubles, too
	maxRetry      = 15 * time.Second
	maxRetryAfter = 5 * time.Minute  // however long the API server asks to be left alone
	askReplicas   = 30 * time.Second // how old an answer about which replicas live may be
	ownVersions   = 16               // remembered: more than the watch lags behind at a write a second
)

// A keeper keeps the file for one term of a leader. It is owned by Writer.lead.
type keeper struct {
	w      *Writer
	ledger ledger

	file   *kube.Content // as last read or written; nil: to be read
	hosts  Hosts         // the same, taken apart
	saved  []string      // versions that we made: no news when they are followed
	failed int           // attempts in a row

	unheard bool         // whether a line is of a replica that the truth does not hear
	alive   []netip.Addr // the replicas, as of asked; none: nobody knows
	asked   time.Time
}

// changed notes a version of the file and reports whether it is news.
func (k *keeper) changed(version string) bool {
	if k.file == nil || k.file.Version == version || slices.Contains(k.saved, version) {
		return false
	}
	k.file = nil
	return true
}

// look compares the file with the truth, and writes if they differ. It returns when to
// look again though nothing has changed, and before when not to look at all.
func (k *keeper) look(ctx context.Context) (again, notBefore time.Time) {
	now := time.Now()
	if !k.w.namesKnown() {
		return now.Add(idleLook), now
	}
	d, wrote, err := k.keep(ctx, now)
	if ctx.Err() != nil {
		return now, now
	}
	now = time.Now()
	if err != nil {
		k.failed++
		k.file = nil // whatever it was: it is read before the next attempt
		k.w.failed(err)
		retry := now.Add(k.delay(err))
		return retry, retry
	}
	k.failed = 0
	k.w.kept(d, *k.file)
	again = now.Add(idleLook)
	if !d.again.IsZero() && d.again.Before(again) {
		again = d.again
	}
	if ask := k.asked.Add(askReplicas); k.unheard && ask.Before(again) {
		again = ask
	}
	if wrote {
		return again, now.Add(writePause)
	}
	return again, now.Add(lookPause)
}

// delay is how long to wait after a failure. A conflict is somebody else's success, and
// the sooner we try again, the better; but not for ever at that pace.
func (k *keeper) delay(err error) time.Duration {
	d := firstRetry
	if kube.ReasonFor(err) == kube.Conflict {
		d = firstConflict
	}
	d = min(d<<min(k.failed-1, 10), maxRetry)
	return max(d, min(kube.RetryAfter(err), maxRetryAfter))
}

// keep reads the file unless it is known, and writes it if it has to change.
func (k *keeper) keep(ctx context.Context, now time.Time) (d decision, wrote bool, _ error) {
	store := k.w.cfg.Store
	if k.file == nil {
		loaded, err := store.Load(ctx)
		if err != nil {
			return d, false, err
		}
		k.file, k.hosts = &loaded, ParseHosts(loaded.Text)
	}
	d = k.ledger.decide(k.hosts, k.file.Others, facts{
		truth: k.w.cfg.Truth, names: k.w.cfg.Names, alive: k.lives(ctx, now), now: now,
	})
	text := d.hosts.String()
	if text == k.file.Text && k.file.Version != "" { // an empty one is made: pods that mount it wait for it
		return d, false, nil
	}
	file, err := store.Save(ctx, *k.file, text)
	if err != nil {
		return d, false, err
	}
	k.file, k.hosts = &file, d.hosts
	k.saved = append(k.saved[max(0, len(k.saved)-ownVersions+1):], file.Version)
	k.w.wrote(len(text))
	return d, true, nil
}

// lives returns who is a replica. It asks only while a line is of one that is not heard.
func (k *keeper) lives(ctx context.Context, now time.Time) func(netip.Addr) bool {
	ask := k.w.cfg.Replicas
	if ask == nil {
		return func(netip.Addr) bool { return false }
	}
	hears := k.w.cfg.Truth.Hears
	k.unheard = slices.ContainsFunc(k.hosts.Own, func(e Entry) bool { return !hears(e.Addr) })
	switch {
	case !k.unheard: // no line depends on who lives
		k.w.note(func(s *writerState) { s.replicasErr = nil })
	case now.Sub(k.asked) >= askReplicas:
		alive, err := ask(ctx)
		if err == nil && !slices.ContainsFunc(alive, hears) {
			alive, err = nil, errors.New("this replica is none of them: is service in [mode.cloud.stream.dns] the right one, and POD_IP the pod's address?")
		}
		if ctx.Err() == nil {
			k.w.note(func(s *writerState) { s.replicasErr = err })
		}
		k.alive, k.asked = alive, now
	}
	return func(a netip.Addr) bool { return len(k.alive) == 0 || slices.Contains(k.alive, a) }
}
