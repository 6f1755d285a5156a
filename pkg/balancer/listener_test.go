package balancer

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/tunnel"
)

// patience bounds every wait on loopback, on a busy machine.
const patience = 15 * time.Second

// port is a listener behind balancers.
type port struct {
	t        *testing.T
	ln       net.Listener
	counters tunnel.Counters
	log      *testkit.Log
}

// behind opens a port on loopback. from are the balancers.
func behind(t *testing.T, from string) *port {
	t.Helper()
	p := &port{t: t}
	logger, text := testkit.NewLog()
	p.log = text
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p.ln = New(Config{
		From: auth.Sources{netip.MustParsePrefix(from)}, Key: "proxyfrom", Table: "[a.table]",
		Counters: &p.counters, Log: logger,
	}).Listener(ln)
	t.Cleanup(func() { p.ln.Close() })
	return p
}

// dial connects and sends text.
func (p *port) dial(text string) *net.TCPConn {
	p.t.Helper()
	c, err := net.Dial("tcp", p.ln.Addr().String())
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(patience))
	if _, err := io.WriteString(c, text); err != nil {
		p.t.Fatal(err)
	}
	return c.(*net.TCPConn)
}

// accept returns the next connection that the port accepts.
func (p *port) accept() net.Conn {
	p.t.Helper()
	c, err := p.ln.Accept()
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(patience))
	return c
}

// wantBytes reads as many bytes as want has.
func wantBytes(t *testing.T, c net.Conn, want string) {
	t.Helper()
	got := make([]byte, len(want))
	if _, err := io.ReadFull(c, got); err != nil || string(got) != want {
		t.Errorf("read %q, %v; want %q", got, err, want)
	}
}

// Behind a balancer, the address is the caller's, and the bytes after the header are the caller's.
func TestCallerOfBalancer(t *testing.T) {
	p := behind(t, "127.0.0.0/8")
	there := p.dial("PROXY TCP4 192.0.2.1 10.0.0.1 1000 443\r\nhello")
	c := p.accept()
	if c.RemoteAddr().String() != "192.0.2.1:1000" || c.(*Conn).dest.String() != "10.0.0.1:443" || IsCheck(c) {
		t.Errorf("caller %v, destination %v", c.RemoteAddr(), c.(*Conn).dest)
	}
	if c.LocalAddr().String() != p.ln.Addr().String() {
		t.Errorf("local address %v", c.LocalAddr())
	}
	wantBytes(t, c, "hello")
	c.(*Conn).CloseWrite()
	if rest, err := io.ReadAll(there); err != nil || len(rest) > 0 {
		t.Errorf("after a half-close: %q, %v", rest, err)
	}
	if tcp, ok := listen.Socket(c); !ok || tcp.RemoteAddr().String() != there.LocalAddr().String() {
		t.Errorf("the socket is not that of the balancer")
	}
}

// A health check keeps the address of the balancer.
func TestCheckOfBalancer(t *testing.T) {
	for name, header := range map[string]string{"v1": "PROXY UNKNOWN\r\n", "v2": v2(0x20, 0)} {
		t.Run(name, func(t *testing.T) {
			p := behind(t, "127.0.0.1/32")
			there := p.dial(header + "x")
			c := p.accept()
			if c.RemoteAddr().String() != there.LocalAddr().String() || !IsCheck(c) {
				t.Errorf("remote address %v", c.RemoteAddr())
			}
			wantBytes(t, c, "x")
		})
	}
}

// A connection of another address passes unchanged.
func TestOtherCallers(t *testing.T) {
	p := behind(t, "192.0.2.0/24")
	there := p.dial("PROXY TCP4 192.0.2.1 10.0.0.1 1000 443\r\n")
	c := p.accept()
	if _, ok := c.(*net.TCPConn); !ok || c.RemoteAddr().String() != there.LocalAddr().String() {
		t.Errorf("a %T from %v", c, c.RemoteAddr())
	}
	wantBytes(t, c, "PROXY TCP4")
}

