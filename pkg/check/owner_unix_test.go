//go:build unix

package check

import (
	"io/fs"
	"os"
	"syscall"
	"testing"
	"time"
)

// owned is a file of a user.
type owned struct {
	user uint32
	mode fs.FileMode
}

func (owned) Name() string        { return "" }
func (owned) Size() int64         { return 0 }
func (o owned) Mode() fs.FileMode { return o.mode }
func (owned) ModTime() time.Time  { return time.Time{} }
func (owned) IsDir() bool         { return false }
func (o owned) Sys() any          { return &syscall.Stat_t{Uid: o.user} }

// A private file of root in a folder of the daemon is worth a warning.
func TestPrivateFiles(t *testing.T) {
	files := map[string]owned{
		"/mine": {7, 0o700}, "/mine/own": {7, 0o600}, "/mine/group": {0, 0o640}, "/mine/root": {0, 0o600},
		"/root": {0, 0o755}, "/root/daemon": {7, 0o600}, "/root/proxy": {0, 0o600},
	}
	look := func(names ...string) Result {
		return ofFolders(names, func(name string) (fs.FileInfo, error) {
			if f, ok := files[name]; ok {
				return f, nil
			}
			return nil, os.ErrNotExist
		})
	}
	want(t, "fine", look("", "/mine/own", "/mine/group", "/root/daemon", "/mine/none"), StateOK, "no private file", "")
	want(t, "of root", look("/mine/own", "/mine/root"), StateWarn,
		"/mine/root is of user 0 alone, and its folder of user 7",
		"chown --reference=/mine /mine/root")
	want(t, "of root, in a folder of root", look("/root/proxy", "", "/mine/own"), StateWarn,
		"/root/proxy is of user 0 alone, and the folder /mine of user 7",
		"move /root/proxy to /mine and write its new path into the configuration, then chown --reference=/mine /mine/proxy")
	want(t, "root alone", look("/root/proxy", "/root/proxy"), StateOK, "no private file", "")
}
