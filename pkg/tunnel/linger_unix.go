//go:build unix

package tunnel

import "syscall"

// ResetOnDeathControl is ResetOnDeath before connect(2), for net.Dialer.Control. The kernel then also resets the
// connection of a dial that the caller gives up at the moment of its success, and one whose process is killed before
// Splice. By default the kernel would close such a connection cleanly, and the target would see an empty connection.
// For clean ends, Splice undoes it.
func ResetOnDeathControl(_, _ string, c syscall.RawConn) (err error) {
	cerr := c.Control(func(fd uintptr) {
		err = syscall.SetsockoptLinger(int(fd), syscall.SOL_SOCKET, syscall.SO_LINGER, &syscall.Linger{Onoff: 1})
	})
	if cerr != nil {
		return cerr
	}
	return err
}
