package reload

import (
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

// Pair is a certificate and its key, in two files or in one.
type Pair struct {
	followed
	current atomic.Pointer[tls.Certificate] // the pair in use; replaced as a whole
}

// TakeNewer makes p take each pair whose validity begins later than that of the pair in use, even if it is not valid by
// this machine's clock. It is for a certificate that the program renews itself: the clock of the side that checks it
// counts, and whoever renews it tells about its expiry. Call it before Files runs.
func (p *Pair) TakeNewer() { p.newer = true }

// NewPair reads a certificate with its intermediates, and its key, in PEM. One file may hold both.
// It is an error if certificate and key do not match. Give the Pair to Files to follow them.
func NewPair(certFile, keyFile string, log *slog.Logger) (*Pair, error) {
	p := &Pair{followed: followed{paths: []string{certFile, keyFile}, log: log, watch: Watch}}
	if certFile == keyFile {
		p.paths = p.paths[:1]
	}
	p.adopt = p.adoptPair
	if err := p.load(); err != nil {
		return nil, fmt.Errorf("cert %s with key %s: %w", certFile, keyFile, err)
	}
	return p, nil
}

// adoptPair puts a new pair into use, if its key matches its certificate.
func (p *Pair) adoptPair(contents [][]byte) (validity, error) {
	pair, err := tls.X509KeyPair(contents[0], contents[len(contents)-1])
	if err != nil {
		return validity{}, err
	}
	if _, err = tunnel.PEMBlocks(contents[0]); err != nil { // X509KeyPair skips a damaged certificate behind the first one
		return validity{}, err
	}
	v := validity{pair.Leaf.NotBefore, pair.Leaf.NotAfter}
	// At the start, even a pair that is not valid now is adopted: there is no better one, and callers' errors
	// then show the operator what is wrong.
	old := p.current.Load()
	taken := old == nil || p.newer && pair.Leaf.NotBefore.After(old.Leaf.NotBefore)
	if !taken && !v.at(time.Now()) && p.valid.at(time.Now()) {
		return validity{}, errors.New("the new certificate is not valid at this time, and the one in use is")
	}
	p.current.Store(&pair)
	return v, nil
}

// Certificate returns the pair that is in use now. The returned value never changes.
func (p *Pair) Certificate() *tls.Certificate { return p.current.Load() }

// GetCertificate is for tls.Config.
func (p *Pair) GetCertificate(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	return p.Certificate(), nil
}

// GetClientCertificate is for tls.Config.
func (p *Pair) GetClientCertificate(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
	return p.Certificate(), nil
}
