package auth

import "io/fs"

// fileOwner knows no owner: a new file gets the access list of its folder.
func fileOwner(fs.FileInfo) (uid, gid int, ok bool) { return 0, 0, false }
