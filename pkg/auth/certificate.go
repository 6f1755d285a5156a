package auth

import (
	"crypto"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"errors"
	"fmt"
	"slices"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

// Backdate is the time between NotBefore of our certificates and the moment of their issue. It
// lets peers whose clocks are slightly slow accept a new certificate. Kubernetes' signers use
// 5 minutes.
const Backdate = time.Minute

// NodeOf returns the node that a certificate names. It checks that the certificate has exactly
// the form of a node certificate: subject, names and usages. It checks neither the signature
// nor the validity period.
func NodeOf(cert *x509.Certificate) (tunnel.NodeName, error) {
	node, err := nodeIn(cert.Subject)
	if err != nil {
		return "", err
	}
	switch {
	case slices.ContainsFunc(cert.Extensions, isSAN):
		return "", errors.New("the certificate has subject alternative names; a node's certificate must have none")
	case len(cert.ExtKeyUsage) != 1 || cert.ExtKeyUsage[0] != x509.ExtKeyUsageClientAuth ||
		len(cert.UnknownExtKeyUsage) != 0:
		return "", errors.New("the certificate's extended key usage is not clientAuth alone")
	case cert.IsCA || cert.KeyUsage != x509.KeyUsageDigitalSignature:
		return "", errors.New("the certificate's key usage is not digitalSignature alone")
	}
	return node, nil
}

// isSAN reports whether e is the subject alternative name extension.
func isSAN(e pkix.Extension) bool {
	return e.Id.Equal(asn1.ObjectIdentifier{2, 5, 29, 17}) // RFC 5280 section 4.2.1.6
}

// verify checks that roots have signed the chain (leaf first) and that a client may use it now.
// until is when the chain expires. A chain to one root expires with the first of its certificates. If
// several roots fit, the chain that expires last counts.
func verify(chain []*x509.Certificate, roots *x509.CertPool) (until time.Time, err error) {
	if roots == nil { // x509 would use the system's roots
		roots = x509.NewCertPool()
	}
	intermediates := x509.NewCertPool()
	for _, c := range chain[1:] {
		intermediates.AddCert(c)
	}
	paths, err := chain[0].Verify(x509.VerifyOptions{
		Roots:         roots,
		Intermediates: intermediates,
		KeyUsages:     []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	})
	if err != nil {
		return time.Time{}, err
	}
	for _, path := range paths {
		first := slices.MinFunc(path, func(a, b *x509.Certificate) int { return a.NotAfter.Compare(b.NotAfter) })
		if first.NotAfter.After(until) {
			until = first.NotAfter
		}
	}
	return until, nil
}

// VerifyNode returns the node of a chain (leaf first) if it is a node's certificate that roots have signed, and that is
// valid now. It does not know which certificates are revoked.
func VerifyNode(chain []*x509.Certificate, roots *x509.CertPool) (tunnel.NodeName, error) {
	if len(chain) == 0 {
		return "", errors.New("there is no certificate")
	}
	node, err := NodeOf(chain[0])
	if err != nil {
		return "", err
	}
	if _, err = verify(chain, roots); err != nil {
		return "", err
	}
	return node, nil
}

// ParseCertificates returns the certificates of a PEM text, in their order. It skips blocks of other types, such as
// keys. If a block is damaged or cut off, ParseCertificates returns an error and the certificates before it. A
// text without a certificate gives no error: the caller can better say what the text should be.
func ParseCertificates(text []byte) (certs []*x509.Certificate, err error) {
	blocks, cut := tunnel.PEMBlocks(text)
	for _, block := range blocks {
		if block.Type != "CERTIFICATE" {
			continue
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return certs, err
		}
		certs = append(certs, c)
	}
	return certs, cut
}

// parseChain reads a chain of certificates in PEM, leaf first.
func parseChain(text []byte) ([]*x509.Certificate, error) {
	chain, err := ParseCertificates(text)
	if err != nil {
		return nil, fmt.Errorf("certificate %d of the chain: %w", len(chain)+1, err)
	}
	if len(chain) == 0 {
		return nil, errors.New("no certificate in it")
	}
	return chain, nil
}

// CheckIssued checks that an issued chain (PEM, leaf first) is for the requested node and public
// key, and valid at the time now. It returns its leaf. It does not verify the signature: the CA may be unknown here.
func CheckIssued(
	text []byte, node tunnel.NodeName, public crypto.PublicKey, now time.Time,
) (*x509.Certificate, error) {
	chain, err := parseChain(text)
	if err != nil {
		return nil, err
	}
	leaf := chain[0]
	named, err := NodeOf(leaf)
	if err != nil {
		return nil, err
	}
	if named != node {
		return nil, fmt.Errorf("the certificate is of node %s, not %s", named, node)
	}
	if key, ok := leaf.PublicKey.(interface{ Equal(crypto.PublicKey) bool }); !ok || !key.Equal(public) {
		return nil, errors.New("the certificate is for another key")
	}
	if now.After(leaf.NotAfter) {
		return nil, fmt.Errorf("the certificate has expired at %s; check the clock", leaf.NotAfter.Format(time.RFC3339))
	}
	return leaf, nil
}
