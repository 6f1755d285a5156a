package takeover

import "syscall"

// sibling returns attributes that make a process a child of this process's parent.
func sibling() *syscall.SysProcAttr { return &syscall.SysProcAttr{Cloneflags: syscall.CLONE_PARENT} }
