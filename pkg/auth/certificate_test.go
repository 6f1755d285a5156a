package auth

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"math/big"
	"net"
	"net/url"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/tunnel"
)

// nodeCA is a CA for node certificates, with the pool that trusts it.
type nodeCA struct {
	*CA
	pool *x509.CertPool
}

func newNodeCA(t testing.TB) nodeCA {
	t.Helper()
	ca, err := NewCA("nodes", 24*time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	return nodeCA{ca, poolOf(ca.cert)}
}

func poolOf(certs ...*x509.Certificate) *x509.CertPool {
	pool := x509.NewCertPool()
	for _, c := range certs {
		pool.AddCert(c)
	}
	return pool
}

// sign makes a certificate of node as the signers do. change edits the template first; nil: no edit.
func (ca nodeCA) sign(t testing.TB, node tunnel.NodeName, change func(*x509.Certificate)) *x509.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		Subject:               NodeSubject(node),
		NotBefore:             time.Now().Add(-Backdate),
		NotAfter:              time.Now().Add(time.Hour),
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	if change != nil {
		change(tmpl)
	}
	return certify(t, tmpl, ca.cert, key.Public(), ca.key)
}

// certify signs tmpl with key, the key of parent.
func certify(
	t testing.TB, tmpl, parent *x509.Certificate, public crypto.PublicKey, key crypto.Signer,
) *x509.Certificate {
	t.Helper()
	der, err := x509.CreateCertificate(rand.Reader, tmpl, parent, public, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return cert
}

// newCertificateGate returns a Gate with a token file and a node CA. more edits its configuration.
func newCertificateGate(t testing.TB, content string, ca nodeCA, more func(*GateConfig)) (*Gate, *testkit.Log) {
	t.Helper()
	log, j := testkit.NewLog()
	cfg := GateConfig{
		Tokens: newTokens(t, content), NodeCA: func() *x509.CertPool { return ca.pool }, Backdate: Backdate, Log: log,
	}
	if more != nil {
		more(&cfg)
	}
	return NewGate(cfg), j
}

func newTokens(t testing.TB, content string) *Tokens {
	t.Helper()
	log, _ := testkit.NewLog()
	tokens, err := NewTokens(TokensConfig{Path: tokenFile(t, content), MayBeEmpty: true, Log: log})
	if err != nil {
		t.Fatal(err)
	}
	return tokens
}

// setTokens puts another content of the token file in force, as after a reload.
func setTokens(t testing.TB, g *Gate, content string) {
	t.Helper()
	tb, err := parseTokens("tokens", content, false, true)
	if err != nil {
		t.Fatal(err)
	}
	g.cfg.Tokens.adopt(tb)
}

// timeAfter returns the time d from now, as the token file writes it.
func timeAfter(d time.Duration) string { return time.Now().Add(d).UTC().Format(time.RFC3339) }

func certCredential(node string, chain ...*x509.Certificate) Credential {
	return Credential{Node: node, Chain: chain}
}

func TestNodeCertificate(t *testing.T) {
	ca := newNodeCA(t)
	gate, _ := newCertificateGate(t, "", ca, nil)
	cert := ca.sign(t, "edge1", nil)
	g, err := gate.Authenticate(t.Context(), certCredential("edge1", cert))
	if err != nil {
		t.Fatal(err)
	}
	if g.Node != "edge1" || !g.Expires.Equal(cert.NotAfter) || !strings.HasPrefix(g.By, "certificate ") {
		t.Errorf("grant %+v", g)
	}
	gate, _ = newCertificateGate(t, "edge1:revoked before="+timeAfter(-2*time.Second), ca, nil)
	if _, err := gate.Authenticate(t.Context(), certCredential("edge1", cert)); err != nil {
		t.Errorf("a certificate that was issued since the revocation: %v", err)
	}
}

func TestNodeCertificateOfAnIntermediate(t *testing.T) {
	root := newNodeCA(t)
	self := *root.cert // NewCA's certificate may sign only leaves; this CA signs an intermediate
	self.MaxPathLenZero, self.MaxPathLen = false, -1
	root.cert = certify(t, &self, &self, root.key.Public(), root.key)
	root.pool = poolOf(root.cert)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	cert := certify(t, &x509.Certificate{
		Subject:   pkix.Name{CommonName: "between"},
		NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Minute),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}, root.cert, key.Public(), root.key)
	leaf := nodeCA{&CA{key: key, cert: cert}, nil}.sign(t, "edge1", nil)
	gate, _ := newCertificateGate(t, "", root, nil)
	g, err := gate.Authenticate(t.Context(), certCredential("edge1", leaf, cert))
	if err != nil {
		t.Fatal(err)
	}
	if !g.Expires.Equal(cert.NotAfter) {
		t.Errorf("expires %v; the intermediate does at %v", g.Expires, cert.NotAfter)
	}
	if _, err := gate.Authenticate(t.Context(), certCredential("edge1", leaf)); !errors.Is(err, ErrUnauthenticated) {
		t.Errorf("without the intermediate: %v", err)
	}
}

