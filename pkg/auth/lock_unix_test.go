//go:build unix

package auth

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"testing"
)

// A folder that cannot be synced is no error. A folder that is not there is one.
func TestSyncFolder(t *testing.T) {
	dir := t.TempDir()
	if err := SyncFolder(dir); err != nil {
		t.Error(err)
	}
	if err := SyncFolder(filepath.Join(dir, "none")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no folder: %v", err)
	}
	if runtime.GOOS == "linux" {
		if err := SyncFolder("/proc/self"); err != nil { // fsync fails with EINVAL there
			t.Errorf("a folder that cannot be synced: %v", err)
		}
	}
	if err := os.Chmod(dir, 0o300); err != nil {
		t.Fatal(err)
	}
	if err := SyncFolder(dir); err != nil {
		t.Errorf("a folder that this user may not read: %v", err)
	}
}
