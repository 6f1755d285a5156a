//go:build unix

package auth

import (
	"io/fs"
	"syscall"
	"testing"
	"time"
)

// ownedFile is a file with a mode, an owner and a group.
type ownedFile struct {
	mode     fs.FileMode
	uid, gid uint32
}

func (ownedFile) Name() string        { return "tls.key" }
func (ownedFile) Size() int64         { return 0 }
func (f ownedFile) Mode() fs.FileMode { return f.mode }
func (ownedFile) ModTime() time.Time  { return time.Time{} }
func (ownedFile) IsDir() bool         { return false }
func (f ownedFile) Sys() any          { return &syscall.Stat_t{Uid: f.uid, Gid: f.gid} }

// The process is in the groups 65532 and 7. Files of root that group 65532 may only read are those of a
// Secret volume with fsGroup 65532.
func TestExposed(t *testing.T) {
	groups := []int{7, 65532}
	for name, tt := range map[string]struct {
		file ownedFile
		want bool
	}{
		"the owner alone":                  {ownedFile{0o600, 1000, 1000}, false},
		"the owner alone reads":            {ownedFile{0o400, 0, 65532}, false},
		"Secret volume, defaultMode 0440":  {ownedFile{0o440, 0, 65532}, false},
		"Secret volume, defaultMode 0600":  {ownedFile{0o640, 0, 65532}, false},
		"Secret volume, defaultMode 0644":  {ownedFile{0o644, 0, 65532}, true},
		"another group of the process":     {ownedFile{0o440, 0, 7}, false},
		"a group without the process":      {ownedFile{0o440, 0, 8}, true},
		"root's own group":                 {ownedFile{0o440, 0, 0}, true},
		"the owner is not root":            {ownedFile{0o440, 1000, 65532}, true},
		"the group writes":                 {ownedFile{0o460, 0, 65532}, true},
		"the group writes and cannot read": {ownedFile{0o620, 0, 65532}, true},
		"the group executes":               {ownedFile{0o550, 0, 65532}, true},
		"others read":                      {ownedFile{0o604, 0, 65532}, true},
	} {
		if got := exposed(tt.file, append([]int{0}, groups...)); got != tt.want {
			t.Errorf("%s: exposed: %t, want %t", name, got, tt.want)
		}
	}
}
