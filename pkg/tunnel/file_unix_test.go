//go:build unix

package tunnel

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// ReadFile reads a regular file, also behind a link. For anything else it fails at once.
func TestReadFile(t *testing.T) {
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	err := errors.Join(
		os.WriteFile(path("file"), []byte("12345"), 0o600), os.WriteFile(path("empty"), nil, 0o600),
		os.Symlink("file", path("link")), syscall.Mkfifo(path("pipe"), 0o600), os.Symlink("pipe", path("to a pipe")),
		os.Symlink("/dev/zero", path("to zeros")), os.Symlink("nothing", path("to nothing")),
	)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"file": "", "link": "", "empty": "", "pipe": "not a regular file", "to a pipe": "not a regular file",
		"to zeros": "not a regular file", ".": "not a regular file", "to nothing": "no such file",
	} {
		done := make(chan struct{})
		go func() {
			defer close(done)
			content, info, err := ReadFile(path(name), 5)
			switch {
			case want == "" && (err != nil || info == nil || int64(len(content)) != info.Size()):
				t.Errorf("%s: %q, %v, %v", name, content, info, err)
			case want != "" && (err == nil || !strings.Contains(err.Error(), want)):
				t.Errorf("%s: %v, want %q", name, err, want)
			}
		}()
		select {
		case <-done:
		case <-time.After(10 * time.Second):
			t.Fatalf("%s: ReadFile waits", name)
		}
	}
	if _, _, err = ReadFile(path("file"), 4); err == nil || !strings.Contains(err.Error(), "longer than 4 bytes") {
		t.Errorf("a file that is too long: %v", err)
	}
	if _, _, err = ReadFile(path("none"), 5); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
}
