package stream

import (
	"context"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tunnel.example/tunnel/pkg/tunnel"
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
			window := int(far(name == "far").sizes().streamWindow)
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
	chunk := blob(16 << 10)
	for stalled := 0; stalled < 2; { // twice, since this process may be paused
		c.SetWriteDeadline(time.Now().Add(2 * time.Second))
		m, err := c.Write(chunk)
		n += m
		if stalled++; err == nil || m > 0 {
			stalled = 0
		}
	}
	return n
}

// tcpPair returns both ends of a TCP connection.
func tcpPair(t *testing.T) (a, b *net.TCPConn) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	dialled, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dialled.Close() })
	accepted, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { accepted.Close() })
	return dialled.(*net.TCPConn), accepted.(*net.TCPConn)
}

// wantUnsent wants the kernel to have been told how much it may take.
func wantUnsent(t *testing.T, c *carrier, want int) {
	t.Helper()
	var got int
	var err error
	cerr := c.raw.Control(func(fd uintptr) { got, err = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT) })
	if err = errors.Join(err, cerr); err != nil || got != want {
		t.Errorf("%d bytes may be unsent (%v), want %d", got, err, want)
	}
}

// A link is near or far by its handshake; one that only seemed far is near from the first
// time that its rate is asked for.
func TestCarry(t *testing.T) {
	raw, _ := tcpPair(t)
	c, isFar := carry(raw, time.Hour, nil)
	if isFar {
		t.Error("a link of less than an hour is far")
	}
	wantUnsent(t, c, far(false).sizes().unsent)

	raw, _ = tcpPair(t)
	c, isFar = carry(raw, 1, nil)
	if !isFar {
		t.Error("a link of more than a nanosecond is near")
	}
	seemed := c
	wantUnsent(t, seemed, far(true).sizes().unsent)
	seemed.trip, seemed.isThin = time.Hour, true
	if _, err := seemed.Write([]byte("a ping")); err != nil {
		t.Fatal(err)
	}
	if !seemed.sampled.IsZero() {
		t.Error("the kernel is asked about the link for a ping")
	}
	if _, err := seemed.Write(blob(leastUnsent + 1)); err != nil {
		t.Fatal(err)
	}
	if bool(seemed.far) || seemed.isThin {
		t.Error("it stays far")
	}
	wantUnsent(t, seemed, far(false).sizes().unsent)
}

// The bound of the kernel's intervals does not shorten how long it tries: a user timeout takes the place of
// net.ipv4.tcp_retries2.
func TestKernelTriesLongEnough(t *testing.T) {
	raw, _ := tcpPair(t)
	c, _ := carry(raw, time.Hour, nil)
	want := func(whose string, want time.Duration) {
		t.Helper()
		var ms int
		var err error
		cerr := c.raw.Control(func(fd uintptr) {
			ms, err = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT)
		})
		if err := errors.Join(err, cerr); err != nil {
			t.Fatal(err)
		}
		if ms != int(want.Milliseconds()) {
			t.Errorf("%s connection has a user timeout of %d ms, want %v", whose, ms, want)
		}
	}
	want("a session's", keepaliveTotal)
	c.alone()
	want("a data", dataTimeout)
	if dataTimeout <= max(lostAfter, multipathLost, lostOverNarrow) {
		t.Error("the kernel gives up before the session does")
	}
}

// On a thin link the kernel is given nothing while it has enough, and what is written
// arrives whole.
func TestCarrierWrite(t *testing.T) {
	raw, peer := tcpPair(t)
	c, _ := carry(raw, 1, nil)
	c.sampled, c.isThin = time.Now().Add(time.Hour), true

	// Nobody reads: in the end a write waits, though the kernel's buffer has room.
	sent := room(t, c)
	var unsent int
	var err error
	c.raw.Control(func(fd uintptr) { unsent, err = unix.IoctlGetInt(int(fd), unix.SIOCOUTQNSD) })
	if err != nil || unsent > far(true).sizes().unsent+(16<<10) {
		t.Errorf("the kernel holds %d bytes that it cannot send (%v)", unsent, err)
	}
	c.SetWriteDeadline(time.Time{})
	written := make(chan error, 1)
	go func() {
		_, err := c.Write(blob(1 << 20)) // waits until there is room again
		raw.CloseWrite()
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
