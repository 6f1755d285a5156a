package setup

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"tunnel.example/tunnel/pkg/auth"
)

// A printed change shows no token, and the printed command makes the change in a Secret.
func TestChangeShowsNoToken(t *testing.T) {
	hashed := "edge1:" + auth.Secret("h").Hashed()
	content := "# c\nedge1:c4n4ry\n edge1 : c4n4ry'2 expires=2999-01-01T00:00:00Z\n" + hashed + "\nedge10:x\nedge1.a:y\n"
	dir := t.TempDir()
	path := filepath.Join(dir, "tokens")
	if err := os.WriteFile(filepath.Join(dir, "real"), []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("real", path); err != nil {
		t.Fatal(err)
	}
	change, err := tokenFile{path: path}.edit(func(content string) (string, error) {
		return auth.RevokeNode(content, "edge1")
	})
	if err != nil || change.failed == nil || len(change.removed) != 3 {
		t.Fatal(change, err)
	}
	var shown strings.Builder
	change.show(&shown)
	command := change.kubectl()
	if text := shown.String() + command; strings.Contains(text, "c4n4ry") {
		t.Errorf("it shows a token:\n%s", text)
	}
	if !strings.Contains(shown.String(), "remove  "+hashed) || !strings.Contains(shown.String(), "remove  edge1:***") {
		t.Errorf("it shows\n%s", &shown)
	}
	_, filter, _ := strings.Cut(command, "base64 -d |")
	filter, _, _ = strings.Cut(filter, "; echo")
	sh := exec.Command("sh", "-c", filter)
	sh.Stdin = strings.NewReader(content)
	if left, err := sh.Output(); err != nil || string(left) != "# c\nedge10:x\nedge1.a:y\n" {
		t.Errorf("%s leaves %q, %v", filter, left, err)
	}
}

// A process that holds the folder's lock for ever delays others for a limited time only.
func TestLocked(t *testing.T) {
	path := t.TempDir()
	first, err := lock(path, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := lock(path, 50*time.Millisecond); err == nil || !strings.Contains(err.Error(), "fuser "+path) {
		t.Error(err)
	}
	first.Close()
	second, err := lock(path, 0)
	if err != nil {
		t.Fatal(err)
	}
	second.Close()
}
