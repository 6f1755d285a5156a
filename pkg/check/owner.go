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

// ofFolders checks whether the daemon may read its private files. The folder of a service belongs to the user of the
// service, who must be able to read the files. A folder of root does not tell the user: for a private file of root
// there, the user is the owner of the folder of another file. If all folders belong to root, ofFolders cannot tell.
func ofFolders(files []string, stat func(string) (fs.FileInfo, error)) Result {
	service, user := "", 0 // the first folder that is not root's, and its owner
	for _, file := range files {
		if dir, err := stat(filepath.Dir(file)); file != "" && err == nil && user == 0 {
			service = filepath.Dir(file)
			user, _, _ = auth.FileOwner(dir)
		}
	}
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
		if !ok || !ok2 || info.Mode().Perm()&0o077 != 0 {
			continue
		}
		switch {
		case want != 0 && is != want:
			bad = append(bad, fmt.Sprintf("%s is of user %d alone, and its folder of user %d", file, is, want))
			repair = append(repair, fmt.Sprintf("chown --reference=%s %s", folder, file))
		case want == 0 && is == 0 && user != 0:
			bad = append(bad, fmt.Sprintf("%s is of user 0 alone, and the folder %s of user %d", file, service, user))
			repair = append(repair, fmt.Sprintf("move %s to %s and write its new path into the configuration, "+
				"then chown --reference=%[2]s %[2]s/%[3]s", file, service, filepath.Base(file)))
		}
	}
	if bad != nil {
		return Warn("if the daemon runs as the owner of that folder: "+strings.Join(repair, "; "),
			"%s: the daemon may be unable to read what root can", strings.Join(bad, "; "))
	}
	return OK("no private file is kept from the owner of its folder")
}
