package reload

import (
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"
)

// Pair is a certificate and its key, in two files or in one.
type Pair struct {
	followed
	now atomic.Pointer[tls.Certificate]
}

// NewPair reads a certificate with its intermediates, and its key, in PEM. The same
// file may hold both. It is an error if they do not fit each other. Nothing is followed
// before Run.
func NewPair(certFile, keyFile string, log *slog.Logger) (*Pair, error) {
	p := &Pair{followed: followed{paths: []string{certFile, keyFile}, log: log, watch: Watch}}
	if certFile == keyFile {
		p.paths = p.paths[:1]
	}
	p.adopt = p.take
	if err := p.first(); err != nil {
		return nil, fmt.Errorf("cert %s with key %s: %w", certFile, keyFile, err)
	}
	return p, nil
}

func (p *Pair) take(contents [][]byte) (validity, error) {
	pair, err := tls.X509KeyPair(contents[0], contents[len(contents)-1])
	if err != nil {
		return validity{}, err
	}
	v := validity{pair.Leaf.NotBefore, pair.Leaf.NotAfter}
	// At the start there is no better one, and somebody has to see what is wrong.
	if old := p.now.Load(); old != nil && !v.at(time.Now()) && p.valid.at(time.Now()) {
		return validity{}, errors.New("the new certificate is not valid at this time, and the one in use is")
	}
	p.now.Store(&pair)
	return v, nil
}

// Certificate returns the pair that is in use now. It never changes.
func (p *Pair) Certificate() *tls.Certificate { return p.now.Load() }

// GetCertificate is for tls.Config.
func (p *Pair) GetCertificate(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	return p.Certificate(), nil
}

// GetClientCertificate is for tls.Config.
func (p *Pair) GetClientCertificate(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
	return p.Certificate(), nil
}
