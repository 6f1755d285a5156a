//go:build unix

package setup

import (
	"errors"
	"io/fs"
	"os"
	"syscall"
)

// tryLock locks a folder, or returns errLocked at once.
func tryLock(folder string) (*os.File, error) {
	dir, err := os.Open(folder)
	if err != nil {
		return nil, err
	}
	err = syscall.Flock(int(dir.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if err == nil {
		return dir, nil
	}
	dir.Close()
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return nil, errLocked
	}
	return nil, err
}

// findHolder returns the command that shows which process holds the lock.
func findHolder(folder string) string { return "see which (fuser " + folder + ")" }

// own gives f the owner and the group of like.
func own(f *os.File, like fs.FileInfo) error {
	want, ok := like.Sys().(*syscall.Stat_t)
	if !ok {
		return nil
	}
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if is, ok := info.Sys().(*syscall.Stat_t); ok && is.Uid == want.Uid && is.Gid == want.Gid {
		return nil
	}
	return f.Chown(int(want.Uid), int(want.Gid))
}
