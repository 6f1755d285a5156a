package https

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

// tlsTarget is a TLS server that answers each connection with the caller's name.
func tlsTarget(t *testing.T, at string, cfg *tls.Config) string {
	t.Helper()
	l, err := tls.Listen("tcp", at, cfg)
	must(t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			tc := c.(*tls.Conn)
			if tc.Handshake() == nil {
				io.WriteString(c, tc.ConnectionState().PeerCertificates[0].Subject.CommonName+" ")
				io.Copy(c, c)
			}
			c.Close()
		}
	}()
	t.Cleanup(func() {
		l.Close()
		<-done
	})
	return l.Addr().String()
}

func TestEdge(t *testing.T) {
	ca, other := newCA(t, "ca"), newCA(t, "other")
	client := always(ca.issue("edge-client"))
	target := func(t *testing.T) string {
		return tlsTarget(t, "127.0.0.1:0", &tls.Config{
			Certificates: []tls.Certificate{*ca.issue("edge1", "edge1")},
			ClientAuth:   tls.RequireAnyClientCert,
		})
	}
	talk := func(t *testing.T, e *Edge, node tunnel.NodeName) error {
		t.Helper()
		c, err := e.Dial(context.Background(), tunnel.Request{Node: node, Network: "tls", Addr: target(t)})
		if err != nil {
			return err
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(patience))
		_, err = io.WriteString(c, "hello")
		must(t, err)
		must(t, c.(interface{ CloseWrite() error }).CloseWrite())
		if b, err := io.ReadAll(c); err != nil || string(b) != "edge-client hello" {
			t.Errorf("got %q, %v", b, err)
		}
		return nil
	}
	wantCode := func(t *testing.T, err error, code tunnel.Code, word string) {
		t.Helper()
		if err == nil || tunnel.CodeOf(err) != code || !strings.Contains(err.Error(), word) {
			t.Errorf("error %v, want %v with %q", err, code, word)
		}
	}
	t.Run("self-signed on loopback", func(t *testing.T) { must(t, talk(t, NewEdge(dialTCP, client, nil), "edge1")) })
	t.Run("verified", func(t *testing.T) { must(t, talk(t, NewEdge(dialTCP, client, ca.pool), "edge1")) })
	t.Run("other name", func(t *testing.T) {
		wantCode(t, talk(t, NewEdge(dialTCP, client, ca.pool), "edge2"), tunnel.Denied, "not edge2")
	})
	t.Run("other CA", func(t *testing.T) {
		wantCode(t, talk(t, NewEdge(dialTCP, client, other.pool), "edge1"), tunnel.Denied, "unknown authority")
	})
	t.Run("no certificate", func(t *testing.T) {
		wantCode(t, talk(t, NewEdge(dialTCP, nil, nil), "edge1"), tunnel.Denied,
			"set cert and key in [mode.edge.https]")
	})
	t.Run("unknown network", func(t *testing.T) {
		_, err := NewEdge(dialTCP, nil, nil).Dial(context.Background(), tunnel.Request{Network: "udp"})
		wantCode(t, err, tunnel.Denied, "udp")
	})
	t.Run("tcp", func(t *testing.T) {
		c, err := NewEdge(dialTCP, nil, nil).Dial(context.Background(), tunnel.Request{Network: "tcp", Addr: target(t)})
		must(t, err)
		if _, ok := c.(*net.TCPConn); !ok {
			t.Errorf("got a %T", c)
		}
		c.Close()
	})
	t.Run("dial fails", func(t *testing.T) {
		e := NewEdge(func(context.Context, tunnel.Request) (net.Conn, error) {
			return nil, tunnel.Refusef(tunnel.Refused, "nobody there")
		}, client, nil)
		wantCode(t, talk(t, e, "edge1"), tunnel.Refused, "nobody there")
	})
	t.Run("not TLS", func(t *testing.T) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		must(t, err)
		defer l.Close()
		go func() {
			if c, err := l.Accept(); err == nil {
				io.WriteString(c, "SSH-2.0-OpenSSH\r\n")
				io.Copy(io.Discard, c)
				c.Close()
			}
		}()
		_, err = NewEdge(dialTCP, client, nil).Dial(context.Background(),
			tunnel.Request{Network: "tls", Addr: l.Addr().String()})
		wantCode(t, err, tunnel.Internal, "does not look like a TLS handshake")
	})
	t.Run("silent", func(t *testing.T) {
		here, there := net.Pipe()
		defer there.Close()
		dial := func(context.Context, tunnel.Request) (net.Conn, error) { return addrConn{here, "127.0.0.1:1"}, nil }
		e := NewEdge(dial, client, nil)
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Millisecond)
		defer cancel()
		_, err := e.Dial(ctx, tunnel.Request{Network: "tls", Addr: "127.0.0.1:1"})
		wantCode(t, err, tunnel.Timeout, "127.0.0.1:1")
	})
}

// Without a CA only targets on this machine's own addresses are trusted.
func TestEdgeTrust(t *testing.T) {
	own := func() ([]net.Addr, error) {
		return []net.Addr{
			&net.IPNet{IP: net.IPv4(10, 0, 0, 5), Mask: net.CIDRMask(8, 32)},
			&net.IPNet{IP: net.ParseIP("fd00::5"), Mask: net.CIDRMask(64, 128)},
		}, nil
	}
	for addr, want := range map[string]bool{
		"127.0.0.1:10250": true, "[::1]:10250": true, "10.0.0.5:10250": true,
		"[fd00::5]:10250": true, "[::ffff:10.0.0.5]:10250": true,
		"10.0.0.6:10250": false, "[fd00::6]:10250": false, "[fe80::1%eth0]:1": false, "pipe": false,
	} {
		here, there := net.Pipe()
		there.Close()
		dial := func(context.Context, tunnel.Request) (net.Conn, error) { return addrConn{here, addr}, nil }
		e := NewEdge(dial, always(newCA(t, "ca").issue("c")), nil)
		e.localAddrs = own
		_, err := e.Dial(context.Background(), tunnel.Request{Network: "tls", Addr: addr})
		if denied := tunnel.CodeOf(err) == tunnel.Denied; denied == want {
			t.Errorf("%s: %v", addr, err)
		}
	}
}

func TestEdgeIsAModule(t *testing.T) {
	e := NewEdge(dialTCP, nil, nil)
	router, err := tunnel.NewRouter(e)
	must(t, err)
	if got := router.Routes(); len(got) != 1 || got[0] != "https/open" {
		t.Errorf("routes %q", got)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	must(t, e.Run(ctx))
}

// addrConn is a conn with a made-up remote address.
type addrConn struct {
	net.Conn
	at string
}

func (c addrConn) RemoteAddr() net.Addr { return addr(c.at) }

type addr string

func (a addr) Network() string { return "tcp" }
func (a addr) String() string  { return string(a) }
