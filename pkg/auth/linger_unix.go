//go:build unix

package auth

import "syscall"

// resetOnDeath makes the kernel reset a connection that nobody closes on purpose. That happens when
// this process is killed, or when the caller gives up a dial at the moment of its success. By
// default the kernel would close such a connection cleanly, and the target would see an empty
// connection. It runs before connect(2), as net.Dialer.Control. For clean ends tunnel.Splice
// undoes it.
func resetOnDeath(_, _ string, c syscall.RawConn) (err error) {
	cerr := c.Control(func(fd uintptr) {
		err = syscall.SetsockoptLinger(int(fd), syscall.SOL_SOCKET, syscall.SO_LINGER, &syscall.Linger{Onoff: 1})
	})
	if cerr != nil {
		return cerr
	}
	return err
}
