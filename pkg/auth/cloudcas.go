package auth

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

// CloudCAs are the CAs by which edges verify the cloud, the oldest first. In PEM, a CA may come with a succession: a
// certificate for the name and the key of the CA, signed by an older CA. Only the holder of the older CA's key can make
// a succession. So an edge that trusts the older CA may trust the newer one, whoever has sent the succession.
type CloudCAs struct {
	cas         []*x509.Certificate
	successions []*x509.Certificate
}

const (
	// successionBlock is the type of a PEM block with a succession. Programs that look for certificates skip it.
	successionBlock = "TUNNEL CA SUCCESSION"
	maxCloudCAs     = 8        // an edge accepts at most so many CAs from a cloud
	maxCloudCAsText = 32 << 10 // the longest PEM text of CAs that an edge accepts, in bytes
)

// ParseCloudCAs reads CAs in PEM. It returns an error if text holds no CA.
func ParseCloudCAs(text []byte) (*CloudCAs, error) {
	if len(text) > maxCloudCAsText {
		return nil, fmt.Errorf("the CAs of the cloud are %d bytes long; %d are allowed", len(text), maxCloudCAsText)
	}
	c := new(CloudCAs)
	blocks, err := tunnel.PEMBlocks(text)
	if err != nil {
		return nil, fmt.Errorf("the CAs of the cloud: %w", err)
	}
	for _, block := range blocks {
		into := &c.cas
		switch block.Type {
		case "CERTIFICATE":
		case successionBlock:
			into = &c.successions
		default:
			continue
		}
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("the CAs of the cloud: %w", err)
		}
		if !slices.ContainsFunc(*into, cert.Equal) {
			*into = append(*into, cert)
		}
	}
	switch {
	case len(c.cas) == 0:
		return nil, errors.New("the CAs of the cloud: there is no certificate")
	case len(c.cas) > maxCloudCAs || len(c.successions) > maxCloudCAs:
		return nil, fmt.Errorf("the CAs of the cloud: there are more than %d", maxCloudCAs)
	}
	return c, nil
}

// PEM returns the CAs and their successions.
func (c *CloudCAs) PEM() []byte {
	var text []byte
	for _, ca := range c.cas {
		text = append(text, encodePEM("CERTIFICATE", ca.Raw)...)
	}
	for _, s := range c.successions {
		text = append(text, encodePEM(successionBlock, s.Raw)...)
	}
	return text
}

// Certificates returns the CAs, the oldest first.
func (c *CloudCAs) Certificates() []*x509.Certificate { return c.cas }

// Pool returns the CAs as roots.
func (c *CloudCAs) Pool() *x509.CertPool {
	pool := x509.NewCertPool()
	for _, ca := range c.cas {
		pool.AddCert(ca)
	}
	return pool
}

// CAID returns the id by which edges tell the cloud which CAs they trust: the start of the SHA-256 of a CA's
// certificate.
func CAID(ca *x509.Certificate) string {
	sum := sha256.Sum256(ca.Raw)
	return fmt.Sprintf("%x", sum[:8])
}

// IDs returns the CAID of each CA.
func (c *CloudCAs) IDs() []string {
	var ids []string
	for _, ca := range c.cas {
		ids = append(ids, CAID(ca))
	}
	return ids
}

// Succeed returns the CAs with a new CA behind them. Its succession is signed by old, which must be one of the CAs.
func (c *CloudCAs) Succeed(old *CA, next *x509.Certificate) (*CloudCAs, error) {
	if !slices.ContainsFunc(c.cas, old.cert.Equal) {
		return nil, fmt.Errorf("the CA %s is not among those of the cloud", old.cert.Subject)
	}
	tmpl := &x509.Certificate{
		RawSubject: next.RawSubject, SubjectKeyId: next.SubjectKeyId,
		NotBefore: next.NotBefore, NotAfter: next.NotAfter,
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true, KeyUsage: next.KeyUsage,
	}
	if tmpl.NotAfter.After(old.cert.NotAfter) {
		tmpl.NotAfter = old.cert.NotAfter
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, old.cert, next.PublicKey, old.key)
	if err != nil {
		return nil, fmt.Errorf("signing the succession of CA %s: %w", next.Subject, err)
	}
	succession, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	return &CloudCAs{append(slices.Clone(c.cas), next), append(slices.Clone(c.successions), succession)}, nil
}

// Only returns the CAs for which keep returns true, with their successions.
func (c *CloudCAs) Only(keep func(*x509.Certificate) bool) *CloudCAs {
	out := new(CloudCAs)
	for _, ca := range c.cas {
		if keep(ca) {
			out.cas = append(out.cas, ca)
		}
	}
	for _, s := range c.successions {
		if slices.ContainsFunc(out.cas, func(ca *x509.Certificate) bool { return isSameCA(s, ca) }) {
			out.successions = append(out.successions, s)
		}
	}
	return out
}

// isSameCA reports whether two certificates have the same name and the same key.
func isSameCA(a, b *x509.Certificate) bool {
	return bytes.Equal(a.RawSubject, b.RawSubject) && bytes.Equal(a.RawSubjectPublicKeyInfo, b.RawSubjectPublicKeyInfo)
}

