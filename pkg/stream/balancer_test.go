package stream

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/hello"
	"tunnel.example/tunnel/pkg/listen"
	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
)

// fromBalancer is the header of a balancer whose caller has an address.
func fromBalancer(caller string) string { return "PROXY TCP4 " + caller + " 10.9.9.9 4711 9000\r\n" }

// behindBalancer has the server take edges from a balancer on loopback.
func behindBalancer(c *ServerConfig) {
	c.ProxyFrom = auth.Sources{netip.MustParsePrefix("127.0.0.0/8")}
}

// strangerVia is stranger, with bytes before the TLS handshake.
func (r *rig) strangerVia(address, first string) *stranger {
	r.t.Helper()
	cc, err := grpc.NewClient("passthrough:///"+address,
		grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{RootCAs: r.ca.Pool(), ServerName: "cloud"})),
		grpc.WithContextDialer(func(ctx context.Context, a string) (net.Conn, error) {
			c, err := new(net.Dialer).DialContext(ctx, "tcp", a)
			if err == nil {
				_, err = io.WriteString(c, first)
			}
			return c, err
		}),
		grpc.WithDisableRetry(), grpc.WithIdleTimeout(0))
	if err != nil {
		r.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	r.t.Cleanup(func() {
		cancel()
		cc.Close()
	})
	return &stranger{t: r.t, ctx: ctx, cc: cc, client: pb.NewStreamClient(cc)}
}

// A session of an edge behind a balancer has the edge's address.
func TestEdgeBehindBalancer(t *testing.T) {
	r := newRig(t, behindBalancer)
	r.strangerVia(r.server.Addr().String(), fromBalancer("192.0.2.1")).join("edge1")
	testkit.Eventually(t, "the node has a session", func() bool { return r.dir.Lookup("edge1") != nil })
	if got := r.dir.Lookup("edge1").Remote; got != "192.0.2.1:4711" {
		t.Errorf("the session is of %s", got)
	}
}

// The limit for one source counts edges, not their balancer.
func TestLimitsBehindBalancer(t *testing.T) {
	r := newRig(t, behindBalancer, func(c *ServerConfig) { c.Limits.JoiningPerAddress = 1 })
	connect := func(caller string) net.Conn {
		c, err := net.Dial("tcp", r.server.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		io.WriteString(c, fromBalancer(caller)+"\x16")
		return c
	}
	have := func(n int) {
		t.Helper()
		r.eventually(fmt.Sprintf("%d connections have a place", n), func() bool { return r.server.strangers.Len() == n })
	}
	connect("192.0.2.1")
	have(1)
	second := connect("192.0.2.1")
	second.SetReadDeadline(time.Now().Add(patience))
	if n, err := second.Read(make([]byte, 1)); !errors.Is(err, io.EOF) && !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the second connection of one edge reads %d, %v", n, err)
	}
	connect("192.0.2.2")
	have(2) // the second connection has none, so edges of different addresses do not share a place
	if log := r.log.lines("too many connections of one source"); len(log) != 1 || !strings.Contains(log[0], "192.0.2.1:4711") {
		t.Errorf("the log has %q", log)
	}
}

// The log says what to write where a balancer sends a header unasked.
func TestUnexpectedHeader(t *testing.T) {
	r := newRig(t)
	c, err := net.Dial("tcp", r.server.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	io.WriteString(c, fromBalancer("192.0.2.1"))
	if n, err := c.Read(make([]byte, 100)); n > 0 || err == nil {
		t.Errorf("%d bytes are answered, %v", n, err)
	}
	testkit.Eventually(t, "the log says what to write", func() bool {
		return len(r.log.lines("level=WARN", `write proxyfrom = [\"127.0.0.1\"] into [mode.cloud.stream.server]`)) == 1
	})
}

// onePort hands over every connection to an address of loopback.
func onePort(t *testing.T, known *listen.Strangers) (to *listen.Handover, address string) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	to = listen.NewHandover(ln.Addr, known)
	done := make(chan struct{})
	t.Cleanup(func() {
		ln.Close()
		<-done
	})
	go func() {
		defer close(done)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			h, read, err := hello.Peek(c)
			if err != nil || !to.Give(hello.NewConn(c.(*net.TCPConn), c.RemoteAddr(), h, read), patience) {
				t.Errorf("the connection is not handed over: %v", err)
			}
		}
	}()
	return to, ln.Addr().String()
}

// An edge that the one port hands over joins as at a port of its own, and the one port knows it then.
func TestOnePort(t *testing.T) {
	for name, own := range map[string]string{"alone": "", "beside grpcport": "127.0.0.1:0"} {
		t.Run(name, func(t *testing.T) {
			known := listen.NewStrangers(1, 1)
			handover, address := onePort(t, known)
			r := newRig(t, func(c *ServerConfig) { c.Listen, c.OnePort = own, handover })
			r.strangerVia(address, "").join("edge1")
			r.eventually("the node has a session", func() bool { return r.dir.Lookup("edge1") != nil })
			if own != "" {
				r.strangerVia(r.server.Addr().String(), "").join("edge2")
				r.eventually("the other node has a session", func() bool { return r.dir.Lookup("edge2") != nil })
			}
			if !known.Knows(netip.MustParseAddr("127.0.0.1")) {
				t.Error("the source of an edge that has joined is not known at the one port")
			}
		})
	}
}
