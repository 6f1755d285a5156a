package setup

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// Modes do not depend on the umask: a cloud that runs as another user reads public files, and
// nobody else reads secret ones.
func TestInitIgnoresTheUmask(t *testing.T) {
	for _, umask := range []int{0, 0o077} {
		dir := filepath.Join(t.TempDir(), "parent", "cloud")
		before := syscall.Umask(umask)
		_, err := Init(dir, "tunnel.example.com:9000")
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
