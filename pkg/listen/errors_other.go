//go:build !linux

package listen

import "syscall"

// more returns the errors of connections that only Linux has.
func more() []syscall.Errno { return nil }
