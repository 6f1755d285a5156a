package setup

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/windows"
)

// lockFile is the name of a file that tryLock makes in a folder: Windows cannot lock a folder itself. Windows deletes
// the file when its last handle is closed.
const lockFile = ".tunnel-lock"

// tryLock locks a folder, or returns errLocked at once.
func tryLock(folder string) (*os.File, error) {
	path := filepath.Join(folder, lockFile)
	name, err := windows.UTF16PtrFromString(path)
	if err != nil {
		return nil, err
	}
	const share = 0 // no other process may open the file
	handle, err := windows.CreateFile(name, windows.GENERIC_WRITE, share, nil,
		windows.OPEN_ALWAYS, windows.FILE_FLAG_DELETE_ON_CLOSE, 0)
	if errors.Is(err, windows.ERROR_SHARING_VIOLATION) {
		return nil, errLocked
	}
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(handle), path), nil
}

// findHolder returns advice how to find the process that holds the lock.
func findHolder(folder string) string {
	return "see which has " + filepath.Join(folder, lockFile) + " open (Resource Monitor)"
}

// own does nothing: a new file inherits the access list of its folder.
func own(*os.File, fs.FileInfo) error { return nil }
