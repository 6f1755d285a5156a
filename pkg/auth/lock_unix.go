//go:build unix

package auth

import (
	"errors"
	"io/fs"
	"os"
	"syscall"
)

// tryLockFile locks a file until it is closed, or returns errLocked.
func tryLockFile(f *os.File) error {
	err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return errLocked
	}
	return err
}

// SyncFolder has the names in a folder written to the disk. A folder that its file system cannot sync, or that this
// user may not read, is no error: the file is in place, and only a power loss at this moment could take it away.
func SyncFolder(path string) error {
	dir, err := os.Open(path)
	if err == nil {
		defer dir.Close()
		err = dir.Sync()
	}
	// Shared folders of virtual machines, FUSE and SMB give these errors.
	if errors.Is(err, syscall.EINVAL) || errors.Is(err, errors.ErrUnsupported) || errors.Is(err, fs.ErrPermission) {
		return nil
	}
	return err
}
