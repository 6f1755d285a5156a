//go:build unix

package audit

import "syscall"

// noFollow is the flag of an open that refuses a symbolic link.
const noFollow = syscall.O_NOFOLLOW
