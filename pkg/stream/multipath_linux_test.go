package stream

import (
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/tunnel"
)

// dialMultipath connects with Multipath TCP. It skips the test if the kernel has none.
func dialMultipath(t *testing.T, addr string) *net.TCPConn {
	t.Helper()
	dialer := new(net.Dialer)
	dialer.SetMultipathTCP(true)
	c, err := dialer.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	tcp := c.(*net.TCPConn)
	raw, err := tcp.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	is := false
	raw.Control(func(fd uintptr) { is = isMultipath(fd) })
	if !is {
		t.Skip("this kernel has no Multipath TCP")
	}
	return tcp
}

// What a session asks of a socket works with Multipath TCP: for each path, not only for the first.
func TestMultipathConnection(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	out := dialMultipath(t, ln.Addr().String())
	in, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	control, err := NewCongestion("reno", new(tunnel.Counters), (&journal{}).logger())
	if err != nil {
		t.Fatal(err)
	}
	for end, raw := range map[string]*net.TCPConn{"dialled": out, "accepted": in.(*net.TCPConn)} {
		c, _ := carry(raw, time.Hour, control)
		// The kernel knows the peer's answer once bytes have come.
		for _, way := range [][2]net.Conn{{out, in}, {in, out}} {
			if _, err := way[0].Write([]byte("x")); err != nil {
				t.Fatal(err)
			}
			if _, err := way[1].Read(make([]byte, 1)); err != nil {
				t.Fatal(err)
			}
		}
		paths := c.Paths()
		if len(paths) != 1 || paths[0].Local.String() != raw.LocalAddr().String() ||
			paths[0].Remote.String() != raw.RemoteAddr().String() {
			t.Errorf("%s: the paths are %v, want %v to %v", end, paths, raw.LocalAddr(), raw.RemoteAddr())
		}
		if c.lost() != multipathLost || c.total() != multipathTotal {
			t.Errorf("%s: it is lost after %v and %v", end, c.lost(), c.total())
		}
		if got := algorithm(t, c); got != "reno" {
			t.Errorf("%s: it has %s", end, got)
		}
		c.raw.Control(func(fd uintptr) {
			if a, ok := acksOf(fd); !ok || a.ended || a.missing {
				t.Errorf("%s: acknowledgements: %+v, %v", end, a, ok)
			}
			if p, ok := pathOf(fd); !ok || p.leastTrip <= 0 || p.leastTrip > time.Second || p.segments.sent == 0 {
				t.Errorf("%s: path: %+v, %v", end, p, ok)
			}
			if s, ok := sendingOf(fd); !ok || s.arrived == 0 || s.retries != 0 {
				t.Errorf("%s: sending: %+v, %v", end, s, ok)
			}
			if err := userTimeout(fd, time.Second); !errors.Is(err, unix.ENOPROTOOPT) {
				t.Errorf("%s: a user timeout: %v; if the kernel has it now, sessionBackoff applies", end, err)
			}
		})
		wantUnsent(t, c, c.far.sizes().unsent)
	}
}

// A peer without Multipath TCP, or a box in between that strips its option, makes it a connection like any
// other.
func TestMultipathFallback(t *testing.T) {
	config := new(net.ListenConfig)
	config.SetMultipathTCP(false)
	ln, err := config.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	c, _ := carry(dialMultipath(t, ln.Addr().String()), time.Hour, nil)
	if paths := c.Paths(); paths != nil {
		t.Errorf("the paths are %v", paths)
	}
	if c.lost() != lostAfter || c.total() != keepaliveTotal {
		t.Errorf("it is lost after %v and %v", c.lost(), c.total())
	}
	c.raw.Control(func(fd uintptr) {
		if a, ok := acksOf(fd); !ok || a.ended {
			t.Errorf("acknowledgements: %+v, %v", a, ok)
		}
	})
}

// A session and its data connections may have Multipath TCP. Both ends know.
func TestMultipathSession(t *testing.T) {
	eachWay(t, func(t *testing.T, r *rig) {
		dialMultipath(t, r.server.Addr().String()).Close()
		cfg := r.clientConfig("n1")
		dialer := new(net.Dialer)
		dialer.SetMultipathTCP(true)
		cfg.Dial = dialer.DialContext
		e := r.start(cfg, direct)
		r.eventually("node joins", func() bool { return e.client.Ready() == nil && r.dir.Holds("n1") })
		for end, s := range map[string]*tunnel.Session{"cloud": r.dir.Lookup("n1"), "edge": e.client.Session()} {
			if len(s.Paths()) != 1 {
				t.Errorf("%s: the paths are %v", end, s.Paths())
			}
		}
		target := testkit.Serve(t, func(c *net.TCPConn) { io.Copy(c, c) })
		c := r.mustDial("n1", target)
		sent := blob(1 << 20)
		go c.Write(sent)
		if _, err := io.ReadFull(c, make([]byte, len(sent))); err != nil {
			t.Error(err)
		}
	})
}
