package auth

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"sync/atomic"
	"time"

	"tunnel/pkg/tunnel"
)

const (
	// After a failure renewal is tried again in renewFirst, then twice that, up to
	// renewMost, which is also how long one try may take.
	renewFirst = 10 * time.Second
	renewMost  = 10 * time.Minute
	// renewLeast is between two renewals that succeed, however short a certificate
	// lives: that of a CA about to expire does not outlive it.
	renewLeast = time.Minute
	// renewLook is how often the file is looked at again. A timer does not run while a
	// machine sleeps, and somebody else may replace the file, by tunnel join for one: even
	// of the shortest certificate (ten minutes) a third is left then.
	renewLook = 3 * time.Minute
)

// RenewalConfig is what a Renewal needs.
type RenewalConfig struct {
	Node tunnel.NodeName
	File string // the certificate and its key, as WriteNodeFile writes them
	// Renew has a request signed and returns the chain in PEM, leaf first.
	Renew   func(ctx context.Context, request []byte) (chain []byte, err error)
	Changed func() // is called when File has a new certificate; may be nil
	Log     *slog.Logger
}

// Renewal renews the certificate of a node: when two thirds of its life are over (up to
// a tenth of it earlier, so that nodes that joined together do not renew together), with
// a new key that never leaves this machine.
type Renewal struct {
	cfg  RenewalConfig
	seen fs.FileInfo // owned by Run: of the file that holds was read from; nil: read it
	// holds is the certificate that was last seen in the file; nil until then.
	holds atomic.Pointer[x509.Certificate]
	// failing is set while the last try to renew it has failed.
	failing atomic.Bool
}

var _ tunnel.Module = (*Renewal)(nil)

// NewRenewal returns a Renewal. It works while Run runs.
func NewRenewal(cfg RenewalConfig) *Renewal { return &Renewal{cfg: cfg} }

// Name implements tunnel.Module.
func (*Renewal) Name() string { return "renewal" }

// Routes implements tunnel.Module: there are none.
func (*Renewal) Routes() map[string]tunnel.Handler { return nil }

// Run renews the certificate until ctx is done. A failure is logged and tried again; it
// never returns an error.
func (r *Renewal) Run(ctx context.Context) error {
	early := rand.Float64() / 10 // of the certificate's life
	var failed time.Duration     // the last wait after a failure, 0 after none
	for {
		var wait time.Duration
		leaf, err := r.read()
		if err == nil {
			r.holds.Store(leaf)
			wait = min(time.Until(renewAt(leaf, early)), renewLook)
		}
		if err == nil && wait <= 0 {
			if err = r.renew(ctx); err == nil {
				early, wait = rand.Float64()/10, renewLeast
			}
		}
		if ctx.Err() != nil {
			return nil
		}
		r.failing.Store(err != nil)
		if err == nil {
			failed = 0
		} else {
			failed = min(max(renewFirst, 2*failed), renewMost)
			wait = failed
			r.cfg.Log.Error("cannot renew the node's certificate", "err", err, "again_in", wait)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(wait):
		}
	}
}

// renewAt returns when a certificate is to be renewed.
func renewAt(leaf *x509.Certificate, early float64) time.Time {
	life := float64(leaf.NotAfter.Sub(leaf.NotBefore))
	return leaf.NotBefore.Add(time.Duration(life * (2./3 - early)))
}

// read returns the certificate in the file.
func (r *Renewal) read() (*x509.Certificate, error) {
	info, err := os.Stat(r.cfg.File)
	if err == nil && r.seen != nil && os.SameFile(info, r.seen) && info.ModTime().Equal(r.seen.ModTime()) && info.Size() == r.seen.Size() {
		return r.holds.Load(), nil
	}
	r.seen = nil
	pair, err := tls.LoadX509KeyPair(r.cfg.File, r.cfg.File)
	if err != nil {
		return nil, fmt.Errorf("the node's certificate %s: %w; with a new join token, tunnel join writes another", r.cfg.File, err)
	}
	r.seen = info
	return pair.Leaf, nil
}

// renew has a new certificate signed and puts it into the file.
func (r *Renewal) renew(ctx context.Context) error {
	key, request, err := NewRequest(r.cfg.Node)
	if err != nil {
		return err
	}
	signing, cancel := context.WithTimeout(ctx, renewMost)
	defer cancel()
	chain, err := r.cfg.Renew(signing, request)
	if err != nil {
		return err
	}
	leaf, err := checkIssued(chain, r.cfg.Node, key.Public())
	if err != nil {
		return fmt.Errorf("what the cloud has signed: %w", err)
	}
	// What cannot be written is lost, but the session that has asked for it stands on it, and
	// may be the one way to this machine.
	if err := WriteNodeFile(r.cfg.File, chain, key); err != nil {
		return fmt.Errorf("%w; the user that the edge runs as must be able to write to the folder of %s", err, r.cfg.File)
	}
	r.holds.Store(leaf)
	r.cfg.Log.Info("the node's certificate was renewed", "expires", leaf.NotAfter)
	if r.cfg.Changed != nil {
		r.cfg.Changed()
	}
	return nil
}

// Note says, for people who look at the health of the edge, when the certificate is about
// to expire, less than a sixth of its life being left; "" is nothing.
func (r *Renewal) Note() string {
	leaf := r.holds.Load()
	if leaf == nil {
		return ""
	}
	left := time.Until(leaf.NotAfter)
	switch {
	case left <= 0:
		return fmt.Sprintf("the node's certificate has expired at %s; run tunnel join with a new join token", leaf.NotAfter.Format(time.RFC3339))
	case left < leaf.NotAfter.Sub(leaf.NotBefore)/6:
		return fmt.Sprintf("the node's certificate expires at %s and could not be renewed; the log says why", leaf.NotAfter.Format(time.RFC3339))
	}
	return ""
}

// Status says, for the same people, until when the certificate is good.
func (r *Renewal) Status() string {
	leaf := r.holds.Load()
	if leaf == nil {
		return ""
	}
	status := "the node's certificate is good until " + leaf.NotAfter.UTC().Format(time.RFC3339)
	if r.failing.Load() {
		status += "; renewing it failed the last time, and is tried again: the log says why"
	}
	return status
}