// Adopt returns in next the CAs that an edge trusts from now on. Before, the edge trusts c. The cloud has shown the
// certificate chain for host, and has told the edge the CAs told.
//
// The edge accepts a new CA only with a succession that a trusted CA has signed. unproven are the told CAs without such
// a succession. The edge drops a CA only if a newer CA has signed the cloud's chain. So somebody who steals a replica,
// with the key of the cloud's certificate but without a CA's key, can neither add a CA nor remove a newer CA.
//
// Somebody who steals an old CA's key can add a false CA while edges trust the old CA. Edges keep the false CA until a
// successor of the old CA has signed the cloud's chain. Then they drop each CA that the cloud does not tell and that
// only the old CA vouches for.
func (c *CloudCAs) Adopt(
	told *CloudCAs, chain []*x509.Certificate, host string, now time.Time,
) (next *CloudCAs, unproven []*x509.Certificate, err error) {
	signer := c.signerOf(chain, host, now)
	if signer < 0 {
		return nil, nil, errors.New("no CA that this edge trusts has signed the cloud's certificate")
	}
	next = new(CloudCAs)
	isTold := func(ca *x509.Certificate) bool { return slices.ContainsFunc(told.cas, ca.Equal) }
	for i, ca := range c.cas {
		if isTold(ca) || i == signer || i > signer && c.follows(i, signer, now) {
			next.cas = append(next.cas, ca)
		}
	}
	for _, s := range c.successions {
		if slices.ContainsFunc(next.cas, func(ca *x509.Certificate) bool { return isSameCA(s, ca) }) {
			next.successions = append(next.successions, s)
		}
	}
	trusted, left := slices.Clone(c.cas), slices.DeleteFunc(slices.Clone(told.cas), func(ca *x509.Certificate) bool {
		return slices.ContainsFunc(c.cas, ca.Equal)
	})
	for {
		i := slices.IndexFunc(left, func(ca *x509.Certificate) bool { return told.proof(ca, trusted, now) != nil })
		if i < 0 {
			break
		}
		next.successions = append(next.successions, told.proof(left[i], trusted, now))
		trusted, next.cas = append(trusted, left[i]), append(next.cas, left[i])
		left = slices.Delete(left, i, i+1)
	}
	if len(next.cas) > maxCloudCAs {
		return nil, nil, fmt.Errorf("there would be more than %d CAs", maxCloudCAs)
	}
	if n := len(next.PEM()); n > maxCloudCAsText { // ParseCloudCAs would refuse the edge's file
		return nil, nil, fmt.Errorf("the CAs would be %d bytes long; %d are allowed", n, maxCloudCAsText)
	}
	return next, left, nil
}

// follows reports whether the CA at index i stays although the cloud does not tell it. The CA stays if successions lead
// from the CA at index signer to it. It also stays if it has no succession: then the operator has configured it.
func (c *CloudCAs) follows(i, signer int, now time.Time) bool {
	if !slices.ContainsFunc(c.successions, func(s *x509.Certificate) bool { return isSameCA(s, c.cas[i]) }) {
		return true
	}
	line := []*x509.Certificate{c.cas[signer]}
	for _, ca := range c.cas[signer+1 : i+1] { // a CA comes after the CA that has signed its succession
		if c.proof(ca, line, now) != nil {
			line = append(line, ca)
		}
	}
	return line[len(line)-1].Equal(c.cas[i])
}

// signerOf returns the index of the newest CA that has signed the chain; -1: none.
func (c *CloudCAs) signerOf(chain []*x509.Certificate, host string, now time.Time) int {
	if len(chain) == 0 {
		return -1
	}
	between := x509.NewCertPool()
	for _, cert := range chain[1:] {
		between.AddCert(cert)
	}
	for i, ca := range slices.Backward(c.cas) {
		roots := x509.NewCertPool()
		roots.AddCert(ca)
		_, err := chain[0].Verify(x509.VerifyOptions{DNSName: host, Roots: roots, Intermediates: between, CurrentTime: now})
		if err == nil {
			return i
		}
	}
	return -1
}

// proof returns the succession of ca that the newest of trusted has signed; nil: there is none.
func (c *CloudCAs) proof(ca *x509.Certificate, trusted []*x509.Certificate, now time.Time) *x509.Certificate {
	if !isAuthority(ca, now) {
		return nil
	}
	for _, by := range slices.Backward(trusted) {
		for _, s := range c.successions {
			if isSameCA(s, ca) && isAuthority(s, now) && isAuthority(by, now) && s.CheckSignatureFrom(by) == nil {
				return s
			}
		}
	}
	return nil
}

// isAuthority reports whether a certificate may sign others now.
func isAuthority(c *x509.Certificate, now time.Time) bool {
	return c.IsCA && c.BasicConstraintsValid && c.KeyUsage&x509.KeyUsageCertSign != 0 &&
		!now.Before(c.NotBefore) && !now.After(c.NotAfter)
}

// Equal reports whether both have the same CAs in the same order.
func (c *CloudCAs) Equal(other *CloudCAs) bool {
	return slices.EqualFunc(c.cas, other.cas, (*x509.Certificate).Equal)
}
