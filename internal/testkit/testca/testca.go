// Package testca makes certificates for tests: what pkg/auth makes, as crypto/tls takes it.
//
//	ca := testca.New(t, "callers")
//	server := &tls.Config{Certificates: []tls.Certificate{ca.Pair(t, auth.Leaf{CommonName: "cloud", Server: true})}}
//	client := &tls.Config{RootCAs: ca.Pool(), ServerName: "cloud"}
//
// Only tests import it (test/arch). It is not part of testkit, because tests of pkg/auth itself
// import testkit.
package testca

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"testing"
	"time"

	"tunnel.example/tunnel/pkg/auth"
)

// CA is a certificate authority that is valid for a day.
type CA struct{ *auth.CA }

// New returns an authority with a new key. name is its common name.
func New(t testing.TB, name string) CA {
	t.Helper()
	ca, err := auth.NewCA(name, 24*time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	return CA{ca}
}

// Pool returns a new pool that trusts the authority.
func (ca CA) Pool() *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(ca.CertPEM())
	return pool
}

// Pair issues a certificate and its key.
func (ca CA) Pair(t testing.TB, leaf auth.Leaf) tls.Certificate {
	t.Helper()
	cert, key, err := ca.Issue(leaf)
	if err != nil {
		t.Fatal(err)
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	return pair
}

// Dated returns a server's certificate for name that is valid between two times, and its key. auth.CA itself
// issues no certificate for the future, and none that outlives the CA.
func (ca CA) Dated(t testing.TB, name string, from, until time.Time) tls.Certificate {
	t.Helper()
	issuer, err := tls.X509KeyPair(ca.CertPEM(), ca.KeyPEM())
	if err != nil {
		t.Fatal(err)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		Subject: pkix.Name{CommonName: name}, DNSNames: []string{name}, NotBefore: from, NotAfter: until,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, issuer.Leaf, key.Public(), issuer.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}
}
