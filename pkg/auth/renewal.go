package auth

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

const (
	// After a failed renewal the next try is after minRetryWait. The wait doubles with each further
	// failure, up to maxRetryWait. maxRetryWait is also the timeout of one try.
	minRetryWait = 10 * time.Second
	maxRetryWait = 10 * time.Minute
	// minRenewInterval is the least time between two successful renewals. It matters when the CA is
	// about to expire: its certificates expire with it, so each lives shorter than the one before.
	minRenewInterval = time.Minute
	// minAskedInterval is the least time between the last try and a renewal by Soon or Now.
	minAskedInterval = 5 * time.Second
	// fileCheckInterval is how often Run looks whether the file has changed. Another program, such as
	// tunnel join, may replace it, and timers stand still while the machine sleeps. The shortest
	// certificate lives for ten minutes: at this interval it is renewed with a third of its life left.
	fileCheckInterval = 3 * time.Minute
)

// RenewalConfig configures a Renewal.
type RenewalConfig struct {
	Node tunnel.NodeName
	File string // certificate and key, as WriteNodeFile writes them
	// Renew asks the cloud to sign a request and returns the chain in PEM, leaf first, and the time by the cloud's clock.
	Renew   func(ctx context.Context, request []byte) (chain []byte, now time.Time, err error)
	Changed func() // called, by Run's goroutine, after File got a new certificate; may be nil
	Log     *slog.Logger
}

// Renewal renews the certificate of a node after two thirds of its life. It starts up to a tenth of
// the life earlier, so that nodes that joined together do not renew together. Each certificate has
// a new key, which never leaves this machine.
type Renewal struct {
	cfg RenewalConfig // set once
	// fileInfo describes the file when current was read from it; nil: read the file again.
	// Owned by Run.
	fileInfo fs.FileInfo
	// current is the certificate that was last read from or written to the file; nil before that.
	// Written by Run.
	current atomic.Pointer[x509.Certificate]
	// lastFailed is set while the last try to read or renew has failed. Written by Run.
	lastFailed atomic.Bool
	// clock is what the cloud's clock has shown at the last renewal; nil: it is not known. It counts, since the cloud
	// decides whether the certificate is valid. Written by Run.
	clock atomic.Pointer[reading]
	// asked wakes Run for a new request. ask sends, Run receives, nobody closes. Capacity 1 is enough: one wake-up makes
	// Run look at all requests.
	asked chan struct{}

	mu      sync.Mutex   // guards the following
	askedAt time.Time    // the earliest moment at which a request wants the renewal; zero: there is no request
	waiting []chan error // Run sends the result to each, without blocking: each has capacity 1
}

var _ tunnel.Module = (*Renewal)(nil)

// NewRenewal returns a Renewal. It works only while Run runs.
func NewRenewal(cfg RenewalConfig) *Renewal {
	return &Renewal{cfg: cfg, asked: make(chan struct{}, 1)}
}

// Soon requests a renewal at a random moment within a time, and returns at once. If another request wants an earlier
// moment, Run renews at the earlier one.
func (r *Renewal) Soon(within time.Duration) { r.ask(within, nil) }

