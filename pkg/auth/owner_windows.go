package auth

import "io/fs"

// fileOwner reports that there is no owner id: a new file gets the access list of its folder.
func fileOwner(fs.FileInfo) (uid, gid int, ok bool) { return 0, 0, false }
