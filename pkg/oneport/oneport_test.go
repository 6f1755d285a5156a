package oneport

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/internal/testkit/leaks"
	"tunnel.example/tunnel/internal/testkit/testca"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/hello"
	"tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/tunnel"
)

func TestMain(m *testing.M) { leaks.Main(m) }

// patience bounds every wait on loopback, on a busy machine.
const patience = 15 * time.Second

// nodes is a tunnel.Nodes. One of them has the cloud's name, and one a name under a wildcard of its certificate.
type nodes struct{}

func (nodes) Holds(n tunnel.NodeName) bool { return slices.Contains(nodes{}.Connected(), n) }
func (nodes) Connected() []tunnel.NodeName {
	return []tunnel.NodeName{"edge1", "tunnel", "cloud.example", "edge1.nodes.example"}
}

// running is a port in operation.
type running struct {
	*Port

	t        *testing.T
	pair     tls.Certificate
	counters tunnel.Counters
	log      *testkit.Log
	stop     *testkit.Running
}

// start runs a port until the test ends.
func start(t *testing.T, change ...func(*Config)) *running {
	t.Helper()
	r := &running{t: t, pair: testca.New(t, "test").Pair(t, auth.Leaf{
		CommonName: "cloud", DNSNames: []string{"cloud.example", "*.nodes.example"}, Server: true, TTL: time.Hour,
	})}
	logger, text := testkit.NewLog()
	r.log = text
	cfg := Config{
		Listen: "127.0.0.1:0", DataProtocol: "data/1", Nodes: nodes{}, HasDoor: true,
		Certificate: func() *x509.Certificate { return r.pair.Leaf },
		Strangers:   100, StrangersPerAddress: 100, Timeout: patience, Counters: &r.counters, Log: logger,
	}
	for _, c := range change {
		c(&cfg)
	}
	r.Port = New(cfg)
	r.stop = testkit.Run(t, r.Run)
	testkit.Eventually(t, "the port is open", func() bool { return r.Ready() == nil })
	t.Cleanup(func() {
		r.stop.Stop()
		if n := r.strangers.Len(); n > 0 {
			t.Errorf("%d strangers are still counted", n)
		}
	})
	return r
}

func (r *running) dial() *net.TCPConn {
	r.t.Helper()
	c, err := net.Dial("tcp", r.Addr().String())
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(patience))
	return c.(*net.TCPConn)
}

// accept returns the next connection of a listener, and its TLS after the handshake.
func (r *running) accept(ln net.Listener) (net.Conn, *tls.Conn) {
	r.t.Helper()
	c, err := ln.Accept()
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(patience))
	tc := tls.Server(c, &tls.Config{
		Certificates: []tls.Certificate{r.pair}, NextProtos: []string{"h2", "http/1.1", "data/1"},
	})
	if err := tc.Handshake(); err != nil {
		r.t.Fatal(err)
	}
	return c, tc
}

// TestKinds: each kind of client reaches its module, and TLS begins there. A node that has the cloud's name changes
// nothing.
func TestKinds(t *testing.T) {
	noDoor := func(c *Config) { c.HasDoor = false }
	for name, test := range map[string]struct {
		sni  string
		alpn []string
		to   func(*Port) *listen.Handover
		with []func(*Config)
	}{
		"a session":                        {"cloud.example", []string{"h2"}, edges, nil},
		"a session by IP address":          {"", []string{"h2"}, edges, nil},
		"a data connection":                {"cloud.example", []string{"data/1"}, edges, nil},
		"another replica":                  {"tunnel.cloud.io", []string{"h2"}, edges, nil},
		"a caller of a node":               {"edge1", []string{"h2", "http/1.1"}, callers, nil},
		"a caller of a node, without ALPN": {"edge1", nil, callers, nil},
		"a caller of a node, h2 alone":     {"edge1", []string{"h2"}, callers, nil},
		"a caller in upper case":           {"EDGE1", []string{"http/1.1"}, callers, nil},
		"a caller of a node that left":     {"edge9", []string{"http/1.1"}, callers, nil},
		"a caller without SNI":             {"", []string{"http/1.1"}, callers, nil},
		"a caller without SNI and ALPN":    {"", nil, callers, nil},
		"a caller under the wildcard":      {"edge1.nodes.example", []string{"h2", "http/1.1"}, callers, nil},
		"a session under the wildcard":     {"edge1.nodes.example", []string{"h2"}, edges, nil},
		"a health check":                   {"cloud.example", []string{"h2", "http/1.1"}, health, nil},
		"a health check without ALPN":      {"cloud.example", nil, health, nil},
		"a health check in upper case":     {"CLOUD.example", nil, health, nil},
		"a check under the wildcard":       {"cloud.nodes.example", nil, health, nil},
		"an edge, no door":                 {"edge1", []string{"h2"}, edges, []func(*Config){noDoor}},
		"by IP address, no door":           {"", []string{"http/1.1"}, health, []func(*Config){noDoor}},
		"another name, no door":            {"edge1", []string{"http/1.1"}, health, []func(*Config){noDoor}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := start(t, test.with...)
			done := make(chan error, 1)
			go func() {
				c := tls.Client(r.dial(), &tls.Config{
					ServerName: test.sni, NextProtos: test.alpn, InsecureSkipVerify: true,
				})
				_, err := io.WriteString(c, "hello")
				done <- err
			}()
			_, c := r.accept(test.to(r.Port))
			if err := <-done; err != nil {
				t.Fatal(err)
			}
			got := make([]byte, 5)
			if _, err := io.ReadFull(c, got); err != nil || string(got) != "hello" {
				t.Errorf("read %q, %v", got, err)
			}
		})
	}
}

