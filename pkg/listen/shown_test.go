package listen

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"net/url"
	"testing"
	"time"
)

// signed returns a certificate with a key of its own, signed by a CA; nil: by itself.
func signed(t *testing.T, ca *x509.Certificate, caKey *ecdsa.PrivateKey, change func(*x509.Certificate)) (
	*x509.Certificate, *ecdsa.PrivateKey,
) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "x"}, NotAfter: time.Now().Add(time.Hour),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	change(c)
	if ca == nil {
		ca, caKey = c, key
	}
	raw, err := x509.CreateCertificate(rand.Reader, c, ca, key.Public(), caKey)
	if err != nil {
		t.Fatal(err)
	}
	if c, err = x509.ParseCertificate(raw); err != nil {
		t.Fatal(err)
	}
	return c, key
}

// A peer may show what honest peers show, and not much more.
func TestShown(t *testing.T) {
	isCA := func(c *x509.Certificate) { c.IsCA, c.BasicConstraintsValid = true, true }
	ca, key := signed(t, nil, nil, isCA)
	middle, middleKey := signed(t, ca, key, isCA)
	leaf, _ := signed(t, middle, middleKey, func(*x509.Certificate) {})
	server, _ := signed(t, ca, key, func(c *x509.Certificate) {
		c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	})
	named, _ := signed(t, ca, key, func(c *x509.Certificate) {
		for range 5000 {
			c.URIs = append(c.URIs, new(url.URL))
		}
	})
	other, _ := signed(t, nil, nil, isCA)
	long, _ := signed(t, ca, key, func(c *x509.Certificate) {
		c.ExtraExtensions = []pkix.Extension{{Id: []int{1, 2, 3}, Value: make([]byte, maxShownBytes)}}
	})
	roots := x509.NewCertPool()
	roots.AddCert(ca)
	for name, c := range map[string]struct {
		chain         []*x509.Certificate
		shown, verify bool // whether it is accepted
	}{
		"a good chain":     {[]*x509.Certificate{leaf, middle}, true, true},
		"four":             {[]*x509.Certificate{leaf, middle, other, other}, true, true},
		"five":             {[]*x509.Certificate{leaf, middle, other, other, other}, false, false},
		"without the CA":   {[]*x509.Certificate{leaf}, true, false},
		"of another CA":    {[]*x509.Certificate{other}, true, false},
		"of a server":      {[]*x509.Certificate{server}, true, false},
		"many empty names": {[]*x509.Certificate{named}, false, false},
		"long":             {[]*x509.Certificate{long}, false, false},
	} {
		var raw [][]byte
		for _, one := range c.chain {
			raw = append(raw, one.Raw)
		}
		if err := CheckShown(raw, nil); (err == nil) != c.shown {
			t.Errorf("%s: shown: %v", name, err)
		}
		if err := VerifyShown(roots)(raw, nil); (err == nil) != c.verify {
			t.Errorf("%s: verified: %v", name, err)
		}
	}
	if err := CheckShown([][]byte{{1}}, nil); err == nil {
		t.Error("what is no certificate is accepted")
	}
	for n, ok := range map[int]bool{maxShownProtocols: true, maxShownProtocols + 1: false} {
		if _, err := CheckHello(&tls.ClientHelloInfo{SupportedProtos: make([]string, n)}); (err == nil) != ok {
			t.Errorf("%d protocols: %v", n, err)
		}
	}
}
