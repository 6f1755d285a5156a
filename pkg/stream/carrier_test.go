package stream

import (
	"context"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tunnel/pkg/tunnel"
)

// A conn over a far link may have more in flight.
func TestFarLink(t *testing.T) {
	for name, trip := range map[string]time.Duration{"near": time.Hour, "far": 1} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, func(cfg *ServerConfig) { cfg.farTrip = trip })
			targets := make(chan net.Conn, 1)
			r.join("edge1", func(context.Context, tunnel.Request) (net.Conn, error) {
				ours, theirs := net.Pipe() // which has no room of its own
				targets <- theirs
				return ours, nil
			})
			r.mustDial("edge1", "nowhere:1")
			target := <-targets
			defer target.Close()
			// What both ends of the stream hold besides is some chunks.
			window := int(far(name == "far").streamWindow())
			if n := room(t, target); n < window || n > window+(512<<10) {
				t.Errorf("%d bytes are taken that nobody reads, want %d and a little", n, window)
			}
		})
	}
}

// room returns how much can be written to a conn that nobody reads.
func room(t *testing.T, c net.Conn) (n int) {
	t.Helper()
	for chunk := blob(16 << 10); ; {
		c.SetWriteDeadline(time.Now().Add(time.Second))
		m, err := c.Write(chunk)
		n += m
		if err != nil {
			return n
		}
	}
}

// The kernel takes no more than it can soon send.
func TestCarrySetsUnsent(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	c, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if carry(c, farTrip) {
		t.Error("loopback is far")
	}
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var unsent int
	raw.Control(func(fd uintptr) { unsent, err = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT) })
	if err != nil || unsent != far(false).unsent() {
		t.Errorf("%d bytes may be unsent (%v), want %d", unsent, err, far(false).unsent())
	}
}
