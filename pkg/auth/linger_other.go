//go:build !unix

package auth

import "syscall"

// resetOnDeath does nothing: edges run on Unix only.
func resetOnDeath(string, string, syscall.RawConn) error { return nil }
