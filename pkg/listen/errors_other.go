//go:build !linux

package listen

import "syscall"

// platformErrnos returns the per-connection accept errors that exist on Linux only: here none.
func platformErrnos() []syscall.Errno { return nil }
