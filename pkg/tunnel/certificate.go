package tunnel

import (
	"crypto/x509"
	"fmt"
	"time"
)

// Certificate describes a certificate for operators.
type Certificate struct {
	Name   string // the subject: CAName of a CA, else the common name
	Signer string // CAName of the CA that signed the certificate
	Serial string // hexadecimal
	Starts time.Time
	Ends   time.Time
}

// CertificateOf describes a certificate.
func CertificateOf(c *x509.Certificate) Certificate {
	name := c.Subject.CommonName
	if c.IsCA {
		name = CAName(name, c.SubjectKeyId)
	}
	key := c.AuthorityKeyId
	if len(key) == 0 && c.IsCA { // a CA that signed itself may leave this id out
		key = c.SubjectKeyId
	}
	return Certificate{
		Name: name, Signer: CAName(c.Issuer.CommonName, key), Serial: c.SerialNumber.Text(16),
		Starts: c.NotBefore.UTC(), Ends: c.NotAfter.UTC(),
	}
}

// CAName names a CA: its common name, with the start of its key's identifier (RFC 5280 section 4.2.1.2).
// The identifier is needed because the successor of a CA often has the same common name.
func CAName(common string, key []byte) string {
	if len(key) == 0 {
		return common
	}
	return fmt.Sprintf("%s (%x)", common, key[:min(len(key), 4)])
}
