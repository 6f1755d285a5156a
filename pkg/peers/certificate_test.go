package peers

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"log/slog"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/internal/testkit/testca"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/stream"
	"tunnel.example/tunnel/pkg/tunnel"
)

// nodeCertificate makes a certificate of a node.
func nodeCertificate(t *testing.T, ca testca.CA, node tunnel.NodeName) tls.Certificate {
	t.Helper()
	signer, err := tls.X509KeyPair(ca.CertPEM(), ca.KeyPEM())
	if err != nil {
		t.Fatal(err)
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		Subject: auth.NodeSubject(node), SerialNumber: big.NewInt(time.Now().UnixNano()),
		NotBefore: time.Now().Add(-auth.Backdate), NotAfter: time.Now().Add(time.Hour),
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}, signer.Leaf, key.Public(), signer.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

// certificates has a server accept the certificates that ca has made for nodes.
func certificates(t *testing.T, ca testca.CA) func(*stream.ServerConfig) {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	file := filepath.Join(t.TempDir(), "tokens")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	tokens, err := auth.NewTokens(auth.TokensConfig{Path: file, MayBeEmpty: true, Log: log})
	if err != nil {
		t.Fatal(err)
	}
	pool := ca.Pool()
	gate := auth.NewGate(auth.GateConfig{
		Tokens: tokens, NodeCA: func() *x509.CertPool { return pool }, Backdate: auth.Backdate, Log: log,
	})
	return func(c *stream.ServerConfig) { c.Auth, c.Certificates = gate, true }
}

// Where one CA signs for replicas and for nodes, a certificate is good for one of the two.
func TestReplicasAndNodesOfOneCA(t *testing.T) {
	p := newPlaces(t, 2)
	all := p.fleet(t, p.names, certificates(t, p.ca))
	r := all[0]
	node := nodeCertificate(t, p.ca, "edge1")
	err := joinAsReplica(t, r, &tls.Config{Certificates: []tls.Certificate{node}})
	if status.Code(err) != codes.Unauthenticated {
		t.Errorf("a node joins as a replica: %v", err)
	}
	withCertificate := func(claim string, show tls.Certificate) stream.ClientConfig {
		cfg := r.clientConfig(claim)
		cfg.Token = nil
		cfg.TLS = fixed(&tls.Config{RootCAs: p.ca.Pool(), ServerName: "cloud", Certificates: []tls.Certificate{show}})
		return cfg
	}
	for _, claim := range []string{"edge1", "replicas", "replica"} {
		e := r.start(withCertificate(claim, r.tls.Load().Certificates[0]), direct)
		r.eventually("a replica that joins as node "+claim+" is refused", func() bool {
			return status.Code(e.client.Ready()) == codes.Unauthenticated
		})
		e.Stop()
	}
	if len(r.peers.sessions()) != 1 || r.dir.Len() != 0 {
		t.Error("one of them has a session")
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.CertificateRequest{Subject: auth.NodeSubject("edge1")}
	request, err := x509.CreateCertificateRequest(rand.Reader, template, key)
	if err != nil {
		t.Fatal(err)
	}
	asked := 0
	for _, s := range all[1].peers.links { // all[1]'s session with r
		if s.Ready() == nil {
			asked++
			_, _, err = s.Renew(t.Context(), request)
			if err == nil || !strings.Contains(err.Error(), "without a certificate") {
				t.Errorf("a replica has a certificate made: %v", err)
			}
		}
	}
	if asked != 1 {
		t.Errorf("%d sessions with other replicas, want 1", asked)
	}
	e := r.start(withCertificate("edge1", node), direct)
	r.front = all[1].peers
	r.eventually("the node joins, and the other replica knows", func() bool {
		return e.client.Ready() == nil && r.front.Holds("edge1")
	})
	c, far := r.pair("edge1")
	go func() {
		far.Write([]byte("through the other replica"))
		far.Close()
	}()
	if got := testkit.ReadAll(t, c); string(got) != "through the other replica" {
		t.Errorf("got %q", got)
	}
}
