package auth

import (
	"context"
	"crypto/sha256"
	"log/slog"

	"tunnel/pkg/reload"
)

// Run follows the file until ctx is done. A file that is missing or bad leaves the
// last good state in force, is logged once, and is read again at its next change. It
// never returns an error.
func (t *Tokens) Run(ctx context.Context) error {
	reload.Watch(ctx, []string{t.path}, t.log, t.reload)
	return nil
}

// reload reads the file and adopts it when it is good. It reports whether it could not
// be read, and is to be read again.
func (t *Tokens) reload() (again bool) {
	content, info, err := readSecretFile(t.path, maxTokenFile, slog.New(slog.DiscardHandler))
	if err != nil {
		t.keep(err.Error(), err)
		return true
	}
	digest := sha256.Sum256(content)
	if digest == t.content {
		if t.badness != "" {
			t.log.Info("token file holds again what is in force")
		}
		t.badness = ""
		t.fault.Store(nil)
		return false
	}
	warnOthers(t.path, info, t.log)
	tb, err := parseTokens(t.path, string(content), t.allowShared, t.mayBeEmpty)
	if err != nil {
		t.keep(string(digest[:]), err)
		return false
	}
	t.content, t.badness = digest, ""
	t.fault.Store(nil)
	revoked := t.adopt(tb)
	t.log.Info("token file read again", "nodes", len(tb.own), "sessions_ended", revoked)
	tb.warn(t.log)
	return false
}

// keep logs, once for the same fault, that the last good state stays in force.
func (t *Tokens) keep(badness string, err error) {
	if t.badness == badness {
		return
	}
	t.badness = badness
	t.fault.Store(&err)
	t.log.Error("token file is bad; the tokens read before it stay in force", "err", err)
}