// From a balancer, a header is required.
func TestBalancerWithoutHeader(t *testing.T) {
	for name, test := range map[string]struct{ sent, log string }{
		"TLS":       {"\x16\x03\x01\x02\x00\x01", "does not begin with a PROXY header"},
		"malformed": {"PROXY TCP5\r\n", "malformed PROXY header"},
		"silent":    {"", "no complete PROXY header came in time"},
		"slow":      {"PROXY TCP4 ", "no complete PROXY header came in time"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := behind(t, "127.0.0.0/8")
			accepted := make(chan error, 1)
			go func() {
				_, err := p.ln.Accept()
				accepted <- err
			}()
			there := p.dial(test.sent)
			if n, err := there.Read(make([]byte, 1)); n > 0 || err == nil {
				t.Errorf("%d bytes, %v: the connection was not closed", n, err)
			}
			testkit.Eventually(t, "the log says why and what to do", func() bool {
				return strings.Contains(p.log.String(), "level=WARN") && strings.Contains(p.log.String(), test.log) &&
					strings.Contains(p.log.String(), "proxyfrom in [a.table]")
			})
			late := strings.Contains(test.log, "in time")
			if n := p.counters.LimitedBy(tunnel.LimitProxyHeader); (n > 0) != late {
				t.Errorf("the limit counts %d", n)
			}
			if n := p.counters.HeadersMissing.Load(); n != 1 {
				t.Errorf("%d missing headers were counted, want 1", n)
			}
			p.ln.Close()
			if err := <-accepted; err == nil {
				t.Error("the connection was accepted")
			}
		})
	}
}

// A balancer that only connects, to see whether the port is open, causes no warning.
func TestBalancerConnectsOnly(t *testing.T) {
	p := behind(t, "127.0.0.0/8")
	go p.ln.Accept()
	p.dial("").Close()
	testkit.Eventually(t, "the log has a line", func() bool { return strings.Contains(p.log.String(), "sent nothing") })
	if strings.Contains(p.log.String(), "level=WARN") {
		t.Errorf("the log warns:\n%s", p.log)
	}
	if n := p.counters.HeadersMissing.Load(); n != 0 {
		t.Errorf("%d missing headers were counted", n)
	}
}

// A silent connection of a balancer does not hold up others, and Close ends it.
func TestSilentConnectionsWait(t *testing.T) {
	p := behind(t, "127.0.0.0/8")
	var silent []*net.TCPConn
	for range 20 {
		silent = append(silent, p.dial("PROXY "))
	}
	p.dial("PROXY TCP4 192.0.2.1 10.0.0.1 1000 443\r\nhello")
	wantBytes(t, p.accept(), "hello")
	p.ln.Close()
	for _, c := range silent {
		if _, err := c.Read(make([]byte, 1)); err == nil || isTimeout(err) {
			t.Errorf("the connection is open after Close: %v", err)
		}
	}
	if _, err := p.ln.Accept(); err == nil {
		t.Error("Accept works after Close")
	}
}

func isTimeout(err error) bool {
	e, ok := errors.AsType[net.Error](err)
	return ok && e.Timeout()
}

// Without balancers, the listener is the same.
func TestNoBalancers(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	if New(Config{}).Listener(ln) != ln {
		t.Error("it is wrapped")
	}
}

// An unexpected header leads to one warning a minute, which says what to write where.
func TestUnexpected(t *testing.T) {
	logger, text := testkit.NewLog()
	var counters tunnel.Counters
	b := New(Config{Key: "proxyfrom", Table: "[a.table]", Counters: &counters, Log: logger})
	c := addressed{local: &net.TCPAddr{}, remote: &net.TCPAddr{IP: net.IPv4(192, 0, 2, 7), Port: 1}}
	for range 3 {
		if !b.Unexpected(c, []byte("PROXY TCP4 ")) || b.Unexpected(c, []byte("GET / HTTP/1.1")) {
			t.Error("a header is not told from a request")
		}
	}
	log := text.String()
	if strings.Count(log, "level=WARN") != 1 ||
		!strings.Contains(log, `write proxyfrom = [\"192.0.2.7\"] into [a.table]`) {
		t.Errorf("the log has\n%s", log)
	}
	if n := counters.HeadersUnexpected.Load(); n != 3 {
		t.Errorf("%d headers were counted, want 3", n)
	}
}

// A balancer that sends two headers is told apart from a caller that is not a balancer.
func TestSecondHeader(t *testing.T) {
	p := behind(t, "127.0.0.0/8")
	p.dial("PROXY TCP4 192.0.2.1 10.0.0.1 1000 443\r\nPROXY TCP4 ")
	c := p.accept()
	logger, text := testkit.NewLog()
	b := New(Config{From: auth.Sources{netip.MustParsePrefix("127.0.0.0/8")}, Log: logger})
	if !b.Unexpected(c, []byte("PROXY TCP4 ")) || !strings.Contains(text.String(), "127.0.0.1 sends two headers") {
		t.Errorf("the log has\n%s", text)
	}
}
