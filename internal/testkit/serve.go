package testkit

import (
	"crypto/rand"
	"io"
	"net"
	"sync"
	"testing"
)

// Serve listens on loopback until the test ends, and serves each connection in a goroutine of its own.
// It closes the connection when serve returns. The end of the test waits for all of them.
func Serve(t testing.TB, serve func(c *net.TCPConn)) (addr string) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var live sync.WaitGroup
	live.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			live.Go(func() {
				defer c.Close()
				serve(c.(*net.TCPConn)) // a TCP listener accepts no others
			})
		}
	})
	t.Cleanup(func() {
		ln.Close()
		live.Wait()
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
