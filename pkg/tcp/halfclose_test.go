package tcp

import (
	"io"
	"net"
	"testing"
)

// A client half-closes and then resets, while its target sends nothing and keeps its own side open.
// The conn ends all the same, and Run can return.
func TestHalfCloseThenReset(t *testing.T) {
	ended, release := make(chan struct{}), make(chan struct{})
	addr := target(t, func(c *net.TCPConn) {
		io.Copy(io.Discard, c) // returns at the half-close
		close(ended)
		<-release // sends nothing and keeps its side open
	})
	defer close(release)
	r := run(t, Listener{Target: addr}, new(tunnelDouble))
	c := r.connect()
	c.CloseWrite()
	<-ended
	c.SetLinger(0)
	c.Close()
	r.stop()
	if err := r.wait(); err != nil {
		t.Error(err)
	}
}
