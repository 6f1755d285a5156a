//go:build !linux

package listen

import "net"

// Unread returns false: it can tell on Linux only.
func Unread(net.Conn) bool { return false }
