package stream

import (
	"context"
	"crypto"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/internal/testkit/testca"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/tunnel"
)

// registry is who decides by certificates: a gate, its token file, and who signs.
type registry struct {
	t    *testing.T
	ca   testca.CA
	file string
	gate *auth.Gate
	ttl  time.Duration // of what is signed
	age  time.Duration // how much longer ago it was signed
	// before is called by Sign; its error is that of the signer.
	before func(ctx context.Context) error
	signed atomic.Int64
}

// newRegistry makes one with these lines in its token file. ca signs nodes' certificates.
func newRegistry(t *testing.T, ca testca.CA, lines ...string) *registry {
	t.Helper()
	a := &registry{t: t, ca: ca, file: filepath.Join(t.TempDir(), "tokens"), ttl: time.Hour}
	a.write(lines...)
	log := (&journal{name: t.Name() + " auth"}).logger()
	tokens, err := auth.NewTokens(auth.TokensConfig{Path: a.file, MayBeEmpty: true, Log: log})
	if err != nil {
		t.Fatal(err)
	}
	pool := ca.Pool()
	a.gate = auth.NewGate(auth.GateConfig{Tokens: tokens, NodeCA: func() *x509.CertPool { return pool }, Backdate: auth.Backdate, Log: log})
	return a
}

func nodeCA(t *testing.T) testca.CA {
	t.Helper()
	ca, err := auth.NewCA("nodes", 1000*time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	return testca.CA{CA: ca}
}

// write replaces the token file.
func (a *registry) write(lines ...string) {
	a.t.Helper()
	next := a.file + ".next"
	if err := os.WriteFile(next, []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
		a.t.Fatal(err)
	}
	if err := os.Rename(next, a.file); err != nil {
		a.t.Fatal(err)
	}
}

// follow has the gate follow its file until the test ends.
func (a *registry) follow() { testkit.Run(a.t, a.gate.Run) }

// serve is a change of a rig's server.
func (a *registry) serve(c *ServerConfig) {
	c.Auth, c.Certificates, c.Issuer = a.gate, true, auth.NewIssuer(a.gate, a)
}

// Sign implements auth.Signer.
func (a *registry) Sign(ctx context.Context, node tunnel.NodeName, request []byte) ([]byte, error) {
	a.signed.Add(1)
	if a.before != nil {
		if err := a.before(ctx); err != nil {
			return nil, err
		}
	}
	r, err := x509.ParseCertificateRequest(request)
	if err != nil {
		return nil, err
	}
	return a.sign(node, r.PublicKey)
}

func (a *registry) sign(node tunnel.NodeName, key any) ([]byte, error) {
	signer, err := tls.X509KeyPair(a.ca.CertPEM(), a.ca.KeyPEM())
	if err != nil {
		return nil, err
	}
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	if err != nil {
		return nil, err
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		Subject: auth.NodeSubject(node), SerialNumber: serial,
		NotBefore: time.Now().Add(-auth.Backdate - a.age), NotAfter: time.Now().Add(a.ttl),
		BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}, signer.Leaf, key, signer.PrivateKey)
	return pemOf(der), err
}

// certificate makes one for a node.
func (a *registry) certificate(node string) tls.Certificate {
	a.t.Helper()
	key, _, err := auth.NewRequest(tunnel.NodeName(node))
	if err != nil {
		a.t.Fatal(err)
	}
	chain, err := a.sign(tunnel.NodeName(node), key.Public())
	if err != nil {
		a.t.Fatal(err)
	}
	return certificateOf(a.t, chain, key)
}

func certificateOf(t *testing.T, chain []byte, key crypto.PrivateKey) tls.Certificate {
	t.Helper()
	parsed, err := parseChain(chain)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{parsed[0].Raw}, PrivateKey: key, Leaf: parsed[0]}
}

// holder is an edge's certificate, which may change.
type holder struct {
	atomic.Pointer[tls.Certificate]
}

