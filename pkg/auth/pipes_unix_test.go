//go:build unix

package auth

import (
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// The account of a daemon owns files that commands of root read. A named pipe in the place of such a file is an error,
// and does not stop the command.
func TestPipes(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "tokens.uses")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, read := range map[string]func() error{
		"cloud.json":  func() error { _, err := readTold(pipe); return err },
		"tokens.uses": func() error { _, err := ReadUses(pipe[:len(pipe)-len(usesSuffix)]); return err },
		"a CA":        func() error { _, err := ReadCA(pipe, pipe); return err },
	} {
		done := make(chan error, 1)
		go func() { done <- read() }()
		select {
		case err := <-done:
			if err == nil {
				t.Errorf("%s: a named pipe was read", name)
			}
		case <-time.After(10 * time.Second):
			t.Errorf("%s: it waits for a writer", name)
		}
	}
}
