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

// SyncFolder makes the kernel write the names in a folder to the disk. It returns no error if the file system cannot
// do so, or if this user may not read the folder: only a power loss at this moment could remove a new file there.
func SyncFolder(path string) error {
	dir, err := os.Open(path)
	if err == nil {
		defer dir.Close()
		err = dir.Sync()
	}
	// File systems that cannot sync a folder give these errors: SMB, FUSE, shared folders of virtual machines.
	if errors.Is(err, syscall.EINVAL) || errors.Is(err, errors.ErrUnsupported) || errors.Is(err, fs.ErrPermission) {
		return nil
	}
	return err
}
