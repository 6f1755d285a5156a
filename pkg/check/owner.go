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

// readable returns a check whether the daemon may read its private files: root, which runs the check, may read
// everything. It returns nothing for another user, who has read the files already.
func readable(group string, files ...string) []Check {
	if os.Geteuid() != 0 {
		return nil
	}
	return []Check{{group, "private files", func(context.Context) Result { return ofFolders(files, os.Stat) }}}
}

// ofFolders looks whether private files belong to the owners of their folders: the folder of a service belongs to the
// user of the service. A folder of root tells nothing.
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
			continue // the configuration has a line about it
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
