package auth

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

// CA is a certificate authority in memory. A caller that wants to issue more certificates
// later must store CertPEM and KeyPEM.
type CA struct {
	key     crypto.Signer
	cert    *x509.Certificate
	certPEM []byte
}

// Leaf describes a certificate to issue.
type Leaf struct {
	CommonName   string
	Organization []string
	DNSNames     []string
	IPs          []net.IP
	Server       bool          // extended key usage: server authentication
	Client       bool          // extended key usage: client authentication
	TTL          time.Duration // 0: until the CA expires; a longer TTL is cut to that as well
}

// NewCA makes an authority with a new P-256 key. Its certificate has the common name name and
// is valid for ttl.
func NewCA(name string, ttl time.Duration) (*CA, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("making the key of CA %s: %w", name, err)
	}
	now := time.Now()
	tmpl := &x509.Certificate{
		Subject:               pkix.Name{CommonName: name},
		NotBefore:             now.Add(-Backdate),
		NotAfter:              now.Add(ttl),
		IsCA:                  true,
		BasicConstraintsValid: true,
		MaxPathLenZero:        true, // it signs leaf certificates, no other authority
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	// The template has no serial number, so x509 makes a random one of 159 bits.
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

// LoadCA returns the authority of a certificate and its key, both in PEM. Only the first
// block of each is used. It refuses a certificate that may not sign others.
func LoadCA(certPEM, keyPEM []byte) (*CA, error) {
	pair, err := tls.X509KeyPair(certPEM, keyPEM) // verifies that key and certificate match
	if err != nil {
		return nil, fmt.Errorf("the CA's certificate and key: %w", err)
	}
	cert := pair.Leaf
	key, ok := pair.PrivateKey.(crypto.Signer)
	if !ok {
		return nil, fmt.Errorf("the key of CA %s cannot sign", cert.Subject)
	}
	if !cert.IsCA || cert.KeyUsage&x509.KeyUsageCertSign == 0 {
		return nil, fmt.Errorf("the certificate of %s may not sign others (CA:TRUE, keyCertSign): name a CA's certificate",
			cert.Subject)
	}
	return &CA{key: key, cert: cert, certPEM: encodePEM("CERTIFICATE", cert.Raw)}, nil
}

// LoadCAAmong returns the authority that a key belongs to. certsPEM holds the authority's certificate, and perhaps
// certificates of other authorities, for instance of an old CA or of its successor.
func LoadCAAmong(certsPEM, keyPEM []byte) (*CA, error) {
	certs, err := ParseCertificates(certsPEM)
	if err != nil {
		return nil, err
	}
	for _, cert := range certs {
		if ca, err := LoadCA(encodePEM("CERTIFICATE", cert.Raw), keyPEM); err == nil {
			return ca, nil
		}
	}
	return LoadCA(certsPEM, keyPEM) // for its error, which says why the first certificate is not that of the key
}

// ReadCA reads a certificate file and a key file, and returns the result of LoadCAAmong.
func ReadCA(certFile, keyFile string) (*CA, error) {
	certPEM, _, err := tunnel.ReadFile(certFile, tunnel.MaxFile)
	if err != nil {
		return nil, err
	}
	keyPEM, _, err := tunnel.ReadFile(keyFile, tunnel.MaxFile)
	if err != nil {
		return nil, err
	}
	ca, err := LoadCAAmong(certPEM, keyPEM)
	if err != nil {
		return nil, fmt.Errorf("%s and %s: %w", certFile, keyFile, err)
	}
	return ca, nil
}

// Certificate returns the authority's own certificate.
func (ca *CA) Certificate() *x509.Certificate { return ca.cert }

// Reissue makes a new P-256 key and a certificate for the key. The certificate has the names and the usages of like,
// and is valid until the CA expires.
func (ca *CA) Reissue(like *x509.Certificate) (certPEM, keyPEM []byte, err error) {
	return ca.issue(&x509.Certificate{
		RawSubject: like.RawSubject, Subject: like.Subject,
		DNSNames: like.DNSNames, IPAddresses: like.IPAddresses, URIs: like.URIs,
		NotBefore: time.Now().Add(-Backdate), NotAfter: ca.cert.NotAfter, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: like.ExtKeyUsage,
	})
}

// CertPEM returns the authority's own certificate.
func (ca *CA) CertPEM() []byte { return ca.certPEM }

// KeyPEM returns the authority's private key (PKCS #8). Keep it as secret as the keys of all
// certificates that it signs.
func (ca *CA) KeyPEM() []byte {
	der, err := x509.MarshalPKCS8PrivateKey(ca.key)
	if err != nil {
		panic(err) // NewCA and LoadCA accept only kinds of keys that PKCS #8 can encode
	}
	return encodePEM("PRIVATE KEY", der)
}

// Issue makes a new P-256 key and a certificate for it.
func (ca *CA) Issue(l Leaf) (certPEM, keyPEM []byte, err error) {
	tmpl := &x509.Certificate{
		Subject:               pkix.Name{CommonName: l.CommonName, Organization: l.Organization},
		DNSNames:              l.DNSNames,
		IPAddresses:           l.IPs,
		NotBefore:             time.Now().Add(-Backdate),
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
		// Without an extended key usage a certificate would be good for every usage.
		return nil, nil, errors.New("issuing a certificate: it is for neither a server nor a client")
	}
	return ca.issue(tmpl)
}

// issue makes a new P-256 key, and signs tmpl for it.
func (ca *CA) issue(tmpl *x509.Certificate) (certPEM, keyPEM []byte, err error) {
	name := tmpl.Subject.CommonName
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, fmt.Errorf("making a key for %s: %w", name, err)
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, ca.cert, key.Public(), ca.key)
	if err != nil {
		return nil, nil, fmt.Errorf("signing the certificate of %s: %w", name, err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, nil, fmt.Errorf("encoding the key of %s: %w", name, err)
	}
	return encodePEM("CERTIFICATE", der), encodePEM("PRIVATE KEY", keyDER), nil
}

func encodePEM(typ string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: typ, Bytes: der})
}
