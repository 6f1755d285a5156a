package https

import (
	"crypto/tls"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/hello"
	"tunnel.example/tunnel/pkg/listen"
)

// fromBalancer is the header of a balancer whose caller is 10.1.2.3:4711.
const fromBalancer = "PROXY TCP4 10.1.2.3 10.9.9.9 4711 443\r\n"

// behindBalancer has the door take callers from a balancer on loopback.
func behindBalancer(allow string) func(*rig, *Config) {
	return func(_ *rig, c *Config) {
		c.ProxyFrom = auth.Sources{netip.MustParsePrefix("127.0.0.0/8")}
		c.AllowFrom = auth.Sources{netip.MustParsePrefix(allow)}
	}
}

// handshake sends the header of a balancer, and makes a TLS handshake for a node.
func (r *rig) handshake(header, serverName string) (*tls.Conn, error) {
	r.t.Helper()
	c := r.tcp()
	if _, err := io.WriteString(c, header); err != nil {
		r.t.Fatal(err)
	}
	cfg := r.caller(serverName)
	cfg.RootCAs = nil
	cfg.InsecureSkipVerify = true
	tc := tls.Client(c, cfg)
	return tc, tc.Handshake()
}

// Behind a balancer, allowfrom and the edge have the caller's address, passed through and terminated.
func TestCallerOfBalancer(t *testing.T) {
	r := newRig(t, nil, behindBalancer("10.0.0.0/8")).start()
	for _, name := range []string{"edge1", "front.example"} {
		c, err := r.handshake(fromBalancer, name)
		must(t, err)
		io.WriteString(c, "GET / HTTP/1.1\r\nHost: edge1\r\nConnection: close\r\n\r\n")
		if answer, err := io.ReadAll(c); err != nil || !strings.HasSuffix(string(answer), "pong") {
			t.Errorf("%s: the answer is %q, %v", name, answer, err)
		}
	}
	r.tunnel.set(func(f *fakeTunnel) {
		if len(f.received) == 0 || f.received[0].Caller != "10.1.2.3:4711" {
			t.Errorf("the requests are %+v", f.received)
		}
	})
}

// A caller is not allowed because of its balancer's address.
func TestCallerOfBalancerIsDenied(t *testing.T) {
	r := newRig(t, nil, behindBalancer("127.0.0.0/8")).start()
	if _, err := r.handshake(fromBalancer, "edge1"); err == nil {
		t.Error("the caller is served")
	}
	testkit.Eventually(t, "the log names the caller", func() bool {
		return strings.Contains(r.logs.String(), "10.1.2.3:4711 is not in allowfrom")
	})
}

// From an address that is no balancer's, a header is refused, and the log says what to write.
func TestUnexpectedHeader(t *testing.T) {
	r := newRig(t, nil, nil).start()
	if _, err := r.handshake(fromBalancer, "edge1"); err == nil {
		t.Error("the caller is served")
	}
	testkit.Eventually(t, "the log says what to write", func() bool {
		return strings.Contains(r.logs.String(), `write proxyfrom = [\"127.0.0.1\"] into [mode.cloud.https]`)
	})
}

// Callers of the one port are served like those of the door's own port.
func TestOnePort(t *testing.T) {
	known := listen.NewStrangers(1, 1)
	onePort := listen.NewHandover(func() net.Addr { return &net.TCPAddr{} }, known)
	r := newRig(t, nil, func(_ *rig, c *Config) { c.OnePort, c.OnePortAs = onePort, "0" }).start()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	r.addr = ln.Addr().String()
	done := make(chan struct{})
	defer func() { ln.Close(); <-done }()
	go func() {
		defer close(done)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			h, read, err := hello.Peek(c)
			if err != nil || !onePort.Give(hello.NewConn(c.(*net.TCPConn), c.RemoteAddr(), h, read), patience) {
				t.Errorf("the connection is not handed over: %v", err)
			}
		}
	}()
	for _, name := range []string{"edge1", "front.example"} { // passed through, terminated
		c, err := r.handshake("", name)
		must(t, err)
		io.WriteString(c, "GET / HTTP/1.1\r\nHost: edge1\r\nConnection: close\r\n\r\n")
		if answer, err := io.ReadAll(c); err != nil || !strings.HasSuffix(string(answer), "pong") {
			t.Errorf("%s: the answer is %q, %v", name, answer, err)
		}
	}
	if !known.Knows(netip.MustParseAddr("127.0.0.1")) {
		t.Error("the source of a caller with a certificate is not known at the one port")
	}
	r.stop()
	there, here := net.Pipe()
	defer there.Close()
	defer here.Close()
	testkit.Eventually(t, "the door takes no connections after its stop", func() bool {
		return !onePort.Give(here, time.Second)
	})
}
