package setup

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"testing"

	"tunnel.example/tunnel/internal/testkit/testca"
	"tunnel.example/tunnel/pkg/auth"
)

// The chain ends with the CA that the certificate leads to, once.
func TestWithRoot(t *testing.T) {
	ca, other := testca.New(t, "one").CA, testca.New(t, "other").CA
	certPEM, keyPEM, err := ca.Issue(auth.Leaf{CommonName: "cloud", DNSNames: []string{"cloud"}, Server: true})
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		chain []byte
		cas   []*auth.CA
		want  int // certificates
		good  bool
	}{
		"the leaf alone":         {certPEM, []*auth.CA{ca}, 2, true},
		"two authorities":        {certPEM, []*auth.CA{other, ca}, 2, true},
		"it is there":            {append(certPEM[:len(certPEM):len(certPEM)], ca.CertPEM()...), []*auth.CA{ca}, 2, true},
		"of another authority":   {certPEM, []*auth.CA{other}, 1, false},
		"there, but not named":   {append(certPEM[:len(certPEM):len(certPEM)], ca.CertPEM()...), []*auth.CA{other}, 2, false},
		"no authority is no way": {certPEM, nil, 1, false},
	} {
		pair, err := tls.X509KeyPair(tt.chain, keyPEM)
		if err != nil {
			t.Fatal(err)
		}
		var cas []*x509.Certificate
		for _, c := range tt.cas {
			block, _ := pem.Decode(c.CertPEM())
			cert, err := x509.ParseCertificate(block.Bytes)
			if err != nil {
				t.Fatal(err)
			}
			cas = append(cas, cert)
		}
		got, err := withRoot(&pair, cas)
		if (err == nil) != tt.good || len(got.Certificate) != tt.want {
			t.Errorf("%s: %d certificates, %v; want %d", name, len(got.Certificate), err, tt.want)
		}
	}
}
