package socket

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// at returns a path in a new folder. t.TempDir's path is too long for a socket.
func at(t *testing.T, name string) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "sock")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return filepath.Join(dir, name)
}

func listen(t *testing.T, path string) net.Listener {
	t.Helper()
	ln, err := Listen(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	return ln
}

// Listen gives up when another process holds the folder's lock for ever.
func TestLocked(t *testing.T) {
	path := at(t, "s")
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	if err := syscall.Flock(int(dir.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if ln, err := Listen(ctx, path); err == nil {
		ln.Close()
		t.Error("it listens")
	} else if !strings.Contains(err.Error(), "holds the lock") {
		t.Error(err)
	}
}

func TestPermissions(t *testing.T) {
	old := syscall.Umask(0) // as set by a careless operator
	defer syscall.Umask(old)
	path := at(t, "s")
	ln := listen(t, path)
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode() != fs.ModeSocket|ownMode {
		t.Errorf("the socket is %v", info.Mode())
	}
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	ln.Close()
	if _, err := os.Lstat(path); !os.IsNotExist(err) {
		t.Errorf("the socket is left behind: %v", err)
	}
}

// The group of a setgid folder may connect, unless others than the owner may write to the folder.
func TestGroup(t *testing.T) {
	old := syscall.Umask(0)
	defer syscall.Umask(old)
	for name, tc := range map[string]struct {
		folder fs.FileMode
		listen func(context.Context, string) (net.Listener, error)
		want   fs.FileMode
	}{
		"a folder like any other":  {0o770, ListenGroup, ownMode},
		"setgid":                   {fs.ModeSetgid | 0o750, ListenGroup, groupMode},
		"setgid, others may write": {fs.ModeSetgid | 0o777, ListenGroup, ownMode},
		"setgid, group may write":  {fs.ModeSetgid | 0o770, ListenGroup, ownMode},
		"setgid, not asked for":    {fs.ModeSetgid | 0o750, Listen, ownMode},
	} {
		path := at(t, "s")
		group := os.Getegid()
		if os.Geteuid() == 0 { // only root may give the folder to another group
			group = 12345
		}
		dir := filepath.Dir(path)
		if err := errors.Join(os.Chown(dir, -1, group), os.Chmod(dir, tc.folder)); err != nil {
			t.Fatal(err)
		}
		ln, err := tc.listen(t.Context(), path)
		if err != nil {
			t.Fatal(err)
		}
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		gid := int(info.Sys().(*syscall.Stat_t).Gid)
		if info.Mode() != fs.ModeSocket|tc.want || tc.want == groupMode && gid != group {
			t.Errorf("%s: the socket is %v, of group %d", name, info.Mode(), gid)
		}
		ln.Close()
	}
}

// The file has its permissions when it appears, and not only after the Chmod.
func TestNoMomentForOthers(t *testing.T) {
	old := syscall.Umask(0)
	defer syscall.Umask(old)
	path := at(t, "s")
	var wide atomic.Int64
	done := make(chan struct{})
	var watching sync.WaitGroup
	watching.Go(func() {
		for {
			select {
			case <-done:
				return
			default:
			}
			if info, err := os.Lstat(path); err == nil && info.Mode().Perm() != ownMode {
				wide.Add(1)
			}
		}
	})
	for range 300 {
		ln, err := Listen(t.Context(), path)
		if err != nil {
			t.Fatal(err)
		}
		ln.Close()
	}
	close(done)
	watching.Wait()
	if n := wide.Load(); n != 0 {
		t.Errorf("others could have connected: seen %d times", n)
	}
}

func TestStale(t *testing.T) {
	path := at(t, "s")
	dead, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	dead.(*net.UnixListener).SetUnlinkOnClose(false) // as if the process were killed
	dead.Close()
	listen(t, path)
}

func TestRefused(t *testing.T) {
	path := at(t, "s")
	live := listen(t, path)
	file := at(t, "s")
	if err := os.WriteFile(file, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	link := at(t, "s")
	if err := os.Symlink(path, link); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct{ path, says string }{
		"a living process":           {path, "belongs to another process"},
		"a file":                     {file, "not a socket"},
		"a link, even to a socket":   {link, "not a socket"},
		"no folder":                  {filepath.Join(filepath.Dir(path), "no", "s"), "create the folder"},
		"a path too long to be true": {"/" + strings.Repeat("x", 107), "choose a shorter one"},
	} {
		if ln, err := Listen(t.Context(), c.path); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, %v; want %q", name, ln, err, c.says)
		}
	}
	if b, err := os.ReadFile(file); err != nil || string(b) != "mine" {
		t.Error("the file was touched")
	}
	if c, err := live.Accept(); err != nil { // the connection by which Listen checked whether the socket is in use
		t.Error(err)
	} else {
		c.Close()
	}
}

// Of several processes that start at once, exactly one listens.
func TestRace(t *testing.T) {
	path := at(t, "s")
	var won atomic.Int64
	var starting sync.WaitGroup
	for range 8 {
		starting.Go(func() {
			ln, err := Listen(t.Context(), path)
			if err == nil {
				won.Add(1)
				t.Cleanup(func() { ln.Close() })
			}
		})
	}
	starting.Wait()
	if won.Load() != 1 {
		t.Errorf("%d of 8 listen", won.Load())
	}
}
