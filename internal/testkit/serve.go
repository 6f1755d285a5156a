package testkit

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
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
	failed, fail := context.WithCancel(context.Background())
	live.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			live.Go(func() {
				defer c.Close()
				defer context.AfterFunc(failed, func() { c.Close() })()
				serve(c)
			})
		}
	})
	t.Cleanup(func() {
		ln.Close()
		if t.Failed() { // before it has closed its ends: a test that waits for ever would not say why it has failed
			fail()
		}
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

// DialMany opens n TCP connections to addr at the same time, so that all of them are open before the first one
// exceeds a time limit. from returns the address of this machine that connection i comes from; nil: 127.0.0.1.
// The end of the test closes them.
func DialMany(t testing.TB, n int, addr string, from func(i int) net.IP) []net.Conn {
	t.Helper()
	conns := make([]net.Conn, n)
	var dials errgroup.Group
	for i := range n {
		dials.Go(func() (err error) {
			var d net.Dialer
			if from != nil {
				d.LocalAddr = &net.TCPAddr{IP: from(i)}
			}
			conns[i], err = d.Dial("tcp", addr)
			return err
		})
	}
	err := dials.Wait()
	t.Cleanup(func() {
		for _, c := range conns {
			if c != nil {
				c.Close()
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	return conns
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

// L7 is a balancer that passes HTTP/2 on to a server. conf verifies the server.
//
// With losesTrailers it sends the headers of an answer before it knows whether a body follows, as some balancers do. A
// gRPC call that ends without a message then ends without its status.
func L7(t testing.TB, addr string, conf *tls.Config, losesTrailers bool) http.Handler {
	t.Helper()
	protocols := new(http.Protocols)
	protocols.SetHTTP2(true)
	transport := &http.Transport{TLSClientConfig: conf, Protocols: protocols}
	t.Cleanup(transport.CloseIdleConnections)
	proxy := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "https", Host: addr})
	proxy.Transport = transport // without FlushInterval, which would send the headers early now and then
	proxy.ErrorLog = log.New(io.Discard, "", 0)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if losesTrailers {
			w = earlyHeaders{w}
		}
		proxy.ServeHTTP(w, r)
	})
}

// earlyHeaders sends headers as soon as they are known.
type earlyHeaders struct{ http.ResponseWriter }

func (w earlyHeaders) WriteHeader(code int) {
	w.ResponseWriter.WriteHeader(code)
	http.NewResponseController(w.ResponseWriter).Flush() //nolint:errcheck // the connection is gone
}
