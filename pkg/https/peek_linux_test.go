package https

import (
	"context"
	"net"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/listen"
)

// lateConn is a connection in a busy process: the first read comes after its deadline.
type lateConn struct {
	*net.TCPConn
	deadlines int
}

func (c *lateConn) SetReadDeadline(at time.Time) error {
	if c.deadlines++; c.deadlines == 1 {
		at = time.Unix(1, 0)
	}
	return c.TCPConn.SetReadDeadline(at)
}

// A ClientHello that has arrived is read, even if this process reads it after the deadline.
func TestPeekAfterItsDeadline(t *testing.T) {
	there, here := tcpPair(t)
	defer there.Close()
	defer here.Close()
	_, err := there.Write(testkit.ClientHello("edge1"))
	must(t, err)
	testkit.Eventually(t, "the ClientHello arrives", func() bool { return listen.Unread(here) })
	c := &clientConn{Conn: &lateConn{TCPConn: here}}
	spoke := 0
	h, err := c.peek(context.Background(), patience, func() { spoke++ })
	must(t, err)
	if h.ServerName != "edge1" || spoke != 1 {
		t.Errorf("name %q, heard %d times", h.ServerName, spoke)
	}
}
