package https

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"sync"
	"syscall"
	"testing"
	"time"

	"tunnel/pkg/tunnel"
)

// A reset of a TLS connection is one on the other side, also where a write gets it first.
func TestResetOfTLSIsNoEnd(t *testing.T) {
	ca := newCA(t, "ca")
	server := &tls.Config{Certificates: []tls.Certificate{*ca.issue("here", "here")}}
	roots := x509.NewCertPool()
	roots.AddCert(ca.cert)
	client := &tls.Config{RootCAs: roots, ServerName: "here"}

	var mu sync.Mutex
	clean := 0
	const rounds, workers = 600, 6
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for range rounds / workers {
				callerRaw, nearRaw := tcpPair(t)
				near := &tlsConn{Conn: tls.Server(nearRaw, server), raw: nearRaw}
				caller := tls.Client(callerRaw, client)
				target, b := tcpPair(t)
				spliced := make(chan struct{})
				go func() {
					tunnel.Splice(context.Background(), near, b)
					close(spliced)
				}()
				caller.Write([]byte("x"))
				io.ReadFull(target, make([]byte, 1))
				written := make(chan error, 1)
				go func() {
					_, err := io.Copy(struct{ io.Writer }{target}, zeros{})
					written <- err
				}()
				io.ReadFull(caller, make([]byte, 1000))
				tunnel.Reset(callerRaw)
				_, err := io.Copy(io.Discard, target)
				if err = errors.Join(err, <-written); !errors.Is(err, syscall.ECONNRESET) {
					mu.Lock()
					clean++
					mu.Unlock()
				}
				target.Close()
				<-spliced
			}
		})
	}
	wg.Wait()
	if clean > 0 {
		t.Errorf("%d of %d resets look like clean ends", clean, rounds)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }

// tcpPair is a TCP connection on loopback.
func tcpPair(t *testing.T) (dialled, accepted *net.TCPConn) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Error(err)
		return nil, nil
	}
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Error(err)
		return nil, nil
	}
	a, err := l.Accept()
	if err != nil {
		t.Error(err)
		return nil, nil
	}
	for _, c := range []net.Conn{c, a} {
		c.SetDeadline(time.Now().Add(time.Minute))
	}
	return c.(*net.TCPConn), a.(*net.TCPConn)
}
