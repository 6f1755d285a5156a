//go:build unix

package tunnel

import "syscall"

// ResetOnDeathControl does what ResetOnDeath does, but already before connect(2). It is for net.Dialer.Control. The
// kernel then resets a connection also if the caller gives up the dial just as the dial succeeds, or if the process is
// killed before Splice begins. By default the kernel would close such a connection cleanly, and the target would see
// an empty connection. Before a clean end, Splice restores the default.
func ResetOnDeathControl(_, _ string, c syscall.RawConn) (err error) {
	cerr := c.Control(func(fd uintptr) {
		err = syscall.SetsockoptLinger(int(fd), syscall.SOL_SOCKET, syscall.SO_LINGER, &syscall.Linger{Onoff: 1})
	})
	if cerr != nil {
		return cerr
	}
	return err
}
