//go:build unix

package auth

import "syscall"

// resetOnDeath makes the kernel reset a connection that ends before somebody ends it on
// purpose: when this process is killed, or when the dial is given up just as it succeeds. By
// itself the kernel would end it cleanly, and the target would take it for an empty
// connection. It is called before connect(2). tunnel.Splice undoes it for clean ends.
func resetOnDeath(_, _ string, c syscall.RawConn) (err error) {
	cerr := c.Control(func(fd uintptr) {
		err = syscall.SetsockoptLinger(int(fd), syscall.SOL_SOCKET, syscall.SO_LINGER, &syscall.Linger{Onoff: 1})
	})
	if cerr != nil {
		return cerr
	}
	return err
}
