//go:build unix && !linux

package takeover

import "syscall"

// sibling returns nil: only Linux can make a process a child of this process's parent.
func sibling() *syscall.SysProcAttr { return nil }
