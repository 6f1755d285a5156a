package auth

import (
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"net"
	"testing"
	"time"
)

// pairOf issues a certificate and its key.
func pairOf(t *testing.T, ca *CA, l Leaf) tls.Certificate {
	t.Helper()
	certPEM, keyPEM, err := ca.Issue(l)
	if err != nil {
		t.Fatal(err)
	}
	pair, err := tls.X509KeyPair(certPEM, keyPEM)
	if err != nil {
		t.Fatal(err)
	}
	return pair
}

// serverPair returns a server's certificate, with the CA's behind it, as a cloud presents them.
func serverPair(t *testing.T, ca *CA, l Leaf) tls.Certificate {
	t.Helper()
	pair := pairOf(t, ca, l)
	pair.Certificate = append(pair.Certificate, ca.cert.Raw)
	return pair
}

// handshake connects with cfg to a server with certificate cert, and writes something. It returns the
// error of the handshake, and how many bytes the server has read.
func handshake(t *testing.T, cfg *tls.Config, cert tls.Certificate, version uint16) (read int, err error) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	got := make(chan int, 1)
	go func() {
		conn, err := ln.Accept()
		if err != nil {
			got <- 0
			return
		}
		defer conn.Close()
		s := tls.Server(conn, &tls.Config{Certificates: []tls.Certificate{cert}, MaxVersion: version})
		n, _ := s.Read(make([]byte, 100))
		got <- n
	}()
	conn, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	c := tls.Client(conn, cfg)
	c.SetDeadline(time.Now().Add(10 * time.Second))
	_, err = c.Write([]byte("the secret"))
	if err != nil {
		conn.Close()
	}
	read = <-got
	c.Close()
	return read, err
}

func TestPinnedTLS(t *testing.T) {
	ca, other := newNodeCA(t), newNodeCA(t)
	server := Leaf{CommonName: "cloud", DNSNames: []string{"cloud.example"}, IPs: []net.IP{{10, 0, 0, 1}}, Server: true}
	client, expired := server, server
	client.Server, client.Client = false, true
	expired.TTL = -time.Second
	good := serverPair(t, ca.CA, server)
	alone := good
	alone.Certificate = good.Certificate[:1]
	stranger := serverPair(t, other.CA, server)
	stranger.Certificate = append(stranger.Certificate, ca.cert.Raw) // the CA certificate is public
	for _, tc := range []struct {
		name string
		cert tls.Certificate
		pin  []byte
		as   string
		ok   bool
		pins bool // the error is ErrPin
	}{
		{"good", good, ca.cert.Raw, "cloud.example", true, false},
		{"good by IP", good, ca.cert.Raw, "10.0.0.1", true, false},
		{"the server's own is pinned", alone, good.Certificate[0], "cloud.example", true, false},
		{"another name", good, ca.cert.Raw, "other.example", false, false},
		{"another CA", serverPair(t, other.CA, server), ca.cert.Raw, "cloud.example", false, true},
		{"another CA that shows ours", stranger, ca.cert.Raw, "cloud.example", false, true},
		{"no CA shown", alone, ca.cert.Raw, "cloud.example", false, true},
		{"a client's certificate", serverPair(t, ca.CA, client), ca.cert.Raw, "cloud.example", false, false},
		{"expired", serverPair(t, ca.CA, expired), ca.cert.Raw, "cloud.example", false, false},
	} {
		for _, version := range []uint16{tls.VersionTLS12, tls.VersionTLS13} {
			token := testJoinToken()
			token.CA, token.ServerName = sha256.Sum256(tc.pin), tc.as
			cfg, seen := PinnedTLS(token)
			read, err := handshake(t, cfg, tc.cert, version)
			if (err == nil) != tc.ok || errors.Is(err, ErrPin) != tc.pins {
				t.Errorf("%s: %v", tc.name, err)
			}
			if !tc.ok && read != 0 {
				t.Errorf("%s: the server has read %d bytes", tc.name, read)
			}
			want := string(encodePEM("CERTIFICATE", tc.pin))
			if tc.ok && string(seen()) != want || !tc.ok && seen() != nil {
				t.Errorf("%s: the CA is\n%s", tc.name, seen())
			}
		}
	}
	if _, err := verifyPinned(testJoinToken(), nil); !errors.Is(err, ErrPin) {
		t.Errorf("no certificate at all: %v", err)
	}
}
