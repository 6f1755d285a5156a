package auth

import (
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"strings"

	"tunnel.example/tunnel/pkg/tunnel"
)

// The subject of a node certificate: CN=tunnel:node:NODE, O=tunnel:nodes. For Kubernetes the subject
// is a user and its groups. Nobody has given these any rights.
const (
	NodePrefix = "tunnel:node:"
	nodeGroup  = "tunnel:nodes"
)

const (
	// maxRequest is the largest certificate request, in bytes. A request with an RSA key of maxRSA
	// bits is several times smaller.
	maxRequest = 16 << 10
	minRSA     = 2048 // bits
	// maxRSA, in bits, bounds the CPU time for checking a stranger's signature.
	maxRSA = 8192
)

// NodeSubject returns the subject of node's certificates.
func NodeSubject(node tunnel.NodeName) pkix.Name {
	return pkix.Name{CommonName: NodePrefix + string(node), Organization: []string{nodeGroup}}
}

// nodeIn returns the node of a subject. The subject must be exactly what NodeSubject makes.
func nodeIn(subject pkix.Name) (tunnel.NodeName, error) {
	name, ok := strings.CutPrefix(subject.CommonName, NodePrefix)
	// Names holds every attribute. CommonName holds only the last of several.
	if !ok || len(subject.Names) != 2 || len(subject.Organization) != 1 || subject.Organization[0] != nodeGroup {
		return "", fmt.Errorf("the subject is not exactly CN=%sNODE, O=%s", NodePrefix, nodeGroup)
	}
	node, err := tunnel.ParseNodeName(name)
	if err != nil {
		return "", errors.New("the common name holds no node name (RFC 1123)")
	}
	return node, nil
}

// NewRequest makes a P-256 key for node and a request for its certificate (PKCS #10, DER).
func NewRequest(node tunnel.NodeName) (key *ecdsa.PrivateKey, der []byte, err error) {
	key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, fmt.Errorf("making a key for node %s: %w", node, err)
	}
	der, err = x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: NodeSubject(node)}, key)
	if err != nil {
		return nil, nil, fmt.Errorf("making the certificate request of node %s: %w", node, err)
	}
	return key, der, nil
}

// ParseRequest reads a request for a certificate of node and verifies its signature. It refuses a
// request for anything else: another subject, a name, an extension. The signer alone decides what
// the certificate holds. So a request for more would have no effect, but it is a mistake or an
// attack, and must fail visibly.
func ParseRequest(node tunnel.NodeName, der []byte) (*x509.CertificateRequest, error) {
	if len(der) > maxRequest {
		return nil, fmt.Errorf("the certificate request is %d bytes long; %d are allowed", len(der), maxRequest)
	}
	r, err := x509.ParseCertificateRequest(der)
	if err != nil {
		return nil, errors.New("the bytes to sign are not a certificate request (PKCS #10, DER)")
	}
	requested, err := nodeIn(r.Subject)
	switch {
	case err != nil:
		return nil, fmt.Errorf("certificate request: %w", err)
	case requested != node:
		return nil, fmt.Errorf("the certificate request is for node %s, not %s", requested, node)
	case len(r.Extensions) != 0:
		return nil, errors.New("the certificate request asks for names or other extensions; " +
			"a node's certificate has none")
	}
	// Check the key before the signature, since verifying with a huge key takes long.
	if err := checkKey(r.PublicKey); err != nil {
		return nil, fmt.Errorf("certificate request: %w", err)
	}
	if err := r.CheckSignature(); err != nil {
		return nil, errors.New("the certificate request is not signed with the key that it is for")
	}
	return r, nil
}

// checkKey returns an error if a node may not have a key of that kind and size.
func checkKey(public any) error {
	switch key := public.(type) {
	case *ecdsa.PublicKey:
		switch key.Curve {
		case elliptic.P256(), elliptic.P384(), elliptic.P521():
			return nil
		}
	case ed25519.PublicKey:
		return nil
	case *rsa.PublicKey:
		if bits := key.N.BitLen(); bits < minRSA || bits > maxRSA {
			return fmt.Errorf("an RSA key of %d bits; %d to %d are allowed", bits, minRSA, maxRSA)
		}
		return nil
	}
	return errors.New("the key is neither ECDSA (P-256, P-384, P-521) nor Ed25519 nor RSA")
}
