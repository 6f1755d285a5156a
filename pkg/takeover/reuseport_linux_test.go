package takeover

import (
	"context"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// waiting is how many callers wait in the queue of a listener when it is replaced.
const waiting = 50

// TestReusePort counts the callers that are lost when a listener is replaced while they wait in its queue: by another
// listener with SO_REUSEPORT, and by a copy of the same socket, which this package hands over.
func TestReusePort(t *testing.T) {
	lose := func(replace func(old *net.TCPListener) net.Listener) (lost int) {
		config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
			if e := c.Control(func(fd uintptr) {
				err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
			}); e != nil {
				return e
			}
			return err
		}}
		old, err := config.Listen(t.Context(), "tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		var callers []net.Conn
		for range waiting {
			c, err := net.Dial("tcp", old.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			callers = append(callers, c)
		}
		next := replace(old.(*net.TCPListener))
		if next == nil {
			next, err = config.Listen(context.Background(), "tcp", old.Addr().String())
		}
		if err != nil {
			t.Fatal(err)
		}
		old.Close()
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			for {
				c, err := next.Accept()
				if err != nil {
					return
				}
				io.WriteString(c, "x")
				c.Close()
			}
		}()
		defer func() { next.Close(); <-ended }()
		for _, c := range callers {
			c.SetDeadline(time.Now().Add(10 * time.Second))
			if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
				lost++
			}
		}
		return lost
	}
	handed := lose(func(old *net.TCPListener) net.Listener {
		file, err := old.File()
		if err != nil {
			t.Fatal(err)
		}
		defer file.Close()
		next, err := net.FileListener(file)
		if err != nil {
			t.Fatal(err)
		}
		return next
	})
	reused := lose(func(*net.TCPListener) net.Listener { return nil })
	t.Logf("of %d callers that wait, SO_REUSEPORT loses %d, and a copy of the socket %d", waiting, reused, handed)
	if handed > 0 {
		t.Errorf("a copy of the socket loses %d callers", handed)
	}
	migrate, err := os.ReadFile("/proc/sys/net/ipv4/tcp_migrate_req")
	if err == nil && strings.TrimSpace(string(migrate)) == "0" && reused == 0 {
		t.Error("SO_REUSEPORT loses no caller: docs/restart.md says otherwise")
	}
}