func hold(c tls.Certificate) *holder {
	h := new(holder)
	h.Store(&c)
	return h
}

// certified is the configuration of an edge whose proof is a certificate.
func (r *rig) certified(node string, h *holder) ClientConfig {
	cfg := r.clientConfig(node)
	roots := r.ca.Pool()
	cfg.Token = nil
	cfg.TLS = func() *tls.Config {
		return &tls.Config{RootCAs: roots, ServerName: "cloud", GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
			return h.Load(), nil
		}}
	}
	return cfg
}

// joinWith starts an edge and waits until both sides see its session.
func (r *rig) joinWith(cfg ClientConfig, dial tunnel.DialFunc) *edge {
	r.t.Helper()
	e := r.start(cfg, dial)
	r.eventually("node joins", func() bool { return e.client.Ready() == nil && r.dir.Holds(cfg.Node) })
	return e
}

// A certificate opens a session, and the next one resumes the TLS session with it. With
// another certificate there is nothing to resume: the ticket is of the old one.
func TestJoinByCertificate(t *testing.T) {
	a := newRegistry(t, nodeCA(t))
	r := newRig(t, a.serve)
	h := hold(a.certificate("edge1"))
	e := r.joinWith(r.certified("edge1", h), direct)
	c, far := r.pair("edge1")
	echo(t, "a conn", far, c)
	if len(r.log.lines("end=cloud", "session started", "node=edge1", `by="certificate `)) != 1 {
		t.Errorf("the log does not say what has proven the node:\n%s", strings.Join(r.log.lines("session started"), ""))
	}
	again := func() tls.ConnectionState {
		was := r.dir.Lookup("edge1")
		e.client.Session().Close(errors.New("cut by the test"))
		r.eventually("the edge is back", func() bool {
			now := r.dir.Lookup("edge1")
			return now != nil && now != was && e.client.Ready() == nil
		})
		return r.dir.Lookup("edge1").Link.(*cloudSession).transport.State
	}
	if !again().DidResume {
		t.Error("the second TLS session is not the first one resumed")
	}
	next := a.certificate("edge1")
	h.Store(&next)
	if s := again(); s.DidResume || !s.PeerCertificates[0].Equal(next.Leaf) {
		t.Errorf("after a change of the certificate: resumed %t, with certificate %s; want %s",
			s.DidResume, s.PeerCertificates[0].SerialNumber, next.Leaf.SerialNumber)
	}
}

// Who shows a certificate that does not prove what he says is told what every stranger is.
func TestCertificateRefused(t *testing.T) {
	ca := nodeCA(t)
	a := newRegistry(t, ca, "edge1:token-edge1", "edge9:revoked")
	other := newRegistry(t, nodeCA(t))
	late := newRegistry(t, ca)
	late.ttl = -time.Second
	one := a.certificate("edge1")
	for name, c := range map[string]struct {
		show     tls.Certificate
		metadata []string
		logs     string
	}{
		"claim of another node":   {one, []string{nodeKey, "edge2"}, "another node's"},
		"no claim":                {one, nil, "does not say which node"},
		"an empty claim":          {one, []string{nodeKey, ""}, "not RFC 1123"},
		"two claims":              {one, []string{nodeKey, "edge1", nodeKey, "edge2"}, "two nodes"},
		"no certificate":          {tls.Certificate{}, []string{nodeKey, "edge1"}, "neither a token nor a certificate"},
		"another CA":              {other.certificate("edge1"), []string{nodeKey, "edge1"}, "unknown authority"},
		"expired":                 {late.certificate("edge1"), []string{nodeKey, "edge1"}, "expired"},
		"a revoked node":          {a.certificate("edge9"), []string{nodeKey, "edge9"}, "revokes this node"},
		"a server's certificate":  {ca.Pair(t, auth.Leaf{CommonName: "replica", DNSNames: []string{"edge1"}, Client: true, Server: true}), []string{nodeKey, "edge1"}, "the subject is not"},
		"a wrong token beside it": {one, []string{nodeKey, "edge1", "authorization", "Bearer " + auth.EncodeToken("edge1", "s3cret")}, "token"},
		"a token of another node": {a.certificate("edge2"), []string{nodeKey, "edge2", "authorization", bearerOf("edge1")}, "two nodes"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, a.serve)
			var show []tls.Certificate
			if c.show.Certificate != nil {
				show = append(show, c.show)
			}
			err := r.stranger(show...).controlWith(c.metadata...).end()
			if status.Code(err) != codes.Unauthenticated || status.Convert(err).Message() != auth.ErrUnauthenticated.Error() {
				t.Errorf("it is told %v; want %s and the words for every stranger", err, codes.Unauthenticated)
			}
			r.eventually("the refusal is counted and logged", func() bool {
				return r.counters.JoinsRefused.Load() == 1 && len(r.log.lines("join refused")) == 1
			})
			if len(r.log.lines("level=WARN", "join refused", "remote=127.0.0.1:", c.logs)) != 1 {
				t.Errorf("the cloud's log does not say %q:\n%s", c.logs, strings.Join(r.log.lines(), ""))
			}
			if r.dir.Len() != 0 || len(r.log.lines("s3cret")) != 0 {
				t.Error("there is a session, or the token is in the log")
			}
		})
	}
}

