package check

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"tunnel.example/tunnel/pkg/auth"
)

// readable returns a check whether the daemon may read its private files. Only root needs the check: root may read
// every file, and the daemon is another user. A user who is not root has loaded these files already.
func readable(group string, files ...string) []Check {
	if os.Geteuid() != 0 {
		return nil
	}
	return []Check{{group, "private files", func(context.Context) Result { return ofFolders(files, os.Stat) }}}
}

// ofFolders checks whether private files belong to the owners of their folders. The folder of a service belongs to the
// user of the service, who must be able to read the files. If a folder belongs to root, ofFolders cannot tell the user.
func ofFolders(files []string, stat func(string) (fs.FileInfo, error)) Result {
	var bad, repair []string
	for _, file := range files {
		if file == "" {
			continue
		}
		folder := filepath.Dir(file)
		info, err := stat(file)
		dir, err2 := stat(folder)
		if err != nil || err2 != nil {
			continue // another check reports the file
		}
		is, _, ok := auth.FileOwner(info)
		want, _, ok2 := auth.FileOwner(dir)
		if ok && ok2 && want != 0 && is != want && info.Mode().Perm()&0o077 == 0 {
			bad = append(bad, fmt.Sprintf("%s is of user %d alone, and its folder of user %d", file, is, want))
			repair = append(repair, fmt.Sprintf("chown --reference=%s %s", folder, file))
		}
	}
	if bad != nil {
		return Warn("if the daemon runs as the owner of the folder: "+strings.Join(repair, "; "),
			"%s: the daemon may be unable to read what root can", strings.Join(bad, "; "))
	}
	return OK("no private file is kept from the owner of its folder")
}
