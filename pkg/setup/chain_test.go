package setup

import (
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"strings"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit/testca"
	"tunnel.example/tunnel/pkg/auth"
)

// The chain ends with the CA that the certificate leads to, once. It does so although a certificate has
// expired, is not valid yet or is for clients; the error then says that.
func TestWithRoot(t *testing.T) {
	ca, other := testca.New(t, "one"), testca.New(t, "other")
	late, err := auth.NewCA("late", -time.Second)
	if err != nil {
		t.Fatal(err)
	}
	expiredCA := testca.CA{CA: late}
	now := time.Now()
	good := ca.Pair(t, auth.Leaf{CommonName: "cloud", DNSNames: []string{"cloud"}, Server: true})
	// The certificate of ca was renewed a minute ago, after expired had ended: no time is good for both.
	expired := ca.Dated(t, "cloud", now.Add(-2*time.Hour), now.Add(-time.Hour))
	future := ca.Dated(t, "cloud", now.Add(time.Hour), now.Add(2*time.Hour))
	client := ca.Pair(t, auth.Leaf{CommonName: "cloud", DNSNames: []string{"cloud"}, Client: true})
	middle := intermediate(t, ca)
	byMiddle := behind(middle.Dated(t, "cloud", now.Add(-2*time.Hour), now.Add(-time.Hour)), middle)
	signedLate := expiredCA.Dated(t, "cloud", now.Add(-time.Hour), now.Add(time.Hour))
	for name, tt := range map[string]struct {
		pair tls.Certificate
		cas  []testca.CA
		want int    // certificates
		err  string // "": none
	}{
		"the leaf alone":                {good, []testca.CA{ca}, 2, ""},
		"two authorities":               {good, []testca.CA{other, ca}, 2, ""},
		"it is there":                   {behind(good, ca), []testca.CA{ca}, 2, ""},
		"of another authority":          {good, []testca.CA{other}, 1, "is not signed by ca.crt"},
		"there, but not named":          {behind(good, ca), []testca.CA{other}, 2, "is not signed by ca.crt"},
		"no authority is no way":        {good, nil, 1, "is not signed by ca.crt"},
		"expired":                       {expired, []testca.CA{other, ca}, 2, "the cloud's certificate expired on "},
		"expired, and it is there":      {behind(expired, ca), []testca.CA{ca}, 2, "replace cloud.crt"},
		"expired, of another authority": {expired, []testca.CA{other}, 1, "the cloud's certificate expired on "},
		"expired, by an intermediate":   {byMiddle, []testca.CA{ca}, 3, "the cloud's certificate expired on "},
		"not valid yet":                 {future, []testca.CA{ca}, 2, "the cloud's certificate is not valid before "},
		"for clients":                   {client, []testca.CA{ca}, 2, "cloud.crt is not for servers"},
		"the authority has expired":     {signedLate, []testca.CA{expiredCA}, 2, "replace ca.crt"},
		"the authority expired on":      {signedLate, []testca.CA{expiredCA}, 2, "the cloud's CA expired on "},
	} {
		var cas []*x509.Certificate
		for _, c := range tt.cas {
			block, _ := pem.Decode(c.CertPEM())
			cert, err := x509.ParseCertificate(block.Bytes)
			if err != nil {
				t.Fatal(err)
			}
			cas = append(cas, cert)
		}
		got, err := withRoot(&tt.pair, cas)
		if (err == nil) != (tt.err == "") || len(got.Certificate) != tt.want {
			t.Errorf("%s: %d certificates, %v; want %d", name, len(got.Certificate), err, tt.want)
			continue
		}
		if err == nil {
			continue
		}
		if err = rootProblem(err, "cloud.crt", "ca.crt"); !strings.Contains(err.Error(), tt.err) {
			t.Errorf("%s: %v; want %q", name, err, tt.err)
		}
	}
}

// behind returns pair with the certificate of a CA behind its own.
func behind(pair tls.Certificate, ca testca.CA) tls.Certificate {
	block, _ := pem.Decode(ca.CertPEM())
	pair.Certificate = append(pair.Certificate[:len(pair.Certificate):len(pair.Certificate)], block.Bytes)
	return pair
}

// intermediate returns a CA that ca has signed.
func intermediate(t *testing.T, ca testca.CA) testca.CA {
	t.Helper()
	issuer, err := tls.X509KeyPair(ca.CertPEM(), ca.KeyPEM())
	if err != nil {
		t.Fatal(err)
	}
	own := testca.New(t, "intermediate")
	pair, err := tls.X509KeyPair(own.CertPEM(), own.KeyPEM())
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificate(rand.Reader, pair.Leaf, issuer.Leaf, pair.Leaf.PublicKey, issuer.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	signed, err := auth.LoadCA(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), own.KeyPEM())
	if err != nil {
		t.Fatal(err)
	}
	return testca.CA{CA: signed}
}
