package auth

import (
	"context"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

// caFiles writes the certificate and the key of a CA into files.
func caFiles(t testing.TB, ca *CA) (certFile, keyFile string) {
	t.Helper()
	dir := t.TempDir()
	certFile, keyFile = filepath.Join(dir, "ca.crt"), filepath.Join(dir, "ca.key")
	for file, content := range map[string][]byte{certFile: ca.CertPEM(), keyFile: ca.KeyPEM()} {
		if err := os.WriteFile(file, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return certFile, keyFile
}

func fileSigner(t testing.TB, ca *CA, lifetime time.Duration) *FileSigner {
	t.Helper()
	certFile, keyFile := caFiles(t, ca)
	s, err := NewFileSigner(certFile, keyFile, lifetime)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestFileSigner(t *testing.T) {
	ca, err := NewCA("nodes", 100*24*time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AddCert(ca.cert)
	const day = 24 * time.Hour
	for lifetime, want := range map[time.Duration]time.Duration{
		0: 30 * day, time.Hour: time.Hour, 200 * day: 100 * day,
	} {
		s := fileSigner(t, ca, lifetime)
		key, request, err := NewRequest("edge1")
		if err != nil {
			t.Fatal(err)
		}
		issued := time.Now()
		chain, err := s.Sign(t.Context(), "edge1", request)
		if err != nil {
			t.Fatal(err)
		}
		leaf, err := CheckIssued(chain, "edge1", key.Public(), time.Now())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := verify([]*x509.Certificate{leaf}, pool); err != nil {
			t.Error(err)
		}
		if d := leaf.NotAfter.Sub(issued) - want; d < -time.Minute || d > time.Minute {
			t.Errorf("good for %v, want %v", leaf.NotAfter.Sub(issued), want)
		}
		if leaf.NotAfter.After(ca.cert.NotAfter) {
			t.Error("it outlives its CA")
		}
		if leaf.NotBefore.After(issued.Add(-Backdate)) && leaf.NotBefore.Sub(issued.Add(-Backdate)) > time.Minute {
			t.Errorf("NotBefore lies %v before its issue", issued.Sub(leaf.NotBefore))
		}
		if leaf.SerialNumber.BitLen() < 64 {
			t.Error("the serial is not random")
		}
	}
	s := fileSigner(t, ca, 0)
	_, request, err := NewRequest("edge2")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Sign(t.Context(), "edge1", request); err == nil {
		t.Error("a request of another node was signed")
	}
	if err := os.Remove(s.keyFile); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Sign(t.Context(), "edge2", request); err == nil {
		t.Error("signed without a key")
	}
}

func TestCAThatCannotSign(t *testing.T) {
	good := newNodeCA(t).CA
	made := func(change func(*x509.Certificate)) *CA {
		key, err := ecdsa.GenerateKey(elliptic.P384(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		tmpl := &x509.Certificate{
			Subject:   pkix.Name{CommonName: "ca"},
			NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
			IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
		}
		change(tmpl)
		der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, key.Public(), key)
		if err != nil {
			t.Fatal(err)
		}
		cert, err := x509.ParseCertificate(der)
		if err != nil {
			t.Fatal(err)
		}
		return &CA{key: key, cert: cert, certPEM: encodePEM("CERTIFICATE", der)}
	}
	certFile, keyFile := caFiles(t, made(func(c *x509.Certificate) {
		c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	}))
	if _, err := NewFileSigner(certFile, keyFile, 0); err != nil {
		t.Errorf("a CA for clients: %v", err)
	}
	other := newNodeCA(t)
	for name, ca := range map[string]*CA{
		"a leaf":      made(func(c *x509.Certificate) { c.IsCA, c.KeyUsage = false, x509.KeyUsageDigitalSignature }),
		"no certSign": made(func(c *x509.Certificate) { c.KeyUsage = x509.KeyUsageCRLSign }),
		"for servers alone": made(func(c *x509.Certificate) {
			c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
		}),
		"expired":      made(func(c *x509.Certificate) { c.NotAfter = time.Now().Add(-time.Minute) }),
		"not yet good": made(func(c *x509.Certificate) { c.NotBefore = time.Now().Add(time.Minute) }),
		"another key":  {key: good.key, cert: other.cert, certPEM: other.certPEM},
	} {
		certFile, keyFile := caFiles(t, ca)
		if _, err := NewFileSigner(certFile, keyFile, 0); err == nil || !strings.Contains(err.Error(), certFile) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := NewFileSigner("/nonexistent/ca.crt", "/nonexistent/ca.key", 0); err == nil {
		t.Error("files that are not there")
	}
}

func TestStoredCA(t *testing.T) {
	made := newNodeCA(t)
	_, ed, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		Subject: pkix.Name{CommonName: "ca"}, NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, ed.Public(), ed)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []*CA{made.CA, {key: ed, cert: cert, certPEM: encodePEM("CERTIFICATE", der)}} {
		got, err := LoadCA(want.CertPEM(), want.KeyPEM())
		if err != nil {
			t.Fatal(err)
		}
		if string(got.CertPEM()) != string(want.CertPEM()) || string(got.KeyPEM()) != string(want.KeyPEM()) {
			t.Error("it has changed")
		}
		if _, _, err := got.Issue(Leaf{CommonName: "x", Server: true}); err != nil {
			t.Error(err)
		}
	}
	if _, err := LoadCA(nil, nil); err == nil {
		t.Error("nothing is a CA")
	}
}

// signerFunc is a Signer made of a function.
type signerFunc func(node tunnel.NodeName, request []byte) ([]byte, error)

func (f signerFunc) Sign(_ context.Context, node tunnel.NodeName, request []byte) ([]byte, error) {
	return f(node, request)
}

func TestIssuer(t *testing.T) {
	ca := newNodeCA(t)
	signer := fileSigner(t, ca.CA, time.Hour)
	gate, _ := newCertificateGate(t, "edge1:j join\nedge1:t\nedge2:j2 join expires=2020-01-01T00:00:00Z\n", ca, nil)
	issuer := NewIssuer(gate, signer)
	_, request, err := NewRequest("edge1")
	if err != nil {
		t.Fatal(err)
	}
	node, chain, err := issuer.First(t.Context(), Credential{Node: "edge1", Token: "j"}, request)
	if err != nil || node != "edge1" {
		t.Fatal(node, err)
	}
	certs, err := parseChain(chain)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := gate.Authenticate(t.Context(), Credential{Node: "edge1", Chain: certs}); err != nil {
		t.Errorf("the certificate that was issued: %v", err)
	}
	if _, err := issuer.Again(t.Context(), certCredential("edge1", certs...), request); err != nil {
		t.Errorf("again: %v", err)
	}
	for name, c := range map[string]Credential{
		"a plain token":  {Node: "edge1", Token: "t"},
		"another node's": {Node: "edge2", Token: "j"},
		"expired":        {Node: "edge2", Token: "j2"},
		"a certificate":  {Node: "edge1", Chain: certs},
	} {
		if _, _, err := issuer.First(t.Context(), c, request); !errors.Is(err, ErrUnauthenticated) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := issuer.Again(t.Context(), certCredential("edge2", certs...), request); err == nil {
		t.Error("edge2's session gets a certificate of edge1")
	}
	_, _, err = issuer.First(t.Context(), Credential{Node: "edge1", Token: "j"}, nil)
	if err == nil || errors.Is(err, ErrUnauthenticated) {
		t.Errorf("no request: %v", err)
	}
	for name, s := range map[string]signerFunc{
		"signs for another": func(tunnel.NodeName, []byte) ([]byte, error) {
			_, other, err := NewRequest("edge2")
			if err != nil {
				return nil, err
			}
			return signer.Sign(t.Context(), "edge2", other)
		},
		"signs another key": func(tunnel.NodeName, []byte) ([]byte, error) {
			return encodePEM("CERTIFICATE", ca.sign(t, "edge1", nil).Raw), nil
		},
		"is down":       func(tunnel.NodeName, []byte) ([]byte, error) { return nil, errors.New("down") },
		"signs nothing": func(tunnel.NodeName, []byte) ([]byte, error) { return []byte("\n"), nil },
	} {
		if _, err := NewIssuer(gate, s).Again(t.Context(), certCredential("edge1", certs...), request); err == nil {
			t.Errorf("a signer that %s: accepted", name)
		}
	}
	// A node that is revoked while its certificate is being signed gets no certificate.
	late := signerFunc(func(node tunnel.NodeName, request []byte) ([]byte, error) {
		setTokens(t, gate, "edge1:revoked\n")
		return signer.Sign(t.Context(), node, request)
	})
	_, _, err = NewIssuer(gate, late).First(t.Context(), Credential{Node: "edge1", Token: "j"}, request)
	if err == nil {
		t.Error("a node that was revoked meanwhile has a certificate")
	}
}

// Note reports a failing signer until it signs again. A request whose caller has gone does not count.
func TestSignerDown(t *testing.T) {
	ca := newNodeCA(t)
	signer := fileSigner(t, ca.CA, time.Hour)
	gate, _ := newCertificateGate(t, "edge1:t\n", ca, nil)
	edge1 := certCredential("edge1", ca.sign(t, "edge1", nil))
	_, request, err := NewRequest("edge1")
	if err != nil {
		t.Fatal(err)
	}
	down := true
	sometimes := signerFunc(func(node tunnel.NodeName, request []byte) ([]byte, error) {
		if down {
			return nil, errors.New("down")
		}
		return signer.Sign(t.Context(), node, request)
	})
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	for _, step := range []struct {
		ctx  context.Context // context of the caller, in a table
		down bool
		note string
	}{{gone, true, ""}, {t.Context(), true, "could not be signed"}, {t.Context(), false, ""}} {
		down = step.down
		if _, err := NewIssuer(gate, sometimes).Again(step.ctx, edge1, request); (err != nil) != down {
			t.Error(err)
		}
		if note := gate.Note(); note != step.note && (step.note == "" || !strings.Contains(note, step.note)) {
			t.Errorf("down: %v, note %q", down, note)
		}
	}
}

// A revoked proof gets no certificate, not even before the file is read again: the new certificate
// would be younger than the revocation.
func TestRevokedGetsNoCertificate(t *testing.T) {
	const lines = "edge1:j join\nedge2:t\n"
	ca, next := newNodeCA(t), newNodeCA(t)
	for name, c := range map[string]struct {
		content      string // of the file; nobody reloads it
		pool         *x509.CertPool
		again, first bool // whether the certificate, and the join token, get a new certificate
	}{
		"nothing has changed": {lines + "# a comment\n", nil, true, true},
		"a bad file":          {lines + "edge1\n", nil, true, true},
		"the node":            {lines + "edge1:revoked\n", nil, false, false},
		"its certificates":    {lines + "edge1:revoked before=" + timeAfter(-time.Second) + "\n", nil, false, true},
		"the join token":      {"edge1:other join\n", nil, true, false},
		"the CA":              {lines, next.pool, false, true},
		"certificates, with a token": {
			"edge1:revoked before=" + timeAfter(-time.Second) + "\nedge1:" + Secret("j").Hashed() + " join\n",
			nil, false, true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			pool := ca.pool
			gate, _ := newCertificateGate(t, lines, ca, func(c *GateConfig) {
				c.NodeCA = func() *x509.CertPool { return pool }
			})
			files := fileSigner(t, ca.CA, time.Hour)
			signer := signerFunc(func(node tunnel.NodeName, request []byte) ([]byte, error) {
				writeFile(t, gate.cfg.Tokens.path, c.content)
				if c.pool != nil {
					pool = c.pool
				}
				return files.Sign(t.Context(), node, request)
			})
			_, request, err := NewRequest("edge1")
			if err != nil {
				t.Fatal(err)
			}
			old := certCredential("edge1", ca.sign(t, "edge1", func(c *x509.Certificate) {
				c.NotBefore = time.Now().Add(-time.Hour)
			}))
			if _, err := gate.Authenticate(t.Context(), old); err != nil {
				t.Fatal(err)
			}
			_, err = NewIssuer(gate, signer).Again(t.Context(), old, request)
			if c.again != (err == nil) || err != nil && !errors.Is(err, ErrUnauthenticated) {
				t.Errorf("by the certificate: %v", err)
			}
			_, _, err = NewIssuer(gate, signer).First(t.Context(), Credential{Node: "edge1", Token: "j"}, request)
			if c.first != (err == nil) || err != nil && !errors.Is(err, ErrUnauthenticated) {
				t.Errorf("by the join token: %v", err)
			}
		})
	}
}

// A node that was revoked, and has a new join token, gets a certificate in the same second.
func TestIssueAfterRevocation(t *testing.T) {
	ca := newNodeCA(t)
	content, err := AddToken("edge1:revoked\n", TokenLine{Node: "edge1", Secret: "j", Join: true}, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	gate, _ := newCertificateGate(t, content, ca, nil)
	_, request, err := NewRequest("edge1")
	if err != nil {
		t.Fatal(err)
	}
	join := Credential{Node: "edge1", Token: "j"}
	_, chain, err := NewIssuer(gate, fileSigner(t, ca.CA, time.Hour)).First(t.Context(), join, request)
	if err != nil {
		t.Fatal(err)
	}
	certificates, err := ParseCertificates(chain)
	if err != nil {
		t.Fatal(err)
	}
	if err := gate.decideNow("edge1", newCertificateProof(Backdate, certificates...)); err != nil {
		t.Error(err)
	}
}
