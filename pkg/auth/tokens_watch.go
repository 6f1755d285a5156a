package auth

import (
	"context"
	"crypto/sha256"
	"log/slog"
	"time"

	"tunnel.example/tunnel/pkg/reload"
)

// Run follows the file until ctx is done. If the file is missing or bad, the last good content stays in
// force, and the fault is logged once. The file is read again at its next change. Run never returns an
// error.
func (t *Tokens) Run(ctx context.Context) error {
	reload.Watch(ctx, []string{t.path}, t.log, t.reload)
	return nil
}

const (
	// catchUpPoll is how often latest looks whether Run has read the file.
	catchUpPoll = 10 * time.Millisecond
	// catchUpPolls is how many times latest looks at most: over a second, within which [reload.Watch] sees each change.
	catchUpPolls = 120
)

// latest returns the table in force. If the file has changed since Run has read it, latest first waits until Run
// has read it again. If Run does not do so within a second, or ctx is done, latest returns the table as it is.
func (t *Tokens) latest(ctx context.Context) *table {
	// Turns are counted, not time: a process that was paused gives Run its turns too.
	for range catchUpPolls {
		if seen := t.seen.Load(); seen.Equal(reload.Identify(t.path)) {
			break
		}
		select {
		case <-time.After(catchUpPoll):
		case <-ctx.Done():
			return t.table.Load()
		}
	}
	return t.table.Load()
}

// reload reads the file and puts its content in force if it is good. It returns true if the file could
// not be read, so that reload is called again soon.
func (t *Tokens) reload() (again bool) {
	id := reload.Identify(t.path) // before it is read, so that a write during the reading counts as a change
	defer func() { t.seen.Store(&id) }()
	content, info, err := readSecretFile(t.path, MaxTokenFile, slog.New(slog.DiscardHandler))
	if err != nil {
		t.keepLastGood(err.Error(), err)
		return true
	}
	digest := sha256.Sum256(content)
	if digest == t.content {
		if t.loggedFault != "" {
			t.log.Info("token file is good again; its tokens are those in force")
		}
		t.loggedFault = ""
		t.fault.Store(nil)
		return false
	}
	warnIfExposed(t.path, info, t.log)
	tb, err := parseTokens(t.path, string(content), t.allowShared, t.mayBeEmpty)
	if err != nil {
		t.keepLastGood(string(digest[:]), err)
		return false
	}
	t.content, t.loggedFault = digest, ""
	t.fault.Store(nil)
	before := t.table.Load()
	revoked := t.adopt(tb)
	t.log.Info("token file read again", "nodes", len(tb.byNode), "sessions_ended", revoked)
	if t.audit != nil {
		for _, e := range changes(before, tb) {
			t.audit.Record(e)
		}
	}
	tb.warn(t.log)
	return false
}

// keepLastGood logs that the last good content stays in force. It logs each fault once. id
// identifies the fault.
func (t *Tokens) keepLastGood(id string, err error) {
	if t.loggedFault == id {
		return
	}
	t.loggedFault = id
	t.fault.Store(&err)
	t.log.Error("token file is bad; the tokens read before stay in force", "err", err)
}
