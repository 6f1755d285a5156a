//go:build unix

package auth

import (
	"io/fs"
	"syscall"
)

// FileOwner returns the owner and the group of a file.
func FileOwner(info fs.FileInfo) (uid, gid int, ok bool) {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, 0, false
	}
	return int(st.Uid), int(st.Gid), true
}
