package stream

import (
	"context"
	"io"
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
			c := r.mustDial("edge1", "nowhere:1")
			target := <-targets
			defer target.Close()
			// What both ends of the stream hold besides is some chunks.
			window := int(far(name == "far").streamWindow())
			for direction, end := range map[string]net.Conn{"down": target, "up": c} {
				if n := room(t, end); n < window || n > window+(512<<10) {
					t.Errorf("%s: %d bytes are taken that nobody reads, want %d and a little", direction, n, window)
				}
			}
		})
	}
}

// room returns how much can be written to a conn that nobody reads.
func room(t *testing.T, c net.Conn) (n int) {
	t.Helper()
	for chunk := blob(16 << 10); ; {
		c.SetWriteDeadline(time.Now().Add(3 * time.Second))
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
	if _, isFar := carry(c, time.Hour); isFar {
		t.Error("a link of less than an hour is far")
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

// On a thin link the kernel is given nothing while it has enough, and what is written
// arrives whole.
func TestCarrierWrite(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	raw, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	peer, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer peer.Close()
	conn, is := carry(raw, 1)
	c, ok := conn.(*carrier)
	if !ok || !bool(is) {
		t.Fatalf("%T, far: %t", conn, is)
	}
	c.asked, c.isThin = time.Now().Add(time.Hour), true

	// Nobody reads: in the end a write waits, though the kernel's buffer has room.
	sent := room(t, c)
	unsent := func() (n int) {
		c.raw.Control(func(fd uintptr) { n, err = unix.IoctlGetInt(int(fd), unix.SIOCOUTQNSD) })
		return n
	}
	if n := unsent(); err != nil || n > far(true).unsent()+(16<<10) {
		t.Errorf("the kernel holds %d bytes that it cannot send (%v)", n, err)
	}
	c.SetWriteDeadline(time.Time{})
	written := make(chan error, 1)
	go func() {
		_, err := c.Write(blob(1 << 20)) // waits until there is room again
		c.CloseWrite()
		written <- err
	}()
	got, err := io.Copy(io.Discard, peer)
	if err != nil || got != int64(sent)+(1<<20) {
		t.Errorf("%d bytes arrive (%v), want %d", got, err, sent+(1<<20))
	}
	if err := <-written; err != nil {
		t.Error(err)
	}
}
