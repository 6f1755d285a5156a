package tunnel

import (
	"context"
	"io"
	"net"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"tunnel.example/tunnel/internal/testkit"
)

// A conn does not end while a request waits in the socket for this process to read it.
func TestUnreadRequestIsNotQuiet(t *testing.T) {
	caller, src := tcpPair(t)
	dog := &watchdog{end: new(GraceEnd), target: new(movingConn), check: time.AfterFunc(time.Hour, func() {})}
	dog.both = []*direction{newDirection(src, dog)}
	dog.end.Begin(quietTime)
	quiet := func() bool {
		dog.quietSince = time.Now().Add(-time.Minute)
		return dog.lookAgain()
	}
	if !quiet() {
		t.Error("a silent conn does not end")
	}
	if _, err := io.WriteString(caller, "request"); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "the request keeps the conn", func() bool { return !quiet() })
	if _, err := io.ReadFull(src, make([]byte, len("request"))); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, "without a request, the conn ends", quiet)
	dog.stop()
}

// socketConn is a conn whose socket knows of no bytes.
type socketConn struct{ net.Conn }

func (socketConn) SyscallConn() (syscall.RawConn, error) { return noSocket{}, nil }

type noSocket struct{}

func (noSocket) Control(func(fd uintptr)) error           { return nil }
func (noSocket) Read(func(fd uintptr) (done bool)) error  { return net.ErrClosed }
func (noSocket) Write(func(fd uintptr) (done bool)) error { return net.ErrClosed }

// A conn also ends at a quiet moment before the process at the other end of the tunnel ends, and not if its caller
// waits for an answer.
func TestQuietEndOfPeer(t *testing.T) {
	for _, pending := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			_, a := net.Pipe()
			_, b := net.Pipe()
			target := &movingConn{Conn: b, pending: pending}
			done := splice(t, ctx, socketConn{a}, target)
			time.Sleep(7 * time.Second) // Splice has looked once before
			stopped := time.Now()
			target.ends.Begin(GracePeriod)
			select {
			case <-done:
				if took := time.Since(stopped); pending || took < 15*time.Second || took > 23*time.Second {
					t.Errorf("pending: %t; the conn ended after %v", pending, took)
				}
			case <-time.After(2 * GracePeriod):
				if !pending {
					t.Error("the conn does not end")
				}
				cancel()
				<-done
			}
		})
	}
}
