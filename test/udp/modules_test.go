package udp

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"testing"
	"time"

	"github.com/quic-go/quic-go"
	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun/netstack"

	"golang.org/x/crypto/curve25519"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/test/rig"
)

// bulk is how many bytes QUIC and WireGuard carry each way.
const bulk = 32 << 20

// TestQUIC: quic-go carries 32 MiB each way, as several streams of one connection.
func TestQUIC(t *testing.T) {
	ca, err := rig.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	certPEM, keyPEM, err := ca.Issue(auth.Leaf{CommonName: "quic", DNSNames: []string{"quic.test"}, Server: true})
	if err != nil {
		t.Fatal(err)
	}
	cert, err := tls.X509KeyPair(certPEM, keyPEM)
	if err != nil {
		t.Fatal(err)
	}
	const alpn = "echo"
	l, err := quic.ListenAddr("127.0.0.1:0", &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{cert}, NextProtos: []string{alpn},
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept(context.Background())
			if err != nil {
				return
			}
			go func() {
				for {
					s, err := c.AcceptStream(context.Background())
					if err != nil {
						return
					}
					go func() {
						io.Copy(s, s)
						s.Close()
					}()
				}
			}()
		}
	}()
	p := forward(t, l.Addr().String(), congestion()...)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	roots := rig.EdgeTLS(ca.CertPEM()).RootCAs
	c, err := quic.DialAddr(ctx, p.door, &tls.Config{
		MinVersion: tls.VersionTLS13, RootCAs: roots, ServerName: "quic.test", NextProtos: []string{alpn},
	}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer c.CloseWithError(0, "")
	const streams = 4
	started, results := time.Now(), make(chan error, streams)
	for range streams {
		go func() {
			s, err := c.OpenStreamSync(ctx)
			if err == nil {
				err = exchange(s, bulk/streams)
			}
			results <- err
		}()
	}
	for range streams {
		if err := <-results; err != nil {
			t.Error(err)
		}
	}
	t.Logf("%.0f MiB/s each way", float64(bulk>>20)/time.Since(started).Seconds())
}

// exchange sends random bytes, which must come back.
func exchange(s interface {
	io.ReadWriter
	io.Closer
}, n int) error {
	sent := make([]byte, n)
	rand.Read(sent)
	failed := make(chan error, 1)
	go func() {
		_, err := s.Write(sent)
		if cw, ok := s.(interface{ CloseWrite() error }); ok {
			cw.CloseWrite()
		} else {
			s.Close() // of a QUIC stream: its sending side
		}
		failed <- err
	}()
	got, err := io.ReadAll(s)
	if werr := <-failed; werr != nil {
		return werr
	}
	if err == nil && !bytes.Equal(got, sent) {
		err = fmt.Errorf("%d of %d bytes came back", len(got), len(sent))
	}
	return err
}

// wireguard is one end of a WireGuard tunnel, with a network stack of its own.
type wireguard struct {
	device *device.Device
	net    *netstack.Net
	port   int
}

// newWireguard makes an end. peer is the other end's public key; endpoint its address, "": it calls.
func newWireguard(t *testing.T, own string, private, peer [32]byte, other, endpoint string, listen int) *wireguard {
	t.Helper()
	tun, stack, err := netstack.CreateNetTUN([]netip.Addr{netip.MustParseAddr(own)}, nil, 1420)
	if err != nil {
		t.Fatal(err)
	}
	d := device.NewDevice(tun, conn.NewDefaultBind(), device.NewLogger(device.LogLevelError, own+" "))
	config := fmt.Sprintf("private_key=%s\nlisten_port=%d\npublic_key=%s\nallowed_ip=%s/32\n",
		hex.EncodeToString(private[:]), listen, hex.EncodeToString(peer[:]), other)
	if endpoint != "" {
		config += "endpoint=" + endpoint + "\npersistent_keepalive_interval=5\n"
	}
	if err := d.IpcSet(config); err != nil {
		t.Fatal(err)
	}
	if err := d.Up(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Close)
	return &wireguard{device: d, net: stack, port: listen}
}

func newKey(t *testing.T) (private, public [32]byte) {
	t.Helper()
	rand.Read(private[:])
	b, err := curve25519.X25519(private[:], curve25519.Basepoint)
	if err != nil {
		t.Fatal(err)
	}
	copy(public[:], b)
	return private, public
}

// TestWireGuard: wireguard-go at both ends, with HTTP and 32 MiB each way over TCP inside.
func TestWireGuard(t *testing.T) {
	_, text := split(t, testkit.FreeAddress(t))
	var listen int
	fmt.Sscan(text, &listen)
	serverPrivate, serverPublic := newKey(t)
	clientPrivate, clientPublic := newKey(t)
	server := newWireguard(t, "10.9.0.1", serverPrivate, clientPublic, "10.9.0.2", "", listen)
	p := forward(t, fmt.Sprint("127.0.0.1:", listen), congestion()...)
	client := newWireguard(t, "10.9.0.2", clientPrivate, serverPublic, "10.9.0.1", p.door, 0)

	web, err := server.net.ListenTCP(&net.TCPAddr{Port: 80})
	if err != nil {
		t.Fatal(err)
	}
	defer web.Close()
	go http.Serve(web, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		io.WriteString(w, "hello from 10.9.0.1")
	}))
	echo, err := server.net.ListenTCP(&net.TCPAddr{Port: 7})
	if err != nil {
		t.Fatal(err)
	}
	defer echo.Close()
	go func() {
		for {
			c, err := echo.Accept()
			if err != nil {
				return
			}
			go func() {
				io.Copy(c, c)
				c.Close()
			}()
		}
	}()

	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	browser := &http.Client{Transport: &http.Transport{DialContext: client.net.DialContext}}
	testkit.Within(t, patience, "HTTP inside WireGuard", func() error {
		short, cancel := context.WithTimeout(ctx, 3*time.Second)
		defer cancel()
		r, err := http.NewRequestWithContext(short, http.MethodGet, "http://10.9.0.1/", nil)
		if err != nil {
			return err
		}
		answer, err := browser.Do(r)
		if err != nil {
			return err
		}
		defer answer.Body.Close()
		body, err := io.ReadAll(answer.Body)
		if err == nil && string(body) != "hello from 10.9.0.1" {
			err = fmt.Errorf("answer %q", body)
		}
		return err
	})
	c, err := client.net.DialContext(ctx, "tcp", "10.9.0.1:7")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	started := time.Now()
	if err := exchange(c, bulk); err != nil {
		t.Error(err)
	}
	t.Logf("%.0f MiB/s each way", float64(bulk>>20)/time.Since(started).Seconds())
}
