package auth

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"time"
)

// backdate is how far NotBefore lies in the past, for clocks that are a little slow.
const backdate = time.Minute

// CA is a certificate authority that lives in memory. Its key never leaves it, so
// when the CA is dropped nobody can issue in its name any more.
type CA struct {
	key     *ecdsa.PrivateKey
	cert    *x509.Certificate
	certPEM []byte
}

// Leaf says what a certificate is for.
type Leaf struct {
	CommonName   string
	Organization []string
	DNSNames     []string
	IPs          []net.IP
	Server       bool          // may be presented by a server
	Client       bool          // may be presented by a client
	TTL          time.Duration // 0, or beyond the CA's end: as long as the CA
}

// NewCA makes an authority whose certificate bears name and lives for ttl.
func NewCA(name string, ttl time.Duration) (*CA, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("making the key of CA %s: %w", name, err)
	}
	now := time.Now()
	tmpl := &x509.Certificate{
		Subject:               pkix.Name{CommonName: name},
		NotBefore:             now.Add(-backdate),
		NotAfter:              now.Add(ttl),
		IsCA:                  true,
		BasicConstraintsValid: true,
		MaxPathLenZero:        true, // it signs leaves, no other authority
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	// Without a serial in the template x509 makes a random one of 159 bits.
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("signing the certificate of CA %s: %w", name, err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("reading back the certificate of CA %s: %w", name, err)
	}
	return &CA{key: key, cert: cert, certPEM: encodePEM("CERTIFICATE", der)}, nil
}

// CertPEM returns the authority's own certificate.
func (ca *CA) CertPEM() []byte { return ca.certPEM }

// Issue makes a key and a certificate for it.
func (ca *CA) Issue(l Leaf) (certPEM, keyPEM []byte, err error) {
	tmpl := &x509.Certificate{
		Subject:               pkix.Name{CommonName: l.CommonName, Organization: l.Organization},
		DNSNames:              l.DNSNames,
		IPAddresses:           l.IPs,
		NotBefore:             time.Now().Add(-backdate),
		NotAfter:              time.Now().Add(l.TTL),
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageDigitalSignature,
	}
	if l.TTL == 0 || tmpl.NotAfter.After(ca.cert.NotAfter) {
		tmpl.NotAfter = ca.cert.NotAfter
	}
	if l.Server {
		tmpl.ExtKeyUsage = append(tmpl.ExtKeyUsage, x509.ExtKeyUsageServerAuth)
	}
	if l.Client {
		tmpl.ExtKeyUsage = append(tmpl.ExtKeyUsage, x509.ExtKeyUsageClientAuth)
	}
	if len(tmpl.ExtKeyUsage) == 0 {
		// No usage at all would mean every usage.
		return nil, nil, errors.New("issuing a certificate: it is for neither a server nor a client")
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, fmt.Errorf("making a key for %s: %w", l.CommonName, err)
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, ca.cert, key.Public(), ca.key)
	if err != nil {
		return nil, nil, fmt.Errorf("signing the certificate of %s: %w", l.CommonName, err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, nil, fmt.Errorf("encoding the key of %s: %w", l.CommonName, err)
	}
	return encodePEM("CERTIFICATE", der), encodePEM("PRIVATE KEY", keyDER), nil
}

func encodePEM(typ string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: typ, Bytes: der})
}
