package listen

import "syscall"

// platformErrnos returns the per-connection accept errors that exist on Linux only.
func platformErrnos() []syscall.Errno { return []syscall.Errno{syscall.ENONET} }
