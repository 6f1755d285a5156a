// Package reload keeps up with certificate files that change while the process runs:
// what renews a certificate (cert-manager, a kubelet that mounts a Secret, certbot, a
// script) replaces its files and tells nobody.
//
//	files := reload.NewFiles(log)
//	pair, err := files.Pair("mode.cloud.https", "https.crt", "https.key") // fatal when bad
//	pool, err := files.Pool("mode.cloud.https clientca", "ca.crt")
//	go files.Run(ctx) // follows them
//	…
//	tls.Config{GetCertificate: pair.GetCertificate}
//	pool.Pool() // what to verify the next caller with
//
// Who uses a [Pair] or a [Pool] asks it for each connection, and holds on to nothing
// that it has said: connections that are open already go on, new ones see the new state.
//
// A new state is adopted when it is good as a whole: a certificate and the key that
// fits it, or nothing but certificates. Until then the last good one stays in use, one
// line in the log says why, [Files.Note] says so too, and the files are read again and
// again. A certificate that is about to expire has a line as well, and a metric.
//
// [Watch] is what is under it, for other files: it tells when one changes, within a
// second, on file systems without notifications as well.
//
// The package verifies no certificate and decides nothing about who may call. It does
// not renew anything.
package reload

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"time"
)

const (
	// maxFile is the largest certificate or key file, in bytes: a system's bundle of
	// all public authorities has a quarter of it.
	maxFile = 1 << 20
	// expiryInterval is how often certificates in use are looked at.
	expiryInterval = time.Minute
	// soon is when a certificate that has not been renewed is worth a warning.
	soon = 24 * time.Hour
	// soonPart is the same for those that live for hours or days only: what is left is
	// less than this part of their life.
	soonPart = 6
)

// validity is when a certificate is good.
type validity struct{ from, until time.Time }

func (v validity) at(now time.Time) bool { return !now.Before(v.from) && !now.After(v.until) }

// state says how a certificate stands.
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
	case left < min(soon, v.until.Sub(v.from)/soonPart):
		return expiring
	}
	return fine
}

// followed is the part that Pair and Pool have in common: files, and what was last good
// in them.
type followed struct {
	// Set once.
	paths []string
	log   *slog.Logger
	// adopt makes what the files hold the state in use, or says why not.
	adopt func(contents [][]byte) (validity, error)
	watch watchFunc // Watch, except in tests

	// Owned by Run, and by the constructor before it.
	digest  [sha256.Size]byte // of the contents in use
	suspect string            // why the last look found nothing to use
	warned  state             // what has been logged about the certificate in use

	mu    sync.Mutex // guards the following
	fault string     // why the files are not what is in use; "": they are
	valid validity   // of what is in use
}

// Run follows the files until ctx is done. It never returns an error.
func (f *followed) Run(ctx context.Context) error {
	follow(ctx, f.watch, f.log, f)
	return nil
}

// follow follows the files of all until ctx is done, by one watch: a process may not
// have many.
func follow(ctx context.Context, watch watchFunc, log *slog.Logger, all ...*followed) {
	var paths []string
	for _, f := range all {
		paths = append(paths, f.paths...)
	}
	var watching sync.WaitGroup
	defer watching.Wait()
	look := make(chan chan bool) // sent by the watch, which waits for the answer
	watching.Go(func() {
		watch(ctx, paths, log, func() bool {
			again := make(chan bool, 1)
			select {
			case look <- again:
				return <-again
			case <-ctx.Done():
				return false
			}
		})
	})
	tick := time.NewTicker(expiryInterval)
	defer tick.Stop()
	for {
		select {
		case answer := <-look:
			again := false
			for _, f := range all {
				again = f.look() || again
				f.warn()
			}
			answer <- again
		case <-tick.C:
			for _, f := range all {
				f.warn()
			}
		case <-ctx.Done():
			return
		}
	}
}

// first reads the files for the first time.
func (f *followed) first() error {
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

// look reads the files and adopts what is in them if it is good. It reports whether it
// is to be tried again, though nothing changes: a file that cannot be read now may be
// read later, and a half-written pair is completed by a write that may not be seen. It
// is a fault when it is still there at the next look: somebody may be writing.
func (f *followed) look() (again bool) {
	contents, err := f.read()
	if err == nil {
		d := digest(contents)
		if d == f.digest {
			f.suspect = ""
			if f.note("") {
				f.log.Info("certificate files hold again what is in use", "files", f.paths)
			}
			return false
		}
		var v validity
		if v, err = f.adopt(contents); err == nil {
			f.digest, f.suspect, f.warned = d, "", fine
			f.mu.Lock()
			f.valid = v
			f.mu.Unlock()
			f.note("")
			f.log.Info("certificate files read again", "files", f.paths, "expires", v.until.UTC().Format(time.RFC3339))
			return false
		}
	}
	if text := err.Error(); text != f.suspect {
		f.suspect = text
		return true
	}
	if f.note(f.suspect) {
		f.log.Error("certificate files are bad; what was read before stays in use until they are good", "files", f.paths, "err", err)
	}
	return true
}

// note remembers what is wrong with the files, and reports whether that is news.
func (f *followed) note(fault string) (news bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	news = f.fault != fault
	f.fault = fault
	return news
}

// warn logs, once each, that the certificate in use is about to expire and that it has.
func (f *followed) warn() {
	v := f.validity()
	s := v.state(time.Now())
	if s <= f.warned {
		return
	}
	f.warned = s
	f.log.Warn(s.String()+"; put a new one in its place, it is read without a restart",
		"files", f.paths, "expires", v.until.UTC().Format(time.RFC3339))
}

// String says what is the matter with a certificate.
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

// Note says what is wrong with the files or with what is in use, "" if nothing is. It
// names neither: anybody may read it.
func (f *followed) Note() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.fault != "" {
		return "its files are bad and what was read before stays in use; the log says why"
	}
	return f.valid.state(time.Now()).String()
}

func (f *followed) validity() validity {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.valid
}

// read returns what the files hold.
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
	f, err := os.Open(path) //nolint:gosec // the operator names the file
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file", path)
	}
	content, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	switch {
	case err != nil:
		return nil, err
	case len(content) > maxFile:
		return nil, fmt.Errorf("%s is longer than %d bytes", path, maxFile)
	case len(content) == 0:
		return nil, errors.New(path + " is empty")
	}
	return content, nil
}

// digest tells contents apart without keeping a key twice.
func digest(contents [][]byte) (d [sha256.Size]byte) {
	h := sha256.New()
	for _, c := range contents {
		sum := sha256.Sum256(c)
		h.Write(sum[:])
	}
	h.Sum(d[:0])
	return d
}
