//go:build !linux

package tunnel

import (
	"net"
	"syscall"
)

// rawConn returns nil: only the Linux build looks at a socket while other goroutines read and
// write it. Elsewhere Splice learns of a reset from reads and writes alone.
func rawConn(net.Conn) syscall.RawConn { return nil }

func unacked(uintptr) int { return -1 }

func hungUp(uintptr) bool { return false }

func pollHangUp(syscall.RawConn) (over, failed bool) { return false, false }

func pendingError(syscall.RawConn) error { return nil }
