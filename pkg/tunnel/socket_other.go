//go:build !linux

package tunnel

import (
	"net"
	"syscall"
)

// rawConn returns nil: only the Linux build inspects a socket while other goroutines read and
// write it. On other systems Splice learns of a reset from reads and writes alone. The functions
// below are never called there, since they need a rawConn.
func rawConn(net.Conn) syscall.RawConn { return nil }

func unacked(uintptr) int { return -1 }

func inFlight(uintptr) bool { return false }

func hungUp(uintptr) bool { return false }

func pollHangUp(syscall.RawConn) (over, failed bool) { return false, false }

func pendingError(syscall.RawConn) error { return nil }
