package reload

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
)

// Pool is the certificates of authorities, in one file.
type Pool struct {
	followed
	now atomic.Pointer[x509.CertPool]
}

// NewPool reads certificates in PEM. Nothing is followed before Run.
func NewPool(file string, log *slog.Logger) (*Pool, error) {
	p := &Pool{followed: followed{paths: []string{file}, log: log, watch: Watch}}
	p.adopt = p.take
	if err := p.first(); err != nil {
		return nil, fmt.Errorf("ca %s: %w", file, err)
	}
	return p, nil
}

func (p *Pool) take(contents [][]byte) (validity, error) {
	pool, v, err := parsePool(contents[0])
	if err == nil {
		p.now.Store(pool)
	}
	return v, err
}

// Pool returns the certificates that are in use now. They never change, so that two
// answers are the same pool if nothing has changed between them.
func (p *Pool) Pool() *x509.CertPool { return p.now.Load() }

// parsePool parses a bundle. x509.CertPool.AppendCertsFromPEM passes over what it does
// not understand, and so would take the half of a file that is being written for all.
// A pool is of use as long as one of its certificates is.
func parsePool(content []byte) (*x509.CertPool, validity, error) {
	pool, v, n := x509.NewCertPool(), validity{}, 0
	for {
		block, rest := pem.Decode(content)
		if block == nil {
			break
		}
		content = rest
		if block.Type != "CERTIFICATE" {
			continue
		}
		n++
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, v, fmt.Errorf("its certificate number %d: %w", n, err)
		}
		pool.AddCert(cert)
		if n == 1 || cert.NotAfter.After(v.until) {
			v = validity{cert.NotBefore, cert.NotAfter}
		}
	}
	switch {
	case bytes.Contains(content, []byte("-----BEGIN")):
		return nil, v, fmt.Errorf("what comes after its first %d certificates is cut off or not PEM", n)
	case n == 0:
		return nil, v, errors.New("it holds no certificate: it must be PEM, with BEGIN CERTIFICATE")
	}
	return pool, v, nil
}
