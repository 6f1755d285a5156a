//go:build unix

package dial

import (
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// A named pipe in the place of the file with the proxy's URL is an error, and does not stop the edge.
func TestProxyFileIsAPipe(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "proxy")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		_, err := FromFile(pipe, "proxyfile")(Server{})
		done <- err
	}()
	select {
	case err := <-done:
		if err == nil || !strings.Contains(err.Error(), "not a regular file") {
			t.Errorf("a named pipe: %v", err)
		}
	case <-time.After(10 * time.Second):
		t.Error("it waits for a writer")
	}
}