func edges(p *Port) *listen.Handover   { return p.Edges }
func callers(p *Port) *listen.Handover { return p.Callers }
func health(p *Port) *listen.Handover  { return p.Health }

// Behind a balancer, a module gets the caller's address.
func TestBehindBalancer(t *testing.T) {
	r := start(t, func(c *Config) { c.ProxyFrom = auth.Sources{netip.MustParsePrefix("127.0.0.0/8")} })
	go func() {
		c := r.dial()
		io.WriteString(c, "PROXY TCP4 192.0.2.1 10.9.9.9 4711 443\r\n")
		tls.Client(c, &tls.Config{NextProtos: []string{"h2"}, InsecureSkipVerify: true}).Handshake()
	}()
	c, _ := r.accept(r.Edges)
	if c.RemoteAddr().String() != "192.0.2.1:4711" {
		t.Errorf("the module gets a connection of %v", c.RemoteAddr())
	}
}

// A header that is not expected is refused, and the log says what to write.
func TestUnexpectedHeader(t *testing.T) {
	r := start(t)
	c := r.dial()
	io.WriteString(c, "PROXY TCP4 192.0.2.1 10.9.9.9 4711 443\r\n")
	if _, err := c.Read(make([]byte, 1)); err == nil {
		t.Error("the connection is served")
	}
	testkit.Eventually(t, "the log says what to write", func() bool {
		return strings.Contains(r.log.String(), `[\"127.0.0.1\"] into [mode.cloud.stream.server]`)
	})
}

// HTTP without TLS is answered as net/http answers it.
func TestPlainHTTP(t *testing.T) {
	r := start(t)
	c := r.dial()
	io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
	got := make([]byte, len(hello.PlainHTTPAnswer))
	if _, err := io.ReadFull(c, got); err != nil || string(got) != hello.PlainHTTPAnswer {
		t.Errorf("the answer is %q, %v", got, err)
	}
}

// Strangers that send no ClientHello have a bounded number of places, and time.
func TestStrangers(t *testing.T) {
	r := start(t, func(c *Config) { c.StrangersPerAddress, c.Timeout = 2, 3*time.Second })
	began := time.Now()
	var slow []net.Conn
	for range 2 {
		c := r.dial()
		io.WriteString(c, "\x16\x03\x01")
		slow = append(slow, c)
	}
	testkit.Eventually(t, "both have a place", func() bool { return r.strangers.Len() == 2 })
	over, err := net.Dial("tcp", r.Addr().String())
	if err == nil { // otherwise it was reset during Dial
		over.SetDeadline(time.Now().Add(patience))
		_, err = over.Read(make([]byte, 1))
		over.Close()
	}
	if !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the third connection ended with %v, want a reset", err)
	}
	if n := r.counters.LimitedBy(tunnel.LimitStrangersPerAddress); n != 1 {
		t.Errorf("the limit counts %d", n)
	}
	for _, c := range slow {
		if _, err := c.Read(make([]byte, 1)); err == nil {
			t.Error("a stranger is served")
		}
	}
	if took := time.Since(began); took < 2*time.Second || took > patience {
		t.Errorf("strangers had %v", took)
	}
	if n := r.counters.LimitedBy(tunnel.LimitHandshakeTimeout); n != 2 {
		t.Errorf("the time limit counts %d", n)
	}
}

// A module that has stopped gets no connections, and other modules do.
func TestOneModuleStops(t *testing.T) {
	r := start(t)
	r.Edges.Close()
	c := r.dial()
	err := tls.Client(c, &tls.Config{NextProtos: []string{"h2"}, InsecureSkipVerify: true}).Handshake()
	if !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the connection ended with %v, want a reset", err)
	}
	go tls.Client(r.dial(), &tls.Config{ServerName: "edge1", InsecureSkipVerify: true}).Handshake()
	r.accept(r.Callers)
}

// The stop of the port ends connections whose ClientHello has not come.
func TestStop(t *testing.T) {
	r := start(t)
	c := r.dial()
	io.WriteString(c, "\x16")
	testkit.Eventually(t, "it has a place", func() bool { return r.strangers.Len() == 1 })
	r.stop.Stop()
	if _, err := c.Read(make([]byte, 1)); err == nil {
		t.Error("the connection is open")
	}
	if err := r.Ready(); err == nil {
		t.Error("the port says that it is open")
	}
}

// A port that is taken is an error that says what to do.
func TestPortIsTaken(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	logger, _ := testkit.NewLog()
	p := New(Config{Listen: ln.Addr().String(), Strangers: 1, StrangersPerAddress: 1, Log: logger})
	if err := p.Run(context.Background()); err == nil || !strings.Contains(err.Error(), "ss -ltnp") {
		t.Errorf("error %v", err)
	}
}
