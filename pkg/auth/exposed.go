package auth

import (
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"runtime"
	"slices"
)

// Exposed reports whether other users than the owner can use a file that holds a secret. A file that
// root shares with a group of this process is not exposed: root owns the file, the group may only read
// it, and others may do nothing.
//
// The files of a Secret volume look like this if the pod has an fsGroup. The kubelet writes the files
// as root, gives them to the fsGroup and adds 0440 to their mode (changeFilePermission in
// pkg/volume/volume_linux.go of Kubernetes). The container's process is in the fsGroup. Without the
// group's right, a process that is not root could not read the files at all.
func Exposed(info fs.FileInfo) bool {
	groups, err := os.Getgroups()
	if err != nil {
		groups = nil // files that root shares with a group then count as exposed: at worst one needless warning
	}
	return exposed(info, append(groups, os.Getegid()))
}

// exposed is Exposed for a process in groups.
func exposed(info fs.FileInfo, groups []int) bool {
	const (
		groupAndOthers fs.FileMode = 0o077
		groupReads     fs.FileMode = 0o040
	)
	if runtime.GOOS == "windows" { // access lists decide there, and Go's mode bits say nothing
		return false
	}
	switch info.Mode().Perm() & groupAndOthers {
	case 0:
		return false
	case groupReads:
		uid, gid, ok := FileOwner(info)
		// Group 0 is never an fsGroup, and other users may be in it.
		return !ok || uid != 0 || gid == 0 || !slices.Contains(groups, gid)
	default:
		return true
	}
}

// warnIfExposed warns if other users can read a secret file.
func warnIfExposed(path string, st fs.FileInfo, log *slog.Logger) {
	if Exposed(st) {
		log.Warn(fmt.Sprintf("%s can be read by others (mode %04o); chmod 600 it", path, st.Mode().Perm()))
	}
}
