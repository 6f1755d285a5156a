//go:build !unix

package tunnel

import "syscall"

// ResetOnDeathControl does nothing: edges run on Unix only.
func ResetOnDeathControl(string, string, syscall.RawConn) error { return nil }
