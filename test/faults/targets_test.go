package faults

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"sync"
	"syscall"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/internal/testkit/testca"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/test/rig"
)

// targets are what the edge dials. They run in the test's own process, so they live
// on when a cloud or an edge dies.
type targets struct {
	echo  string // sends back what it gets
	bulk  string // see transfer
	hold  string // greets with one byte, then says nothing and reads to the end
	hang  string // never takes a connection
	https string // the node's HTTPS server

	release *gate // opens what hold has
}

// gate holds those who wait while it is shut.
type gate struct {
	mu   sync.Mutex    // guards the following
	open chan struct{} // closed: the gate is open
}

func newGate() *gate { return &gate{open: make(chan struct{})} }

func (g *gate) wait(ctx context.Context) {
	g.mu.Lock()
	open := g.open
	g.mu.Unlock()
	select {
	case <-open:
	case <-ctx.Done():
	}
}

// set opens the gate, or shuts it for those who come from now on.
func (g *gate) set(open bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	select {
	case <-g.open:
		if !open {
			g.open = make(chan struct{})
		}
	default:
		if open {
			close(g.open)
		}
	}
}

// page is what the HTTPS target answers.
func page() []byte { return rig.Noise[:4<<10] }

func newTargets(t *testing.T, ca *auth.CA) *targets {
	t.Helper()
	s := &targets{release: newGate()}
	hang, stopHanging, err := rig.FullBacklog()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stopHanging)
	s.hang = hang
	s.echo = serve(t, func(_ context.Context, c net.Conn) { io.Copy(c, c) })
	s.bulk = serve(t, func(_ context.Context, c net.Conn) { serveTransfer(c) })
	s.hold = serve(t, func(ctx context.Context, c net.Conn) {
		c.Write([]byte{'!'})
		io.Copy(io.Discard, c)
		s.release.wait(ctx) // a client that has half-closed is held as well
	})
	leaf := auth.Leaf{CommonName: rig.Node, DNSNames: []string{rig.Node}, Server: true}
	pair := testca.CA{CA: ca}.Pair(t, leaf)
	ln := listen(t)
	server := &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Write(page())
		}),
		TLSConfig: &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair}},
		// The front door keeps an idle conn to a kubelet for half a minute, which is
		// meant. Here such a conn ends soon, so that the baseline can be seen.
		ReadHeaderTimeout: 6 * time.Second,            // a busy machine takes two
		ErrorLog:          log.New(io.Discard, "", 0), // clients that go in the middle of a handshake
	}
	server.SetKeepAlivesEnabled(false)
	s.https = testkit.ServeTLS(t, ln, server)
	return s
}

// doors returns the TCP front doors: name → target.
func (s *targets) doors() map[string]string {
	return map[string]string{"echo": s.echo, "bulk": s.bulk, "hold": s.hold, "hang": s.hang}
}

func listen(t *testing.T) net.Listener {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return ln
}

// serve gives every connection to f until the test ends, and returns the address. f's
// context ends with the test.
func serve(t *testing.T, f func(ctx context.Context, c net.Conn)) string {
	t.Helper()
	return testkit.ServeOn(t, listen(t), f)
}

// transfer is a stream both ways at once. The client sends this and then Up bytes of
// noise; the target sends Down bytes of noise and the SHA-256 of the Up bytes. 0 is
// without end.
type transfer struct{ Up, Down, BytesPerSecond int64 }

// progress is told how many bytes of noise have arrived and were right.
type progress func(n int64)

// run is the client's side. It returns nil when everything has arrived both ways.
func (x transfer) run(c net.Conn, arrived progress) error {
	if err := binary.Write(c, binary.BigEndian, x); err != nil {
		return err
	}
	sent := make(chan error, 1) // one send, whether or not it is waited for
	want := sha256.New()
	go func() { sent <- rig.SendNoise(io.MultiWriter(c, want), x.Up, x.BytesPerSecond) }()
	if err := rig.CheckNoise(c, x.Down, arrived); err != nil {
		return orReset(err, sent)
	}
	if err := <-sent; err != nil {
		return err
	}
	got := make([]byte, sha256.Size)
	if _, err := io.ReadFull(c, got); err != nil {
		return fmt.Errorf("reading the hash: %w", err)
	}
	if !bytes.Equal(got, want.Sum(nil)) {
		return rig.ErrCorrupt
	}
	return nil
}

// orReset tells the end of input from a reset that the sender has got. Linux reports a
// reset once: the read beside the write that got it sees a clean end.
func orReset(err error, sent <-chan error) error {
	if !errors.Is(err, io.EOF) {
		return err
	}
	select {
	case werr := <-sent:
		if errors.Is(werr, syscall.ECONNRESET) {
			return werr
		}
	case <-time.After(5 * time.Second): // many times the pause between two writes
	}
	return err
}

// serveTransfer is the target's side.
func serveTransfer(c net.Conn) {
	var x transfer
	if err := binary.Read(c, binary.BigEndian, &x); err != nil {
		return
	}
	received := make(chan error, 1) // one send
	hash := sha256.New()
	go func() {
		_, err := io.Copy(hash, rig.Limited(c, x.Up))
		received <- err
	}()
	err := rig.SendNoise(c, x.Down, x.BytesPerSecond)
	if err := errors.Join(err, <-received); err == nil {
		c.Write(hash.Sum(nil))
	}
}
