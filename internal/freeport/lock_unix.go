//go:build unix

package freeport

import (
	"os"

	"golang.org/x/sys/unix"
)

// lock locks a file until it is closed. It fails if another open file has the lock.
func lock(file *os.File) error { return unix.Flock(int(file.Fd()), unix.LOCK_EX|unix.LOCK_NB) }
