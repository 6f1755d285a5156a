package tcp

import (
	"io"
	"net"
	"testing"
)

// A client that closes its side and then resets leaves nothing behind, though its
// target is silent and keeps its own side open: the door's Run can return.
func TestHalfCloseThenReset(t *testing.T) {
	ended, release := make(chan struct{}), make(chan struct{})
	addr := target(t, func(c *net.TCPConn) {
		io.Copy(io.Discard, c) // to the half-close
		close(ended)
		<-release // and says nothing
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
