package reload

import (
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"

	"tunnel.example/tunnel/pkg/tunnel"
)

// Pool holds the certificates of authorities (CAs), in one file.
type Pool struct {
	followed
	current atomic.Pointer[x509.CertPool] // the pool in use; replaced as a whole
}

// NewPool reads certificates in PEM. Give the Pool to Files to follow the file.
func NewPool(file string, log *slog.Logger) (*Pool, error) {
	p := &Pool{followed: followed{paths: []string{file}, log: log, watch: Watch}}
	p.adopt = p.adoptPool
	if err := p.load(); err != nil {
		return nil, fmt.Errorf("ca %s: %w", file, err)
	}
	return p, nil
}

// adoptPool puts a new pool into use, if all certificates in the file can be parsed.
func (p *Pool) adoptPool(contents [][]byte) (validity, error) {
	pool, v, err := parsePool(contents[0])
	if err == nil {
		p.current.Store(pool)
	}
	return v, err
}

// Pool returns the certificates that are in use now. The returned pool never changes: two calls
// return the same pointer if the file has not changed between them.
func (p *Pool) Pool() *x509.CertPool { return p.current.Load() }

// parsePool parses a bundle. x509.CertPool.AppendCertsFromPEM skips what it does not understand, so
// it would accept the first half of a file that is still being written. The validity returned is the
// validity of the certificate that expires last, because the pool is of use until then.
func parsePool(content []byte) (*x509.CertPool, validity, error) {
	pool, v, n := x509.NewCertPool(), validity{}, 0
	blocks, cut := tunnel.PEMBlocks(content)
	for _, block := range blocks {
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
	case cut != nil:
		return nil, v, cut
	case n == 0:
		return nil, v, errors.New("it holds no certificate: it must be PEM, with BEGIN CERTIFICATE")
	}
	return pool, v, nil
}
