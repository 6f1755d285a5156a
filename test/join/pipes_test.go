package join

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"
)

// TestPipes: the account of a daemon may replace its files by named pipes and by links to devices. Commands of root
// say so at once: they neither wait nor fill the memory.
func TestPipes(t *testing.T) {
	t.Parallel()
	s := newSite(t, "127.0.0.1")
	s.start()
	_, token := s.create("edge1")
	dir := filepath.Join(t.TempDir(), "edge")
	s.want(0, s.join(token, dir))
	quick := func(code int, run func() answer, texts ...string) {
		t.Helper()
		began := time.Now()
		s.want(code, run(), texts...)
		if took := time.Since(began); took > soon {
			t.Errorf("it took %s", took)
		}
	}
	pipe := func(path string) { // puts a named pipe in the place of a file
		t.Helper()
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Fatal(err)
		}
		if err := syscall.Mkfifo(path, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	cert := filepath.Join(dir, "node.pem")
	check := func() answer {
		return s.tunnel("", "check", "-c", filepath.Join(dir, "edge.toml"))
	}
	join := func() answer { return s.join(token, dir) }
	pipe(cert)
	quick(1, join, "FAIL  files: ", "node.pem is not a regular file")
	quick(1, check, "node.pem is not a regular file")
	if err := errors.Join(os.Remove(cert), os.Symlink("/dev/zero", cert)); err != nil {
		t.Fatal(err)
	}
	quick(1, join, "FAIL  files: ", "node.pem is not a regular file")
	if err := os.Remove(cert); err != nil {
		t.Fatal(err)
	}
	pipe(filepath.Join(dir, "cloud.json"))
	quick(0, join)

	list := func() answer { return s.tunnel("", "token", "list", "-c", s.path("cloud.toml")) }
	create := func() answer {
		return s.tunnel("", "token", "create", "-c", s.path("cloud.toml"), "--node", "edge2")
	}
	pipe(s.path("tokens.uses"))
	quick(1, list, "tokens.uses is not a regular file")
	if err := os.Remove(s.path("tokens.uses")); err != nil {
		t.Fatal(err)
	}
	pipe(s.path("forwards.toml"))
	configCheck := func() answer { return s.tunnel("", "config", "check", "-c", s.path("cloud.toml")) }
	quick(3, configCheck, "forwards.toml", "not a regular file")
	if err := os.Remove(s.path("forwards.toml")); err != nil {
		t.Fatal(err)
	}
	pipe(s.path("tokens"))
	quick(3, list, "tokens is not a regular file")
	// A link that leads to a pipe.
	pipe(s.path("pipe"))
	if err := errors.Join(os.Remove(s.path("tokens")), os.Symlink("pipe", s.path("tokens"))); err != nil {
		t.Fatal(err)
	}
	quick(3, create, "tokens is not a regular file")
}
