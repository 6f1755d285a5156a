// Package reload keeps up with certificate files that change while the process runs. A tool that
// renews a certificate (cert-manager, a kubelet that mounts a Secret, certbot, a script) replaces
// its files and does not notify the process.
//
//	files := reload.NewFiles(log)
//	pair, err := files.Pair("mode.cloud.https", "https.crt", "https.key") // fatal when bad
//	pool, err := files.Pool("mode.cloud.https clientca", "ca.crt")
//	go files.Run(ctx) // follows them
//	…
//	tls.Config{GetCertificate: pair.GetCertificate}
//	pool.Pool() // verifies the next caller
//
// Users of a [Pair] or a [Pool] ask it for each new connection and keep no result. Open connections
// are not affected by a change; new ones use the new state.
//
// A new state is adopted only if all of it is good: a certificate and the key that matches it, or a
// bundle whose certificates can all be parsed. Until then the last good state stays in use, and the
// files are read again and again. One line in the log says why, and [Files.Note] says that the files
// are bad. A certificate that is about to expire causes a log line as well; a metric shows when each
// one expires.
//
// [Watch] does the watching, also for other files: it reports a change within a second, even on
// file systems without notifications.
//
// The package verifies no certificate, decides nothing about who may call, and renews nothing.
package reload

import (
	"context"
	"crypto/sha256"
	"errors"
	"log/slog"
	"sync"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

const (
	// expiryInterval is how often the certificates in use are checked for expiry.
	expiryInterval = time.Minute
	// warnBefore is how long before its end a certificate that has not been renewed causes a
	// warning.
	warnBefore = 24 * time.Hour
	// warnFraction replaces warnBefore for certificates that live for hours or days only: they
	// cause the warning when less than 1/warnFraction of their lifetime is left.
	warnFraction = 6
)

// validity is the time span in which a certificate is valid.
type validity struct{ from, until time.Time }

// at reports whether the certificate is valid at now.
func (v validity) at(now time.Time) bool { return !now.Before(v.from) && !now.After(v.until) }

// state says whether a certificate is about to expire or has expired.
type state int

const (
	fine state = iota
	expiring
	expired
)

func (v validity) state(now time.Time) state {
	switch left := v.until.Sub(now); {
	case left < 0:
		return expired
	case left < min(warnBefore, v.until.Sub(v.from)/warnFraction):
		return expiring
	}
	return fine
}

// followed is the common part of Pair and Pool: files, and the last good state read from them.
type followed struct {
	// Set once.
	paths []string
	log   *slog.Logger
	// adopt puts the files' contents into use, or returns why it cannot.
	adopt func(contents [][]byte) (validity, error)
	watch watchFunc // Watch; replaced in tests
	newer bool      // see Pair.TakeNewer

	// Owned by Run, and by the constructor before Run.
	digest    [sha256.Size]byte // digest of the contents in use
	lastError string            // error of the last check, if that check could not use the files; "": none
	warned    state             // the worst state of the certificate in use that has been logged

	mu    sync.Mutex // guards the following
	fault string     // why the files differ from the state in use; "": they do not
	valid validity   // validity of the state in use
}

// follow follows the files of all until ctx is done. It uses one watch for all files, because Linux permits a
// user only a few (fs.inotify.max_user_instances).
func follow(ctx context.Context, watch watchFunc, log *slog.Logger, all ...*followed) {
	var paths []string
	for _, f := range all {
		paths = append(paths, f.paths...)
	}
	var watching sync.WaitGroup
	defer watching.Wait()
	// The watch asks the loop below to check the files: it sends a channel for the result, and waits for the
	// result. checks is unbuffered and never closed: both sides also select on ctx.
	checks := make(chan chan bool)
	watching.Go(func() {
		watch(ctx, paths, log, func() bool {
			result := make(chan bool, 1) // the loop below sends once and does not wait
			select {
			case checks <- result:
				return <-result
			case <-ctx.Done():
				return false
			}
		})
	})
	tick := time.NewTicker(expiryInterval)
	defer tick.Stop()
	for {
		select {
		case result := <-checks:
			retry := false
			for _, f := range all {
				retry = f.check() || retry
				f.warn()
			}
			result <- retry
		case <-tick.C:
			for _, f := range all {
				f.warn()
			}
		case <-ctx.Done():
			return
		}
	}
}

// load reads the files for the first time.
func (f *followed) load() error {
	contents, err := f.read()
	if err != nil {
		return err
	}
	if f.valid, err = f.adopt(contents); err != nil {
		return err
	}
	f.digest = digest(contents)
	return nil
}

// check reads the files and puts their contents into use if they are good. retry says that the
// caller must call check again even if it notices no change. An unreadable file may become
// readable, and the write that completes a half-written pair may go unnoticed. An error becomes a
// fault only if the next check finds the same error, because a writer may not have finished.
func (f *followed) check() (retry bool) {
	contents, err := f.read()
	if err == nil {
		d := digest(contents)
		if d == f.digest {
			f.lastError = ""
			if f.setFault("") {
				f.log.Info("certificate files are good again; they hold the certificates in use", "files", f.paths)
			}
			return false
		}
		var v validity
		if v, err = f.adopt(contents); err == nil {
			f.digest, f.lastError, f.warned = d, "", fine
			f.mu.Lock()
			f.valid = v
			f.mu.Unlock()
			f.setFault("")
			f.log.Info("certificate files read again", "files", f.paths, "expires", v.until.UTC().Format(time.RFC3339))
			return false
		}
	}
	if text := err.Error(); text != f.lastError {
		f.lastError = text
		return true
	}
	if f.setFault(f.lastError) {
		f.log.Error("certificate files are bad; the certificates read before stay in use until the files are good",
			"files", f.paths, "err", err)
	}
	return true
}

// setFault stores what is wrong with the files, and reports whether that is new.
func (f *followed) setFault(fault string) (isNew bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	isNew = f.fault != fault
	f.fault = fault
	return isNew
}

// warn logs, once each, that the certificate in use expires soon and that it has expired.
func (f *followed) warn() {
	v := f.validity()
	s := v.state(time.Now())
	if s <= f.warned || f.newer {
		return
	}
	f.warned = s
	f.log.Warn(s.String()+"; put a new one in its place, it is read without a restart",
		"files", f.paths, "expires", v.until.UTC().Format(time.RFC3339))
}

// String describes the state; it is "" for fine.
func (s state) String() string {
	switch s {
	case expiring:
		return "a certificate in use expires soon"
	case expired:
		return "a certificate in use has expired"
	default:
		return ""
	}
}

// Note says what is wrong with the files or with the state in use; "" if nothing is. It names
// neither file nor certificate, because any caller of /readyz may read it.
func (f *followed) Note() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.fault != "" {
		return "its files are bad, and the certificates read before stay in use; the log says why"
	}
	if f.newer {
		return ""
	}
	return f.valid.state(time.Now()).String()
}

func (f *followed) validity() validity {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.valid
}

// read returns the contents of the files.
func (f *followed) read() (contents [][]byte, err error) {
	for _, path := range f.paths {
		content, err := readFile(path)
		if err != nil {
			return nil, err
		}
		contents = append(contents, content)
	}
	return contents, nil
}

func readFile(path string) ([]byte, error) {
	content, _, err := tunnel.ReadFile(path, tunnel.MaxFile)
	if err == nil && len(content) == 0 {
		err = errors.New(path + " is empty")
	}
	if err != nil {
		return nil, err
	}
	return content, nil
}

// digest identifies contents, so that no second copy of a key is kept.
func digest(contents [][]byte) (d [sha256.Size]byte) {
	h := sha256.New()
	for _, c := range contents {
		sum := sha256.Sum256(c)
		h.Write(sum[:])
	}
	h.Sum(d[:0])
	return d
}
