package auth

import "io/fs"

// FileOwner reports that there is no owner id: a new file gets the access list of its folder.
func FileOwner(fs.FileInfo) (uid, gid int, ok bool) { return 0, 0, false }
