package listen

import "syscall"

// more returns the errors of connections that only Linux has.
func more() []syscall.Errno { return []syscall.Errno{syscall.ENONET} }
