package setup

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	transport "google.golang.org/grpc/credentials"

	"tunnel.example/tunnel/pkg/auth"
	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
)

// fakeCloud answers each request for a certificate with what its sign returns.
type fakeCloud struct {
	pb.UnimplementedCertificatesServer
	sign  func(request []byte) (chain []byte, err error)
	ahead time.Duration // of the cloud's clock
}

func (c *fakeCloud) Sign(_ context.Context, r *pb.SignRequest) (*pb.SignResponse, error) {
	chain, err := c.sign(r.GetRequest())
	return &pb.SignResponse{Node: "edge1", Chain: chain, TimeMs: time.Now().Add(c.ahead).UnixMilli()}, err
}

// start serves the cloud, and returns a join token of it.
func (c *fakeCloud) start(t *testing.T, ca *auth.CA) auth.JoinToken {
	t.Helper()
	leaf, key, err := ca.Issue(auth.Leaf{CommonName: "cloud", DNSNames: []string{"cloud"}, Server: true})
	if err != nil {
		t.Fatal(err)
	}
	pair, err := tls.X509KeyPair(append(leaf, ca.CertPEM()...), key)
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer(grpc.Creds(transport.NewTLS(&tls.Config{Certificates: []tls.Certificate{pair}})))
	pb.RegisterCertificatesServer(server, c)
	done := make(chan struct{})
	go func() {
		defer close(done)
		server.Serve(ln)
	}()
	t.Cleanup(func() {
		server.Stop()
		<-done
	})
	return auth.JoinToken{
		Address: ln.Addr().String(), ServerName: "cloud", Node: "edge1", CA: sha256.Sum256(ca.Certificate().Raw),
		Secret: auth.NewToken(),
	}
}

// fileSigner returns a signer of certificates for edge1, whose CA is ca.
func fileSigner(t *testing.T, ca *auth.CA, lifetime time.Duration) func(request []byte) (chain []byte, err error) {
	t.Helper()
	folder := t.TempDir()
	cert, key := filepath.Join(folder, "ca.crt"), filepath.Join(folder, "ca.key")
	put(t, cert, string(ca.CertPEM()))
	put(t, key, string(ca.KeyPEM()))
	s, err := auth.NewFileSigner(cert, key, lifetime)
	if err != nil {
		t.Fatal(err)
	}
	return func(request []byte) ([]byte, error) { return s.Sign(t.Context(), "edge1", request) }
}

// A join that cannot write a file, as on a full disk, leaves what the edge has been told: without it, the edge might
// trust its cloud no longer.
func TestJoinKeepsWhatTheCloudTold(t *testing.T) {
	ca, err := auth.NewCA("test", time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	cloud := &fakeCloud{sign: fileSigner(t, ca, time.Hour)}
	cfg := JoinConfig{Token: cloud.start(t, ca), Dir: filepath.Join(t.TempDir(), "edge"), Out: io.Discard}
	if err = Join(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	told, blocked := filepath.Join(cfg.Dir, ToldFile), filepath.Join(cfg.Dir, caFile+".new", "file")
	put(t, told, "{}")
	put(t, filepath.Join(cfg.Dir, caFile), "old") // join has to replace it
	put(t, blocked, "")
	if err = Join(t.Context(), cfg); err == nil {
		t.Error("join has written ca.crt, where a folder is in the way")
	}
	if text, err := os.ReadFile(told); err != nil || string(text) != "{}" {
		t.Errorf("%s holds %q, %v", told, text, err)
	}
	if err = os.RemoveAll(filepath.Dir(blocked)); err != nil {
		t.Fatal(err)
	}
	if err = Join(t.Context(), cfg); err != nil {
		t.Errorf("the next join fails: %v", err)
	}
	if _, err = os.Stat(told); err == nil {
		t.Errorf("%s is still there, although the cloud has told nothing", told)
	}
}

// A node without a certificate joins, although its clock is so far ahead that the certificate has expired by it.
func TestJoinWithAClockAhead(t *testing.T) {
	ca, err := auth.NewCA("test", time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	cloud := &fakeCloud{sign: fileSigner(t, ca, -time.Second), ahead: -time.Hour}
	var out strings.Builder
	cfg := JoinConfig{Token: cloud.start(t, ca), Dir: filepath.Join(t.TempDir(), "edge"), Out: &out}
	if err = Join(t.Context(), cfg); err != nil || !strings.Contains(out.String(), "1h ahead of the cloud's: set it") {
		t.Errorf("%v; join says\n%s", err, &out)
	}
}

// A join with a certificate that no edge would take in a renewal leaves the node's good certificate in its place.
func TestJoinKeepsAGoodCertificate(t *testing.T) {
	folder := t.TempDir()
	ca, err := auth.NewCA("test", time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	signer := func(lifetime time.Duration) func([]byte) ([]byte, error) { return fileSigner(t, ca, lifetime) }
	good := signer(time.Hour)
	cloud := &fakeCloud{sign: good}
	var out strings.Builder
	cfg := JoinConfig{Token: cloud.start(t, ca), Dir: filepath.Join(folder, "edge"), Out: io.Discard}
	if err = Join(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(cfg.Dir, certFile)
	before, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	cfg.Out = &out
	for name, tt := range map[string]struct {
		sign  func([]byte) ([]byte, error)
		ahead time.Duration
		says  []string
	}{
		"expired": {signer(-time.Second), 0, []string{"the certificate has expired at ", "Read the cloud's log"}},
		"expired, by a wrong clock": {
			signer(-time.Second), -time.Hour, []string{"has expired at ", "clock is 1h ahead of the cloud's: set it"},
		},
		"another key": {
			func([]byte) ([]byte, error) {
				_, request, err := auth.NewRequest("edge1")
				if err != nil {
					return nil, err
				}
				return good(request)
			}, 0, []string{"is for another key"},
		},
		"nothing": {func([]byte) ([]byte, error) { return nil, nil }, 0, []string{"no certificate in it"}},
	} {
		out.Reset()
		cloud.sign, cloud.ahead = tt.sign, tt.ahead
		if err = Join(t.Context(), cfg); err == nil {
			t.Errorf("%s: the node has joined", name)
		}
		for _, want := range append(tt.says, "FAIL  token: the certificate from the cloud", "Nothing was changed.") {
			if !strings.Contains(out.String(), want) {
				t.Errorf("%s: join says\n%s\nwant %q", name, &out, want)
			}
		}
		if after, err := os.ReadFile(path); err != nil || !bytes.Equal(after, before) {
			t.Errorf("%s: the certificate was replaced, %v", name, err)
		}
	}
}
