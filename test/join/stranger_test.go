package join

import (
	"crypto/sha256"
	"crypto/tls"
	"encoding/pem"
	"net"
	"sync"
	"testing"
	"time"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/test/rig"
)

// stranger answers in the cloud's place, and notes every byte that it is sent, with TLS
// around it and without.
type stranger struct {
	address string

	mu    sync.Mutex // guards the following
	bytes []byte
	shook bool // a handshake was completed
}

func (s *stranger) heard() (bytes string, shook bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return string(s.bytes), s.shook
}

func (s *stranger) note(p []byte, shook bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.bytes = append(s.bytes, p...)
	s.shook = s.shook || shook
}

// listen answers the first bytes of each connection by a function.
func listen(t *testing.T, answer func(net.Conn)) *stranger {
	t.Helper()
	return serve(t, func(c net.Conn, _ *stranger) {
		if _, err := c.Read(make([]byte, 16<<10)); err == nil {
			answer(c)
		}
	})
}

// listenTLS is a server with a certificate by ca, and others behind it.
func listenTLS(t *testing.T, ca *auth.CA, leaf auth.Leaf, behind ...[]byte) *stranger {
	t.Helper()
	cert, key, err := ca.Issue(leaf)
	if err != nil {
		t.Fatal(err)
	}
	for _, more := range behind {
		cert = append(cert, more...)
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	cfg := &tls.Config{Certificates: []tls.Certificate{pair}, NextProtos: []string{"h2"}, MinVersion: tls.VersionTLS12}
	return serve(t, func(c net.Conn, s *stranger) {
		tc := tls.Server(c, cfg)
		for buf := make([]byte, 16<<10); ; {
			n, err := tc.Read(buf)
			s.note(buf[:n], tc.ConnectionState().HandshakeComplete)
			if err != nil {
				return
			}
		}
	})
}

func serve(t *testing.T, answer func(net.Conn, *stranger)) *stranger {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &stranger{address: ln.Addr().String()}
	var serving sync.WaitGroup
	t.Cleanup(func() {
		ln.Close()
		serving.Wait()
	})
	serving.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				defer c.Close()
				c.SetDeadline(time.Now().Add(soon))
				answer(noting{c, s}, s)
			})
		}
	})
	return s
}

// noting is a connection of a stranger, which notes what is read.
type noting struct {
	net.Conn
	s *stranger
}

func (n noting) Read(p []byte) (int, error) {
	k, err := n.Conn.Read(p)
	n.s.note(p[:k], false)
	return k, err
}

func newCA(t *testing.T) *auth.CA {
	t.Helper()
	ca, err := rig.NewCA()
	if err != nil {
		t.Fatal(err)
	}
	return ca
}

// sumOf is what a join token holds of an authority.
func sumOf(t *testing.T, text []byte) [32]byte {
	t.Helper()
	block, _ := pem.Decode(text)
	if block == nil {
		t.Fatal("no certificate")
	}
	return sha256.Sum256(block.Bytes)
}
