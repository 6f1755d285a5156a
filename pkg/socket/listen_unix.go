//go:build unix

package socket

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"
)

const (
	// ownMode lets only our own user connect, groupMode also the socket's group. The file has this
	// mode from the moment it appears.
	ownMode   = 0o600
	groupMode = 0o660
	// maxPath is the longest path, in bytes: sun_path of unix(7) has 108 and ends with a zero byte.
	maxPath = 107
	// answerTimeout bounds the dial that finds out whether a live process owns the socket.
	answerTimeout = time.Second
	// lockTimeout is how long other processes that are about to listen in the same folder may hold
	// its lock; lockInterval is how often we try to get it.
	lockTimeout  = 5 * time.Second
	lockInterval = 10 * time.Millisecond
)

func listenOwn(ctx context.Context, path string) (net.Listener, error) {
	return open(ctx, path, ownMode)
}

func listenGroup(ctx context.Context, path string) (net.Listener, error) {
	dir, err := os.Stat(filepath.Dir(path))
	if err == nil && dir.Mode()&fs.ModeSetgid != 0 && dir.Mode().Perm()&0o022 == 0 {
		return open(ctx, path, groupMode)
	}
	return open(ctx, path, ownMode)
}

func open(ctx context.Context, path string, mode fs.FileMode) (net.Listener, error) {
	if len(path) > maxPath {
		return nil, fmt.Errorf("%s: the path has %d bytes, and a socket's may have %d: choose a shorter one",
			path, len(path), maxPath)
	}
	unlock, err := lock(ctx, filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err = removeStale(ctx, path); err != nil {
		return nil, err
	}
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		// On bind the file gets the permissions of the socket (unix(7)), so there is no moment in
		// which others could connect. Where the kernel ignores them, the Chmod below follows a
		// moment later.
		return c.Control(func(fd uintptr) { syscall.Fchmod(int(fd), uint32(mode)) }) //nolint:errcheck // the Chmod repeats it
	}}
	ln, err := lc.Listen(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("%w; may this user write to %s?", err, filepath.Dir(path))
	}
	if err := os.Chmod(path, mode); err != nil {
		ln.Close()
		return nil, err
	}
	return ln, nil
}

// lock makes other processes that are about to listen in the same folder wait. Otherwise one could
// remove the socket that another has just created. Every user who may read the folder can hold the
// lock, so lock waits for lockTimeout at most.
func lock(ctx context.Context, dir string) (unlock func(), err error) {
	d, err := os.Open(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w; create the folder, for the user that this runs as: install -d -m 0700 -o USER %s",
			err, dir)
	}
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, lockTimeout)
	defer cancel()
	for {
		err := syscall.Flock(int(d.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return func() { d.Close() }, nil
		}
		if errors.Is(err, syscall.EWOULDBLOCK) {
			select {
			case <-time.After(lockInterval):
				continue
			case <-ctx.Done():
				err = errors.New("another process holds the lock (fuser shows which)")
			}
		}
		d.Close()
		return nil, fmt.Errorf("locking %s: %w", dir, err)
	}
}

// removeStale removes the socket of a dead process. A live process, or a file that is no socket, is an
// error.
func removeStale(ctx context.Context, path string) error {
	info, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case info.Mode().Type() != fs.ModeSocket:
		return fmt.Errorf("%s exists and is not a socket: remove it, or choose another path", path)
	}
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	c, err := new(net.Dialer).DialContext(ctx, "unix", path)
	if err == nil {
		c.Close()
	}
	if !errors.Is(err, syscall.ECONNREFUSED) { // connection refused: no process has the socket open
		return fmt.Errorf("%s belongs to another process that runs: stop that one, or choose another path", path)
	}
	return os.Remove(path)
}