// Now requests a renewal at once. It returns the result of the renewal, or an error when ctx is done.
func (r *Renewal) Now(ctx context.Context) error {
	done := make(chan error, 1)
	r.ask(0, done)
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// ask notes a request to renew the certificate at a random moment within a time. Run sends the result to done; nil:
// nobody waits for the result.
func (r *Renewal) ask(within time.Duration, done chan error) {
	at := time.Now()
	if within > 0 {
		at = at.Add(rand.N(within))
	}
	r.mu.Lock()
	if r.askedAt.IsZero() || at.Before(r.askedAt) {
		r.askedAt = at
	}
	if done != nil {
		r.waiting = append(r.waiting, done)
	}
	r.mu.Unlock()
	select {
	case r.asked <- struct{}{}:
	default: // an earlier request will wake Run
	}
}

// takeDue reports whether a requested renewal is due, and returns the channels that wait for its result. tried is when
// the last try began.
func (r *Renewal) takeDue(tried time.Time) (waiting []chan error, due bool) {
	at := r.dueAt(tried)
	if at.IsZero() || time.Now().Before(at) {
		return nil, false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	waiting, r.waiting, r.askedAt = r.waiting, nil, time.Time{}
	return waiting, true
}

// dueAt returns when a requested renewal is due; zero: there is no request. tried is when the last try began.
func (r *Renewal) dueAt(tried time.Time) time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	if soonest := tried.Add(minAskedInterval); !r.askedAt.IsZero() && r.askedAt.Before(soonest) {
		return soonest
	}
	return r.askedAt
}

// sleep waits for the time wait, or until a requested renewal is due. It returns false if ctx is done.
func (r *Renewal) sleep(ctx context.Context, wait time.Duration, tried time.Time) bool {
	end := time.Now().Add(wait)
	for {
		at := end
		if due := r.dueAt(tried); !due.IsZero() && due.Before(at) {
			at = due
		}
		select {
		case <-ctx.Done():
			return false
		case <-time.After(time.Until(at)):
			return true
		case <-r.asked:
		}
	}
}

// Name implements tunnel.Module.
func (*Renewal) Name() string { return "renewal" }

// Run renews the certificate until ctx is done. It logs a failure and tries again, and never returns
// an error.
func (r *Renewal) Run(ctx context.Context) error {
	early := rand.Float64() / 10 // how much earlier to renew, as a fraction of the certificate's life
	var retryWait time.Duration  // the wait after the last try; 0 if that try succeeded
	var tried time.Time          // when the last try to renew began
	var again bool               // the last try was for a request, and has failed
	for {
		var wait time.Duration
		leaf, err := r.read()
		if err == nil {
			r.current.Store(leaf)
			wait = min(renewAt(leaf, early).Sub(r.now()), fileCheckInterval)
		}
		waiting, due := r.takeDue(tried)
		due = due || again
		if err == nil && (wait <= 0 || due) {
			tried = time.Now()
			if err = r.renew(ctx); err == nil {
				early, wait = rand.Float64()/10, minRenewInterval
			}
		}
		for _, done := range waiting {
			done <- err
		}
		if ctx.Err() != nil {
			return nil
		}
		r.lastFailed.Store(err != nil)
		again = due && err != nil
		if err == nil {
			retryWait = 0
		} else {
			retryWait = min(max(minRetryWait, 2*retryWait), maxRetryWait)
			wait = retryWait
			r.cfg.Log.Error("cannot renew the node's certificate", "err", err, "again_in", wait)
		}
		if !r.sleep(ctx, wait, tried) {
			return nil
		}
	}
}

// renewAt returns when to renew a certificate: early before two thirds of its life.
func renewAt(leaf *x509.Certificate, early float64) time.Time {
	life := float64(leaf.NotAfter.Sub(leaf.NotBefore))
	return leaf.NotBefore.Add(time.Duration(life * (2./3 - early)))
}

// read returns the certificate in the file. It parses the file only if the file has changed.
func (r *Renewal) read() (*x509.Certificate, error) {
	info, err := os.Stat(r.cfg.File)
	if err == nil && r.fileInfo != nil && os.SameFile(info, r.fileInfo) &&
		info.ModTime().Equal(r.fileInfo.ModTime()) && info.Size() == r.fileInfo.Size() {
		return r.current.Load(), nil
	}
	r.fileInfo = nil
	pair, err := tls.LoadX509KeyPair(r.cfg.File, r.cfg.File)
	if err != nil {
		return nil, fmt.Errorf("the node's certificate %s: %w; with a new join token, tunnel join writes another",
			r.cfg.File, err)
	}
	r.fileInfo = info
	return pair.Leaf, nil
}

// renew requests a new certificate and writes it to the file.
func (r *Renewal) renew(ctx context.Context) error {
	key, request, err := NewRequest(r.cfg.Node)
	if err != nil {
		return err
	}
	signing, cancel := context.WithTimeout(ctx, maxRetryWait)
	defer cancel()
	chain, now, err := r.cfg.Renew(signing, request)
	if err != nil {
		return err
	}
	r.clock.Store(&reading{now, time.Now()})
	leaf, err := CheckIssued(chain, r.cfg.Node, key.Public(), now)
	if err != nil {
		return fmt.Errorf("the certificate from the cloud: %w", err)
	}
	// The cloud already uses the new certificate as the proof of this session. If the edge cannot
	// write the certificate, it is lost, but the session continues: it may be the only way to this
	// machine.
	if err := WriteNodeFile(r.cfg.File, chain, key); err != nil {
		if errors.Is(err, fs.ErrPermission) {
			err = fmt.Errorf("%w; the user that the edge runs as must be able to write to the folder of %s",
				err, r.cfg.File)
		}
		return err
	}
	r.current.Store(leaf)
	r.cfg.Log.Info("the node's certificate was renewed", "expires", leaf.NotAfter)
	if r.cfg.Changed != nil {
		r.cfg.Changed()
	}
	return nil
}

// reading is the time that a clock has shown, and when that was. at has a monotonic part: this machine's clock may be
// set meanwhile.
type reading struct{ shown, at time.Time }

// now returns the time by the cloud's clock, or by this machine's if the cloud's is not known.
func (r *Renewal) now() time.Time {
	c := r.clock.Load()
	if c == nil {
		return time.Now()
	}
	return c.shown.Add(time.Since(c.at))
}

// Current returns the certificate that Run has last read or written; nil: there was none yet.
func (r *Renewal) Current() *x509.Certificate { return r.current.Load() }

// At returns when the certificate is renewed at the latest. Before Run has read the certificate, At returns zero.
func (r *Renewal) At() time.Time {
	leaf := r.current.Load()
	if leaf == nil {
		return time.Time{}
	}
	return renewAt(leaf, 0)
}

// Note describes a problem for the health page of the edge: the certificate has expired, or less than
// a sixth of its life is left. "": there is no problem.
func (r *Renewal) Note() string {
	leaf := r.current.Load()
	if leaf == nil {
		return ""
	}
	left := leaf.NotAfter.Sub(r.now())
	switch {
	case left <= 0:
		return fmt.Sprintf("the node's certificate has expired at %s; run tunnel join with a new join token",
			leaf.NotAfter.Format(time.RFC3339))
	case left < leaf.NotAfter.Sub(leaf.NotBefore)/6:
		return fmt.Sprintf("the node's certificate expires at %s and could not be renewed; the log says why",
			leaf.NotAfter.Format(time.RFC3339))
	}
	return ""
}

// Status says for the health page until when the certificate is good. Before Run has read the
// certificate, Status returns "".
func (r *Renewal) Status() string {
	leaf := r.current.Load()
	if leaf == nil {
		return ""
	}
	status := "the node's certificate is good until " + leaf.NotAfter.UTC().Format(time.RFC3339)
	if r.lastFailed.Load() {
		status += "; renewing it failed the last time, and is tried again: the log says why"
	}
	return status
}
