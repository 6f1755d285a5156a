package setup

import (
	"encoding/base64"
	"fmt"
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

// The commands for a Secret change nothing if the Secret cannot be read, or has changed meanwhile.
func TestChangeOfASecret(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "tokens")
	const content = "edge1:revoked\nedge2:x\n"
	if err := os.WriteFile(filepath.Join(dir, "real"), []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("real", path); err != nil {
		t.Fatal(err)
	}
	change, err := tokenFile{path: path}.edit(func(content string) (string, error) {
		return content + "edge3:revoked\n", nil
	})
	if err != nil {
		t.Fatal(err)
	}
	text := change.kubectl()
	command := text[strings.Index(text, "  NS="):strings.Index(text, "\n\nEach pod")]
	run := func(get string) (patched string) {
		t.Helper()
		kubectl := "#!/bin/sh\ncase \"$*\" in *' get '*) " + get + " ;; *) cat >" + dir + "/patched ;; esac\n"
		if err := os.WriteFile(filepath.Join(dir, "kubectl"), []byte(kubectl), 0o700); err != nil {
			t.Fatal(err)
		}
		os.Remove(filepath.Join(dir, "patched"))
		sh := exec.Command("sh", "-c", command)
		sh.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"))
		out, err := sh.CombinedOutput()
		t.Logf("%s %v", out, err)
		b, _ := os.ReadFile(filepath.Join(dir, "patched"))
		return string(b)
	}
	if got := run("exit 1"); got != "" {
		t.Errorf("the Secret cannot be read, and is changed to %s", got)
	}
	want := fmt.Sprintf(`{"metadata":{"resourceVersion":"42"},"data":{"tokens":"%s"}}`,
		base64.StdEncoding.EncodeToString([]byte(content+"\nedge3:revoked\n")))
	for _, more := range []string{"", "edge3:old\n"} { // what a revoked node has in the Secret goes, too
		if got := run("echo 42 " + base64.StdEncoding.EncodeToString([]byte(content+more))); got != want {
			t.Errorf("the patch is %s, want %s", got, want)
		}
	}
}

// A token file that no cloud would read is not written.
func TestTokenFileTooLarge(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tokens")
	if err := os.WriteFile(path, []byte("edge1:x\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := tokenFile{path: path}.edit(func(content string) (string, error) {
		return content + strings.Repeat("#", auth.MaxTokenFile), nil
	})
	if b, _ := os.ReadFile(path); err == nil || string(b) != "edge1:x\n" {
		t.Errorf("%v; the file has %d bytes", err, len(b))
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
