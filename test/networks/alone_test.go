package networks

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"net"
	"net/http"
	"sync"
	"testing"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/wsconn"
)

// TestRelaysAlone measures what a WebSocket behind an ingress leaves of the speed on this machine, without the tunnel.
// In place of cloud and edge, two relays copy bytes and speak TLS, and do nothing else. TestNetworks measures the same
// with the tunnel.
func TestRelaysAlone(t *testing.T) {
	bulk := 16 << 20
	if isWhole() {
		bulk = 1 << 30
	}
	var direct [2]float64 // seconds of the row "directly", up and down
	for _, row := range []struct {
		name string
		box  func(s *site) (addr string) // starts the ingress; nil: none
	}{
		{"directly", nil},
		{"nginx", func(s *site) string { return s.nginx("60s") }},
		{"HAProxy", func(s *site) string { return s.haproxy("60s") }},
	} {
		t.Run(row.name, func(t *testing.T) {
			up, down := relays(t, row.box).carries(bulk)
			took := [2]float64{up.Seconds(), down.Seconds()}
			if row.box == nil {
				direct = took
			}
			t.Logf("%s: %.2f up and %.2f down of the speed directly", row.name, direct[0]/took[0], direct[1]/took[1])
		})
	}
}

// relays starts two relays. The first one accepts callers at the site's door. For each caller, the second one connects
// to the first one by TLS, inside a WebSocket through the ingress if there is one, and to the target.
func relays(t *testing.T, box func(s *site) (addr string)) *site {
	t.Helper()
	s := &site{t: t, dir: t.TempDir(), target: testkit.NewTarget(t)}
	s.certify()
	accepted := make(chan net.Conn)
	dial := func() (net.Conn, error) { return net.Dial("tcp", s.web) }
	s.web = listenAll(t, func(c net.Conn) { accepted <- c })
	if box != nil {
		s.web = serveWebSockets(t, func(c net.Conn) { accepted <- c })
		ingress := box(s)
		dial = func() (net.Conn, error) {
			raw, err := net.Dial("tcp", ingress)
			if err != nil {
				return nil, err
			}
			return wsconn.Dial(t.Context(), tls.Client(raw, s.trust()), "wss://"+ingress+"/tunnel", "relay")
		}
	}
	server, client := s.boxTLS(), s.trust()
	s.door = listenAll(t, func(caller net.Conn) {
		go func() {
			c, err := dial()
			if err != nil {
				t.Error(err)
				return
			}
			target, err := net.Dial("tcp", s.target.Address())
			if err != nil {
				t.Error(err)
				return
			}
			relay(tls.Client(c, client), target)
		}()
		select {
		case c := <-accepted:
			relay(caller, tls.Server(c, server))
		case <-t.Context().Done():
			caller.Close()
		}
	})
	return s
}

// trust returns a configuration that trusts the CA of boxes.
func (s *site) trust() *tls.Config {
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(s.ca.CertPEM())
	return &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: pool, ServerName: "127.0.0.1"}
}

// listenAll calls handle for each connection to an address, which it returns.
func listenAll(t *testing.T, handle func(net.Conn)) (addr string) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go handle(c)
		}
	}()
	return ln.Addr().String()
}

// connKey is the key of a request's connection in its context.
type connKey struct{}

// serveWebSockets calls handle for each WebSocket to an address, which it returns.
func serveWebSockets(t *testing.T, handle func(net.Conn)) (addr string) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if c, err := wsconn.Accept(w, r, r.Context().Value(connKey{}).(net.Conn)); err == nil {
				handle(c)
			}
		}),
		ConnContext: func(ctx context.Context, c net.Conn) context.Context { return context.WithValue(ctx, connKey{}, c) },
	}
	t.Cleanup(func() { server.Close() })
	go server.Serve(ln)
	return ln.Addr().String()
}

// relay copies bytes between two connections in both directions until both have ended. A write is as long as a record
// of the tunnel's data connections.
func relay(a, b net.Conn) {
	var both sync.WaitGroup
	for _, way := range [][2]net.Conn{{a, b}, {b, a}} {
		both.Go(func() {
			io.CopyBuffer(struct{ io.Writer }{way[1]}, struct{ io.Reader }{way[0]}, make([]byte, 16348))
			way[1].(interface{ CloseWrite() error }).CloseWrite()
		})
	}
	both.Wait()
	a.Close()
	b.Close()
}
