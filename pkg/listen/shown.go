package listen

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
)

// What a peer may show in a TLS handshake, before it has proven anything. A certificate of 64 KiB can have 32,000 empty
// names, which take 5 MiB when they are parsed, and 100 certificates of one CA's name make crypto/x509 check 100
// signatures. Honest peers show far less.
const (
	maxShownCertificates = 4
	maxShownBytes        = 16 << 10
	maxShownNames        = 100 // of one kind, in a certificate
	maxShownProtocols    = 64  // of ALPN
)

// CheckHello is a tls.Config.GetConfigForClient that refuses a client with very many protocols.
func CheckHello(h *tls.ClientHelloInfo) (*tls.Config, error) {
	if n := len(h.SupportedProtos); n > maxShownProtocols {
		return nil, fmt.Errorf("the client offers %d protocols; %d are allowed", n, maxShownProtocols)
	}
	return nil, nil //nolint:nilnil // the configuration stays
}

// CheckShown is a tls.Config.VerifyPeerCertificate that refuses a chain that costs far more than honest ones. It
// verifies nothing. crypto/tls calls it before the peer has proven that it has the key.
func CheckShown(raw [][]byte, _ [][]*x509.Certificate) error {
	_, err := parseShown(raw)
	return err
}

// parseShown parses a chain, unless it costs far more than honest ones.
func parseShown(raw [][]byte) ([]*x509.Certificate, error) {
	size := 0
	for _, r := range raw {
		size += len(r)
	}
	if len(raw) > maxShownCertificates || size > maxShownBytes {
		return nil, fmt.Errorf("too many certificates: %d with %d bytes; %d with %d bytes are allowed",
			len(raw), size, maxShownCertificates, maxShownBytes)
	}
	chain := make([]*x509.Certificate, len(raw))
	for i, r := range raw {
		c, err := x509.ParseCertificate(r)
		if err != nil {
			return nil, err
		}
		if max(len(c.DNSNames), len(c.EmailAddresses), len(c.IPAddresses), len(c.URIs)) > maxShownNames {
			return nil, errors.New("a certificate has too many names")
		}
		chain[i] = c
	}
	return chain, nil
}

// VerifyShown is a tls.Config.VerifyPeerCertificate that verifies the certificate of a client by roots, as
// tls.RequireAndVerifyClientCert does, but only if CheckShown accepts the chain. It is for tls.RequireAnyClientCert.
func VerifyShown(roots *x509.CertPool) func([][]byte, [][]*x509.Certificate) error {
	return func(raw [][]byte, _ [][]*x509.Certificate) error {
		chain, err := parseShown(raw)
		if err != nil {
			return err
		}
		others := x509.NewCertPool()
		for _, c := range chain[1:] {
			others.AddCert(c)
		}
		_, err = chain[0].Verify(x509.VerifyOptions{
			Roots: roots, Intermediates: others, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		})
		if err != nil {
			return &tls.CertificateVerificationError{UnverifiedCertificates: chain, Err: err}
		}
		return nil
	}
}
