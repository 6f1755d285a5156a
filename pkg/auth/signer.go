package auth

import (
	"context"
	"crypto/rand"
	"crypto/x509"
	"fmt"
	"slices"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

// nodeLifetime is the default lifetime of a node certificate.
const nodeLifetime = 30 * 24 * time.Hour

// FileSigner signs with a CA whose certificate and key are in files. The certificate file may hold several CAs: the CA
// that the key belongs to signs. FileSigner reads the files for each signature, so it uses a replaced CA at once.
// Reading costs little, since each node needs a signature only once in weeks.
type FileSigner struct {
	certFile, keyFile string        // PEM
	lifetime          time.Duration // of a certificate; a certificate never outlives the CA
}

var _ Signer = (*FileSigner)(nil)

// NewFileSigner returns a FileSigner whose certificates are valid for lifetime; 0: 30 days. It
// returns an error if the CA cannot sign certificates for clients now.
func NewFileSigner(certFile, keyFile string, lifetime time.Duration) (*FileSigner, error) {
	if lifetime == 0 {
		lifetime = nodeLifetime
	}
	s := &FileSigner{certFile: certFile, keyFile: keyFile, lifetime: lifetime}
	if _, err := s.load(); err != nil {
		return nil, err
	}
	return s, nil
}

// load reads the CA and checks that it may sign certificates for clients now.
func (s *FileSigner) load() (*CA, error) {
	ca, err := ReadCA(s.certFile, s.keyFile)
	if err != nil {
		return nil, fmt.Errorf("the CA of nodes' certificates: %w", err)
	}
	forClients := func(u x509.ExtKeyUsage) bool {
		return u == x509.ExtKeyUsageClientAuth || u == x509.ExtKeyUsageAny
	}
	// A CA without extended key usages may sign for every usage.
	if usages := ca.cert.ExtKeyUsage; len(usages) > 0 && !slices.ContainsFunc(usages, forClients) {
		return nil, fmt.Errorf("%s: the CA may not sign certificates for clients (extended key usage)", s.certFile)
	}
	if now := time.Now(); now.Before(ca.cert.NotBefore) || now.After(ca.cert.NotAfter) {
		return nil, fmt.Errorf("%s: the CA is valid from %s to %s, not now; renew it, or set the clock", s.certFile,
			ca.cert.NotBefore.Format(time.RFC3339), ca.cert.NotAfter.Format(time.RFC3339))
	}
	return ca, nil
}

// Sign implements Signer. It takes only the key from the request, and sets all other fields itself.
func (s *FileSigner) Sign(_ context.Context, node tunnel.NodeName, request []byte) ([]byte, error) {
	r, err := ParseRequest(node, request)
	if err != nil {
		return nil, err
	}
	ca, err := s.load()
	if err != nil {
		return nil, err
	}
	now := time.Now()
	tmpl := &x509.Certificate{
		Subject:               NodeSubject(node),
		NotBefore:             now.Add(-Backdate),
		NotAfter:              now.Add(s.lifetime),
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	if tmpl.NotAfter.After(ca.cert.NotAfter) {
		tmpl.NotAfter = ca.cert.NotAfter
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, ca.cert, r.PublicKey, ca.key)
	if err != nil {
		return nil, fmt.Errorf("signing the certificate of node %s: %w", node, err)
	}
	return encodePEM("CERTIFICATE", der), nil
}
