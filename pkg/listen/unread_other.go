//go:build !linux

package listen

import "net"

// Unread returns false: only Linux can tell.
func Unread(net.Conn) bool { return false }
