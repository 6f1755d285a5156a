//go:build unix

package audit

import "syscall"

// noFollow makes open(2) refuse a symbolic link.
const noFollow = syscall.O_NOFOLLOW