// What the person at the edge reads whose certificate is not taken.
func TestWhatTheEdgeSaysOfItsCertificate(t *testing.T) {
	ca := nodeCA(t)
	a := newRegistry(t, ca)
	other, late := newRegistry(t, nodeCA(t)), newRegistry(t, ca)
	late.ttl = -time.Second
	for name, c := range map[string]struct {
		shows tls.Certificate
		serve func(*ServerConfig)
		want  []string
	}{
		"none":         {tls.Certificate{}, a.serve, []string{"neither a token nor a certificate", "nodecert", "tunnel join"}},
		"expired":      {late.certificate("edge1"), a.serve, []string{"has expired on 20", "clock", "tunnel join"}},
		"another CA":   {other.certificate("edge1"), a.serve, []string{"nodecert", "signed by ca in [mode.cloud.join]", "tunnel join"}},
		"never asked":  {a.certificate("edge1"), func(c *ServerConfig) { c.Auth = a.gate }, []string{"asks for no certificate", "ca in [mode.cloud.join]", "in between ends TLS"}},
		"another node": {a.certificate("edge2"), a.serve, []string{"made out to this node"}},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, c.serve)
			r.notReady(t, func(cfg *ClientConfig) { *cfg = r.certified("edge1", hold(c.shows)) }, c.want...)
		})
	}
}

// A session ends when its certificate does, however long it has lived, and its conns with
// it.
func TestCertificateExpires(t *testing.T) {
	// It is good for an hour. The heartbeats of a day are too much for the race detector, in
	// whose own code (StackDepot) the process has crashed.
	bubble(t, func(t *testing.T) {
		a := newRegistry(t, nodeCA(t))
		r := newRigOn(t, newMemNet(), a.serve)
		_, dial := pipeTarget(t)
		start := time.Now()
		e := r.joinWith(r.certified("edge1", hold(a.certificate("edge1"))), dial)
		c := r.mustDial("edge1", "target:1")
		_, err := c.Read(make([]byte, 1))
		wantErr(t, "read of a conn whose certificate has expired", err, syscall.ECONNRESET)
		if d := time.Since(start); d < a.ttl-time.Second || d > a.ttl+time.Second {
			t.Errorf("the session lives for %s, want %s", d, a.ttl)
		}
		r.eventually("the edge says what to do", func() bool {
			err := e.client.Ready()
			return err != nil && strings.Contains(err.Error(), "has expired on ")
		})
		if len(r.log.lines("end=cloud", "session ended", "the credential of this node has expired")) != 1 {
			t.Error("the cloud's log does not say why")
		}
		time.Sleep(time.Hour)
		if r.counters.Sessions.Load() != 1 {
			t.Error("it has come back")
		}
	})
}

