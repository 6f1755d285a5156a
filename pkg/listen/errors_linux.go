package listen

import "syscall"

// platformErrnos returns those errors of isOfConn that exist only on Linux.
func platformErrnos() []syscall.Errno { return []syscall.Errno{syscall.ENONET} }
