package setup

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"log/slog"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/reload"
)

// writeFile writes a file into a new folder, and returns its path.
func writeFile(t *testing.T, content []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// newAuthority returns a new CA.
func newAuthority(t *testing.T, lifetime time.Duration) *auth.CA {
	t.Helper()
	ca, err := auth.NewCA("nodes", lifetime)
	if err != nil {
		t.Fatal(err)
	}
	return ca
}

// The operator hears of the end of the nodes' CA a month before it: nothing renews it, and with
// it every node's certificate ends. Of two CAs in the file each counts.
func TestCheckTrustBeforeTheEnd(t *testing.T) {
	long, short := newAuthority(t, 31*24*time.Hour), newAuthority(t, 29*24*time.Hour)
	for name, tt := range map[string]struct {
		ca   []byte
		want int // warnings
	}{
		"31 days left":      {long.CertPEM(), 0},
		"29 days left":      {short.CertPEM(), 1},
		"an old and a new":  {append(long.CertPEM(), short.CertPEM()...), 1},
		"two before an end": {append(short.CertPEM(), short.CertPEM()...), 2},
	} {
		c := &conf.Cloud{Join: conf.Join{CA: writeFile(t, tt.ca)}}
		warnings, err := CheckTrust(c)
		if err != nil || len(warnings) != tt.want {
			t.Errorf("%s: %q, %v; want %d warnings", name, warnings, err, tt.want)
		}
	}
}

// A cluster's CA signs both nodes and kube-apiserver, each by a signer of its own. A cloud that
// has Kubernetes sign makes no callers, so it gets no warning; with the CA's key it could.
func TestCheckTrustOfAClusterCA(t *testing.T) {
	ca := writeFile(t, newAuthority(t, time.Hour*24*365).CertPEM())
	https := conf.HTTPS{
		Ports: map[string]string{"10250": "127.0.0.1:10250"}, ClientCA: ca,
		ClientNames: []string{"kube-apiserver-kubelet-client"},
	}
	for kubernetes, want := range map[bool]int{true: 0, false: 1} {
		warnings, err := CheckTrust(&conf.Cloud{HTTPS: https, Join: conf.Join{CA: ca, Kubernetes: kubernetes}})
		if err != nil || len(warnings) != want {
			t.Errorf("Kubernetes signs: %t: %q, %v; want %d warnings", kubernetes, warnings, err, want)
		}
	}
	https.Callers = []conf.Caller{{Name: auth.NodePrefix + "edge1"}}
	if _, err := CheckTrust(&conf.Cloud{HTTPS: https, Join: conf.Join{CA: ca, Kubernetes: true}}); err == nil {
		t.Error("a node may call, since Kubernetes signs")
	}
}

// A CA that was certified again, with another name and serial number, is still the same CA.
func TestCommonLooksAtKeys(t *testing.T) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	certify := func(key *ecdsa.PrivateKey, name string, serial int64) []*x509.Certificate {
		template := &x509.Certificate{SerialNumber: big.NewInt(serial), Subject: pkix.Name{CommonName: name}}
		der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
		if err != nil {
			t.Fatal(err)
		}
		cert, err := x509.ParseCertificate(der)
		if err != nil {
			t.Fatal(err)
		}
		return []*x509.Certificate{cert}
	}
	other, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	first, again, foreign := certify(key, "one", 1), certify(key, "two", 2), certify(other, "one", 1)
	if !common(first, again) {
		t.Error("the same key counts as two authorities")
	}
	if common(first, foreign) || common(first, nil) {
		t.Error("different keys count as one authority")
	}
	if !common(append(foreign, first...), again) {
		t.Error("the second of two authorities does not count")
	}
}

// The port shows the CA behind its certificate. With a cloudca that did not sign the
// certificate, nodes that have joined still get the certificate, and the log says once what to
// correct.
func TestServerCertificate(t *testing.T) {
	ca, foreign := newAuthority(t, time.Hour), newAuthority(t, time.Hour)
	certPEM, keyPEM, err := ca.Issue(auth.Leaf{CommonName: "cloud", DNSNames: []string{"cloud"}, Server: true})
	if err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct {
		cloudCA     string
		want, lines int // certificates shown, lines logged
	}{
		"none":        {"", 1, 0},
		"its own":     {writeFile(t, ca.CertPEM()), 2, 0},
		"another one": {writeFile(t, foreign.CertPEM()), 1, 1},
	} {
		var log testkit.Log
		files := reload.NewFiles(slog.New(slog.DiscardHandler))
		pair, err := files.Pair("cert", writeFile(t, certPEM), writeFile(t, keyPEM))
		if err != nil {
			t.Fatal(err)
		}
		c := &conf.Cloud{Join: conf.Join{CloudCA: tt.cloudCA}}
		get, err := ServerCertificate(c, files, pair, slog.New(slog.NewTextHandler(&log, nil)))
		if err != nil {
			t.Fatal(err)
		}
		for range 3 {
			shown, err := get(nil)
			if err != nil || len(shown.Certificate) != tt.want {
				t.Fatalf("%s: %d certificates, %v; want %d", name, len(shown.Certificate), err, tt.want)
			}
		}
		if lines := strings.Count(log.String(), "\n"); lines != tt.lines {
			t.Errorf("%s: %d lines in the log, want %d:\n%s", name, lines, tt.lines, &log)
		}
	}
}
