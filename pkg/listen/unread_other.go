//go:build !linux

package listen

import "net"

// unread returns false: only the Linux build asks the kernel for unread bytes.
func unread(net.Conn) bool { return false }
