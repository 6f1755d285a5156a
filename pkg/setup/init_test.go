package setup

import (
	"crypto/x509"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// newInit returns what makes a cloud for tunnel.example.com:9000 in a folder.
func newInit(dir string) InitConfig {
	return InitConfig{Address: "tunnel.example.com:9000", Dir: dir, Out: io.Discard}
}

// Modes do not depend on the umask: a cloud that runs as another user reads public files, and
// nobody else reads secret ones.
func TestInitIgnoresTheUmask(t *testing.T) {
	for _, umask := range []int{0, 0o077} {
		dir := filepath.Join(t.TempDir(), "parent", "cloud")
		before := syscall.Umask(umask)
		err := Init(t.Context(), newInit(dir))
		syscall.Umask(before)
		if err != nil {
			t.Fatal(err)
		}
		for name, want := range map[string]fs.FileMode{
			"": 0o755, "ca.crt": 0o644, "cloud.crt": 0o644, "nodes-ca.crt": 0o644, "cloud.toml": 0o644,
			"ca.key": 0o600, "cloud.key": 0o600, "nodes-ca.key": 0o600, "tokens": 0o600,
		} {
			info, err := os.Stat(filepath.Join(dir, name))
			if err != nil {
				t.Fatal(err)
			}
			if got := info.Mode().Perm(); got != want {
				t.Errorf("umask %#o: %q has mode %#o, want %#o", umask, name, got, want)
			}
		}
	}
}

// A failure in the middle leaves no file behind, so that the operator can run init again.
func TestCreateFilesAllOrNone(t *testing.T) {
	dir := t.TempDir()
	err := createFiles(dir, []newFile{
		{name: "first", mode: publicFile}, {name: "missing/second", mode: publicFile}, {name: "third", mode: publicFile},
	})
	if !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("want an error about the missing folder, got %v", err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// A shell reads back each quoted path as it was.
func TestShellQuote(t *testing.T) {
	for _, word := range []string{
		"/etc/tunnel/cloud.toml", "", "a b", "it's", "'", "$HOME", "`id`", "a\nb", `\`, "*", "~", "a;b", "ä", "-c", "#x",
		"a=b@c%d+e,f:g",
	} {
		out, err := exec.Command("sh", "-c", "printf %s "+shellQuote(word)).Output()
		if err != nil || string(out) != word {
			t.Errorf("%s is read as %q, %v; want %q", shellQuote(word), out, err, word)
		}
	}
	if got := shellQuote("/etc/tunnel/cloud.toml"); strings.Contains(got, "'") {
		t.Errorf("a plain path gets quotes: %s", got)
	}
}

// A replica shows the certificate of init to edges and, as a client, to the other replicas. It is good for
// the host of the address and for each further name, which may be an address, and for no other.
func TestInitCertificate(t *testing.T) {
	dir := t.TempDir()
	cfg := newInit(dir)
	cfg.Address = "10.0.0.5:9000"
	cfg.Names = []string{"tunnel.example.com", "fd00::5", "10.0.0.5", "tunnel-cloud-peers"}
	if err := Init(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	ca, err := os.ReadFile(filepath.Join(dir, "ca.crt"))
	if err != nil || !roots.AppendCertsFromPEM(ca) {
		t.Fatal(err)
	}
	certs, err := readCertificates("cert", filepath.Join(dir, "cloud.crt"))
	if err != nil {
		t.Fatal(err)
	}
	leaf := certs[0]
	for _, usage := range []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth} {
		for name, want := range map[string]bool{
			"10.0.0.5": true, "tunnel.example.com": true, "fd00::5": true, "tunnel-cloud-peers": true,
			"10.0.0.6": false, "example.com": false,
		} {
			_, err := leaf.Verify(x509.VerifyOptions{Roots: roots, DNSName: name, KeyUsages: []x509.ExtKeyUsage{usage}})
			if (err == nil) != want {
				t.Errorf("%s, usage %v: %v", name, usage, err)
			}
		}
	}
	if len(leaf.IPAddresses) != 2 || len(leaf.DNSNames) != 2 {
		t.Errorf("the certificate is for %v and %q, want each once", leaf.IPAddresses, leaf.DNSNames)
	}
}
