package stream

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"math/big"
	"net/url"
	"testing"
	"time"
)

// A stranger's certificate of 60 KiB with empty names, which would take 5 MiB, is not kept.
func TestCertificatesOfStrangers(t *testing.T) {
	r := newRig(t, func(c *ServerConfig) { c.Certificates = true })
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	cert := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	empty := new(url.URL)
	for range 28_000 {
		cert.URIs = append(cert.URIs, empty)
	}
	raw, err := x509.CreateCertificate(rand.Reader, cert, cert, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	shown := tls.Certificate{Certificate: [][]byte{raw}, PrivateKey: key}
	const strangers = 32
	before := inUse()
	for range strangers {
		c, err := tls.Dial("tcp", r.server.Addr().String(), &tls.Config{
			RootCAs: r.ca.Pool(), ServerName: "cloud", NextProtos: []string{"h2"}, MinVersion: tls.VersionTLS13,
			GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &shown, nil },
		})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	r.eventually("the cloud has hung up on all", func() bool { return r.server.strangers.Len() == 0 })
	if held := inUse() - before; held > strangers*256<<10 {
		t.Errorf("%d KiB are held for each of %d strangers with %d bytes", held/strangers>>10, strangers, len(raw))
	}
}