func TestHostileCertificates(t *testing.T) {
	ca, other := newNodeCA(t), newNodeCA(t)
	gate, _ := newCertificateGate(t, "", ca, nil)
	refused := func(name string, gate *Gate, c Credential) {
		t.Helper()
		if _, err := gate.Authenticate(t.Context(), c); !errors.Is(err, ErrUnauthenticated) {
			t.Errorf("%s: %v", name, err)
		}
		if grantCount(gate) != 0 {
			t.Errorf("%s: it has a grant", name)
		}
	}
	refused("another CA's", gate, certCredential("edge1", other.sign(t, "edge1", nil)))
	refused("another CA's, with ours behind it", gate, certCredential("edge1", other.sign(t, "edge1", nil), ca.cert))
	refused("another node's", gate, certCredential("edge1", ca.sign(t, "edge2", nil)))
	refused("the CA's own", gate, certCredential("edge1", ca.cert))
	commonName := []int{2, 5, 4, 3}
	for name, change := range map[string]func(*x509.Certificate){
		"server usage only": func(c *x509.Certificate) {
			c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
		},
		"server usage as well": func(c *x509.Certificate) {
			c.ExtKeyUsage = append(c.ExtKeyUsage, x509.ExtKeyUsageServerAuth)
		},
		"any usage": func(c *x509.Certificate) { c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageAny} },
		"no usage":  func(c *x509.Certificate) { c.ExtKeyUsage = nil },
		"unknown usage": func(c *x509.Certificate) {
			c.UnknownExtKeyUsage = append(c.UnknownExtKeyUsage, []int{1, 2, 3})
		},
		"a key that encrypts": func(c *x509.Certificate) { c.KeyUsage |= x509.KeyUsageKeyEncipherment },
		"a CA":                func(c *x509.Certificate) { c.IsCA = true; c.KeyUsage |= x509.KeyUsageCertSign },
		"DNS name":            func(c *x509.Certificate) { c.DNSNames = []string{"edge1"} },
		"IP":                  func(c *x509.Certificate) { c.IPAddresses = []net.IP{{10, 0, 0, 1}} },
		"mail":                func(c *x509.Certificate) { c.EmailAddresses = []string{"a@b"} },
		"URI":                 func(c *x509.Certificate) { c.URIs = []*url.URL{{Scheme: "spiffe", Host: "edge1"}} },
		"system:masters":      func(c *x509.Certificate) { c.Subject.Organization = []string{"system:masters"} },
		"system:masters too": func(c *x509.Certificate) {
			c.Subject.Organization = append(c.Subject.Organization, "system:masters")
		},
		"no organization": func(c *x509.Certificate) { c.Subject.Organization = nil },
		"two common names": func(c *x509.Certificate) {
			c.Subject.ExtraNames = []pkix.AttributeTypeAndValue{
				{Type: commonName, Value: "tunnel:node:edge2"}, {Type: commonName, Value: "tunnel:node:edge1"},
			}
		},
		"a unit": func(c *x509.Certificate) { c.Subject.OrganizationalUnit = []string{"x"} },
		"a kubelet's": func(c *x509.Certificate) {
			c.Subject = pkix.Name{CommonName: "system:node:edge1", Organization: []string{"system:nodes"}}
		},
		"not a name":       func(c *x509.Certificate) { c.Subject.CommonName = "tunnel:node:Edge1" },
		"a name with more": func(c *x509.Certificate) { c.Subject.CommonName = "tunnel:node:edge1\x00.evil" },
		"expired":          func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Second) },
		"not yet valid":    func(c *x509.Certificate) { c.NotBefore = time.Now().Add(time.Minute) },
	} {
		refused(name, gate, certCredential("edge1", ca.sign(t, "edge1", change)))
	}
	cert := ca.sign(t, "edge1", nil)
	refused("no claim", gate, certCredential("", cert))
	refused("neither token nor certificate", gate, Credential{Node: "edge1"})
	gate, _ = newCertificateGate(t, "edge1:token\n", ca, nil)
	refused("a wrong token beside it", gate,
		Credential{Node: "edge1", Token: "wrong", Chain: []*x509.Certificate{cert}})
	for name, more := range map[string]func(*GateConfig){
		"no CA":   func(c *GateConfig) { c.NodeCA = nil },
		"no pool": func(c *GateConfig) { c.NodeCA = func() *x509.CertPool { return nil } },
		"no Node": func(c *GateConfig) { c.Nodes = newNodes("edge2") },
		"revoked": func(c *GateConfig) { c.Tokens = newTokens(t, "edge1:revoked\n") },
		"too old": func(c *GateConfig) { c.Tokens = newTokens(t, "edge1:revoked before="+timeAfter(2*time.Second)) },
		"revoked twice": func(c *GateConfig) {
			c.Tokens = newTokens(t, "edge1:revoked\nedge1:revoked before=2000-01-01T00:00:00Z\n")
		},
		"the later counts": func(c *GateConfig) {
			c.Tokens = newTokens(t, "edge1:revoked before="+timeAfter(time.Minute)+"\n"+
				"edge1:revoked before=2000-01-01T00:00:00Z\n")
		},
		"no backdate": func(c *GateConfig) {
			c.Backdate = 0
			c.Tokens = newTokens(t, "edge1:revoked before="+timeAfter(-30*time.Second))
		},
	} {
		gate, _ := newCertificateGate(t, "", ca, more)
		refused(name, gate, certCredential("edge1", cert))
	}
}

