package testkit

import (
	"context"
	"crypto/rand"
	"io"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"
)

// Serve listens on loopback until the test ends, and serves each connection in a goroutine of its own.
// It closes the connection when serve returns. The end of the test waits for all of them.
func Serve(t testing.TB, serve func(c *net.TCPConn)) (addr string) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return accept(t, ln, func(c net.Conn) { serve(c.(*net.TCPConn)) }) // a TCP listener accepts no others
}

// ServeOn is Serve for a listener of the caller's, which it closes when the test ends. The end of the
// test also ends ctx and closes the connections.
func ServeOn(t testing.TB, ln net.Listener, serve func(ctx context.Context, c net.Conn)) (addr string) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	addr = accept(t, ln, func(c net.Conn) {
		defer context.AfterFunc(ctx, func() { c.Close() })()
		serve(ctx, c)
	})
	t.Cleanup(cancel) // before accept's Cleanup, which waits
	return addr
}

// accept serves the connections of ln until the test ends.
func accept(t testing.TB, ln net.Listener, serve func(c net.Conn)) (addr string) {
	var live sync.WaitGroup
	live.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			live.Go(func() {
				defer c.Close()
				serve(c)
			})
		}
	})
	t.Cleanup(func() {
		ln.Close()
		live.Wait()
	})
	return ln.Addr().String()
}

// ServeTLS runs server on ln until the test ends. server has its certificate in TLSConfig.
func ServeTLS(t testing.TB, ln net.Listener, server *http.Server) (addr string) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		server.ServeTLS(ln, "", "") //nolint:errcheck // Close makes it return
	}()
	t.Cleanup(func() {
		server.Close()
		<-done
	})
	return ln.Addr().String()
}

// Echo sends back what arrives, and ends its direction when the other side has ended its own.
func Echo(c *net.TCPConn) {
	io.Copy(c, c) //nolint:errcheck // the test sees it at the other end
	c.CloseWrite()
}

// Random returns n random bytes.
func Random(n int) []byte {
	b := make([]byte, n)
	rand.Read(b)
	return b
}

// Target is a TCP listener on loopback from which the test itself accepts.
type Target struct{ *net.TCPListener }

// NewTarget returns a Target that listens until the test ends.
func NewTarget(t testing.TB) Target {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	return Target{ln.(*net.TCPListener)}
}

// Address returns where the target listens, as host:port.
func (l Target) Address() string { return l.Addr().String() }

// Next accepts a connection, and closes it when the test ends. After a minute without one it fails the
// test.
func (l Target) Next(t testing.TB) *net.TCPConn {
	t.Helper()
	if err := l.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	c, err := l.AcceptTCP()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// ReadAll reads up to a clean end. It fails the test on any other end, such as a reset.
func ReadAll(t testing.TB, r io.Reader) []byte {
	t.Helper()
	b, err := io.ReadAll(r)
	if err != nil {
		t.Fatalf("reading to the end: %v (after %d bytes)", err, len(b))
	}
	return b
}