// A node that is revoked loses its session and conns within a second, and does not come
// back with its certificate. Another node does not notice.
func TestNodeRevoked(t *testing.T) {
	a := newRegistry(t, nodeCA(t))
	a.follow()
	r := newRig(t, a.serve)
	e := r.joinWith(r.certified("edge1", hold(a.certificate("edge1"))), direct)
	other := r.joinWith(r.certified("edge2", hold(a.certificate("edge2"))), direct)
	c, _ := r.pair("edge1")
	start := time.Now()
	a.write("edge1:revoked")
	_, err := c.Read(make([]byte, 1))
	wantErr(t, "read of a conn whose node was revoked", err, syscall.ECONNRESET)
	t.Logf("the conn is reset after %s", time.Since(start))
	r.eventually("the edge says what to do", func() bool {
		return len(r.log.lines("end=edge", "no session; trying again", "revoked", "tunnel join")) > 0
	})
	if err := r.stranger(a.certificate("edge1")).controlWith(nodeKey, "edge1").end(); status.Code(err) != codes.Unauthenticated {
		t.Errorf("it comes back: %v", err)
	}
	e.Stop()
	if _, err := e.client.open(t.Context()); err == nil || !strings.Contains(err.Error(), "nodecert in") { // not: the cloud has not asked
		t.Errorf("when it tries again, it says %v", err)
	}
	if other.client.Ready() != nil || !r.dir.Holds("edge2") || r.dir.Holds("edge1") {
		t.Error("the wrong node is gone")
	}
}

// wrongAuth proves another node than the one that is claimed.
type wrongAuth struct{}

func (wrongAuth) Authenticate(context.Context, auth.Credential) (auth.Grant, error) {
	return auth.Grant{Node: "edge9"}, nil
}

// Whatever has proven another node than the one that is claimed opens no session.
func TestProofOfAnotherNode(t *testing.T) {
	r := newRig(t, func(c *ServerConfig) { c.Auth, c.Certificates = wrongAuth{}, true })
	for _, s := range []*strangerControl{
		r.stranger().control(bearerOf("edge1")),
		r.stranger(newRegistry(t, nodeCA(t)).certificate("edge1")).controlWith(nodeKey, "edge1"),
	} {
		if err := s.end(); status.Code(err) != codes.Unauthenticated {
			t.Errorf("got %v", err)
		}
	}
	if len(r.log.lines("join refused", "node=edge1", "that of node edge9")) != 2 || r.dir.Len() != 0 {
		t.Errorf("the log:\n%s", strings.Join(r.log.lines(), ""))
	}
}

// Renewing renews the proof of every session, since each stands on its own.
func TestRenewEverywhere(t *testing.T) {
	ca := nodeCA(t)
	a := newRegistry(t, ca)
	all := newFleetOf(t, ca, 2, a.serve)
	cfg := all[0].certified("edge1", hold(a.certificate("edge1")))
	cfg.Dial, cfg.All = all.balanced(), true
	e := all[0].start(cfg, direct)
	proofs := func() (found []*proof) {
		for _, r := range all {
			if s := r.dir.Lookup("edge1"); s != nil {
				found = append(found, s.Link.(*cloudSession).proof.Load())
			}
		}
		return found
	}
	testkit.Eventually(t, "the edge has a session with each replica", func() bool { return len(proofs()) == 2 && len(e.client.live()) == 2 })
	before := proofs()
	if _, _, err := e.client.Renew(t.Context(), requestFor(t, "edge1")); err != nil {
		t.Fatal(err)
	}
	for i, p := range proofs() {
		if p == before[i] || !p.certificate {
			t.Errorf("the session with replica %d stands on what it did", i)
		}
	}
}
