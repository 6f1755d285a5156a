//go:build unix

package audit

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// A command that root runs follows no symbolic link that the cloud's user may have made, and does not wait for
// the reader of a FIFO. A cloud does not wait for a reader either.
func TestNoTrap(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	at := func(name string) string { return filepath.Join(folder, name) }
	must(t, os.WriteFile(at("victim"), nil, 0o600))
	must(t, os.Symlink(at("victim"), at("link")))
	must(t, syscall.Mkfifo(at("fifo"), 0o600))
	must(t, syscall.Mkfifo(at("fifo2"), 0o600))
	open, err := os.OpenFile(at("fifo2"), os.O_RDONLY|syscall.O_NONBLOCK, 0)
	must(t, err)
	defer open.Close()
	for name, want := range map[string]string{ // part of the error; "": none
		"link":   "a symbolic link is not followed",
		"fifo":   "start its reader first",
		"fifo2":  "is not a regular file",
		"none":   "no such file",
		"victim": "",
	} {
		o, _ := newOutput(t, Config{Path: at(name), Existing: true})
		if err := o.open(); (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", name, err, want)
		}
	}
	o, _ := newOutput(t, Config{Path: at("fifo")})
	if err := o.open(); err == nil || !strings.Contains(err.Error(), "start its reader first") {
		t.Errorf("a cloud with a FIFO: %v", err)
	}
}

// A file that others can read has a warning; one that a log collector's group reads has none.
func TestMode(t *testing.T) {
	t.Parallel()
	for mode, want := range map[os.FileMode]int{0o600: 0, 0o640: 0, 0o644: 1, 0o660: 1} {
		path := filepath.Join(t.TempDir(), "audit.json")
		must(t, os.WriteFile(path, nil, 0o600))
		must(t, os.Chmod(path, mode))
		o, text := newOutput(t, Config{Path: path})
		must(t, o.open())
		if n := len(text.Lines("level=WARN", "other users can read or change the audit file")); n != want {
			t.Errorf("%v: %d warnings", mode, n)
		}
	}
}