func TestRequest(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.StringMatching(`[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?(\.[a-z0-9]{1,10}){0,3}`)
		node := tunnel.NodeName(name.Draw(t, "node"))
		key, der, err := NewRequest(node)
		if err != nil {
			t.Fatal(err)
		}
		r, err := ParseRequest(node, der)
		if err != nil {
			t.Fatal(err)
		}
		if !key.PublicKey.Equal(r.PublicKey) {
			t.Fatal("the request is for another key")
		}
		if _, err := ParseRequest("x"+node, der); err == nil {
			t.Fatal("the request is good for another node")
		}
	})
}

func TestRequests(t *testing.T) {
	t.Setenv("GODEBUG", "rsa1024min=0") // an attacker can set it as well, to make small RSA keys
	rsaKey := func(bits int) crypto.Signer {
		key, err := rsa.GenerateKey(rand.Reader, bits)
		if err != nil {
			t.Fatal(err)
		}
		return key
	}
	ecKey := func(c elliptic.Curve) crypto.Signer {
		key, err := ecdsa.GenerateKey(c, rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		return key
	}
	request := func(key crypto.Signer, r x509.CertificateRequest) []byte {
		der, err := x509.CreateCertificateRequest(rand.Reader, &r, key)
		if err != nil {
			t.Fatal(err)
		}
		return der
	}
	_, ed, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	subject := NodeSubject("edge1")
	p256 := ecKey(elliptic.P256())
	good := request(p256, x509.CertificateRequest{Subject: subject})
	for name, der := range map[string][]byte{
		"ECDSA P-384": request(ecKey(elliptic.P384()), x509.CertificateRequest{Subject: subject}),
		"Ed25519":     request(ed, x509.CertificateRequest{Subject: subject}),
		"RSA 2048":    request(rsaKey(2048), x509.CertificateRequest{Subject: subject}),
	} {
		if _, err := ParseRequest("edge1", der); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	forged := append([]byte(nil), good...)
	forged[len(forged)-1] ^= 1
	if checkKey(&rsa.PublicKey{N: new(big.Int).Lsh(big.NewInt(1), maxRSA), E: 65537}) == nil {
		t.Error("an RSA key of 8193 bits is accepted")
	}
	usage := pkix.Extension{Id: []int{2, 5, 29, 15}, Value: []byte{3, 2, 1, 6}}
	for name, der := range map[string][]byte{
		"nothing":         nil,
		"wrong signature": forged,
		"bytes behind":    append(append([]byte(nil), good...), 0),
		"DNS name":        request(p256, x509.CertificateRequest{Subject: subject, DNSNames: []string{"edge1"}}),
		"IP": request(p256, x509.CertificateRequest{
			Subject: subject, IPAddresses: []net.IP{{10, 0, 0, 1}},
		}),
		"key usage": request(p256, x509.CertificateRequest{
			Subject: subject, ExtraExtensions: []pkix.Extension{usage},
		}),
		"another node": request(p256, x509.CertificateRequest{Subject: NodeSubject("edge2")}),
		"system:masters": request(p256, x509.CertificateRequest{
			Subject: pkix.Name{CommonName: subject.CommonName, Organization: []string{"system:masters"}},
		}),
		"no subject":  request(p256, x509.CertificateRequest{}),
		"RSA 1024":    request(rsaKey(1024), x509.CertificateRequest{Subject: subject}),
		"ECDSA P-224": request(ecKey(elliptic.P224()), x509.CertificateRequest{Subject: subject}),
		"a megabyte":  make([]byte, 1<<20),
		"a megabyte of CN": request(p256, x509.CertificateRequest{
			Subject: pkix.Name{CommonName: strings.Repeat("x", 1<<20)},
		}),
	} {
		if _, err := ParseRequest("edge1", der); err == nil {
			t.Errorf("%s is accepted", name)
		} else if len(err.Error()) > 300 {
			t.Errorf("%s: an error of %d bytes", name, len(err.Error()))
		}
	}
}

func FuzzParseRequest(f *testing.F) {
	_, der, err := NewRequest("edge1")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(der)
	f.Add([]byte{0x30, 0x80})
	f.Fuzz(func(t *testing.T, der []byte) {
		r, err := ParseRequest("edge1", der)
		if err != nil {
			return
		}
		node, err := nodeIn(r.Subject)
		if err != nil || node != "edge1" || r.CheckSignature() != nil || len(r.Extensions) != 0 {
			t.Fatalf("accepted %x", der)
		}
	})
}

// ParseCertificates skips what is no certificate, and says where it stopped.
func TestParseCertificates(t *testing.T) {
	ca, err := NewCA("ca", time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	good, bad := string(ca.CertPEM()), string(encodePEM("CERTIFICATE", []byte("junk")))
	for name, tt := range map[string]struct {
		text string
		want int
		err  bool
	}{
		"nothing":                    {"", 0, false},
		"no PEM":                     {"junk", 0, false},
		"a key":                      {string(ca.KeyPEM()), 0, false},
		"text and a key around one":  {"# mine\n" + string(ca.KeyPEM()) + good + string(ca.KeyPEM()) + "behind", 1, false},
		"two":                        {good + good, 2, false},
		"junk in a certificate":      {bad + good, 0, true},
		"junk behind a good one":     {good + bad, 1, true},
		"a certificate cut in two":   {good + good[:len(good)/2], 1, true},
		"a block of another type":    {string(encodePEM("X509 CRL", []byte("junk"))) + good, 1, false},
		"trusted, which is not PKIX": {string(encodePEM("TRUSTED CERTIFICATE", []byte("junk"))), 0, false},
	} {
		certs, err := ParseCertificates([]byte(tt.text))
		if len(certs) != tt.want || (err != nil) != tt.err {
			t.Errorf("%s: %d certificates, %v; want %d, an error: %t", name, len(certs), err, tt.want, tt.err)
		}
	}
}
