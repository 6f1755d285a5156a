//go:build !linux

package listen

import "net"

// Unread returns false: only the Linux build asks the kernel for unread bytes.
func Unread(net.Conn) bool { return false }
