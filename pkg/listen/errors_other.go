//go:build !linux

package listen

import "syscall"

// platformErrnos returns nothing: its errors exist only on Linux.
func platformErrnos() []syscall.Errno { return nil }
