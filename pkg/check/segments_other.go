//go:build !linux

package check

import (
	"errors"
	"net"
	"syscall"
)

// canShorten says that shorten works on this system.
const canShorten = false

func shorten(_, _ string, _ syscall.RawConn) error { return errors.ErrUnsupported }

// pathMTU returns ok = false: only the Linux build asks the kernel for the MTU.
func pathMTU(net.Conn) (mtu, segment int, ok bool) { return 0, 0, false }
