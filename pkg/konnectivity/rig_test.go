package konnectivity

import (
	"crypto/rand"
	"io"
	"net"
	"sync"
	"testing"
)

// listen serves every connection in a goroutine of its own.
func listen(t *testing.T, serve func(c *net.TCPConn)) (addr string) {
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
				serve(c.(*net.TCPConn))
			})
		}
	})
	t.Cleanup(func() {
		ln.Close()
		live.Wait()
	})
	return ln.Addr().String()
}

func echo(c *net.TCPConn) {
	io.Copy(c, c)
	c.CloseWrite()
}

func random(n int) []byte {
	b := make([]byte, n)
	rand.Read(b)
	return b
}
