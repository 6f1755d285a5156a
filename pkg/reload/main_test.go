package reload

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"os"
	"path/filepath"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit/leaks"
)

func TestMain(m *testing.M) { leaks.Main(m) }

func writeFile(t *testing.T, path string, content []byte) {
	t.Helper()
	if err := os.WriteFile(path, content, 0o600); err != nil {
		t.Fatal(err)
	}
}

func rename(t *testing.T, from, to string) {
	t.Helper()
	if err := os.Rename(from, to); err != nil {
		t.Fatal(err)
	}
}

// certify returns a self-signed certificate and its key.
func certify(t *testing.T, name string, from time.Time, life time.Duration) (cert, key []byte) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{
		Subject: pkix.Name{CommonName: name}, NotBefore: from, NotAfter: from.Add(life),
		IsCA: true, BasicConstraintsValid: true,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, k.Public(), k)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		t.Fatal(err)
	}
	cert = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	return cert, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER})
}

const year = 365 * 24 * time.Hour

// good returns a pair that is valid for a year.
func good(t *testing.T, name string) (cert, key []byte) {
	t.Helper()
	return certify(t, name, time.Now().Add(-time.Minute), year)
}

// version adds one state of a folder and switches to it as a kubelet does for a Secret: the link
// ..data points to the state's folder, and each file is a link through ..data.
func version(t *testing.T, dir, name string, files map[string][]byte) {
	t.Helper()
	if err := os.Mkdir(filepath.Join(dir, name), 0o700); err != nil {
		t.Fatal(err)
	}
	for file, content := range files {
		writeFile(t, filepath.Join(dir, name, file), content)
		if err := os.Symlink(filepath.Join("..data", file), filepath.Join(dir, file)); err != nil && !os.IsExist(err) {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(name, filepath.Join(dir, "..data_tmp")); err != nil {
		t.Fatal(err)
	}
	rename(t, filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data"))
}
