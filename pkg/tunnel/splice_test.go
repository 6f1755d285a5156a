package tunnel

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// tcpPair returns both ends of a TCP connection on loopback.
func tcpPair(t *testing.T) (a, b *net.TCPConn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	dialled, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	accepted, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	a, b = dialled.(*net.TCPConn), accepted.(*net.TCPConn)
	for _, c := range []*net.TCPConn{a, b} {
		c.SetDeadline(time.Now().Add(testTimeout))
		t.Cleanup(func() { c.Close() })
	}
	return a, b
}

// result is what Splice returns.
type result struct {
	aToB, bToA int64
	err        error
}

// spliced splices two TCP connections and returns their outer ends.
func spliced(t *testing.T, ctx context.Context) (client, server *net.TCPConn, done chan result) {
	t.Helper()
	client, a := tcpPair(t)
	server, b := tcpPair(t)
	// The spliced conns must have no deadline: Splice would take the timeout for an end.
	a.SetDeadline(time.Time{})
	b.SetDeadline(time.Time{})
	return client, server, splice(t, ctx, a, b)
}

func splice(t *testing.T, ctx context.Context, a, b net.Conn) chan result {
	t.Helper()
	done := make(chan result, 1)
	go func() {
		var r result
		r.aToB, r.bToA, r.err = Splice(ctx, a, b)
		done <- r
	}()
	return done
}

func wait(t *testing.T, done chan result) result {
	t.Helper()
	select {
	case r := <-done:
		return r
	case <-time.After(testTimeout):
		t.Fatal("Splice does not return")
		return result{}
	}
}

var data = bytes.Repeat([]byte("0123456789abcdef"), 64<<10) // 1 MiB

// Each direction ends on its own, in either order, and every byte arrives.
func TestSpliceHalfClose(t *testing.T) {
	for name, swap := range map[string]bool{"client first": false, "server first": true} {
		t.Run(name, func(t *testing.T) {
			client, server, done := spliced(t, t.Context())
			first, second := client, server
			if swap {
				first, second = server, client
			}
			go func() {
				first.Write(data)
				first.CloseWrite()
			}()
			if got, err := io.ReadAll(second); err != nil || !bytes.Equal(got, data) {
				t.Fatalf("%d of %d bytes before the half-close, %v", len(got), len(data), err)
			}
			go func() {
				second.Write(data[:100])
				second.Close()
			}()
			if got, err := io.ReadAll(first); err != nil || len(got) != 100 {
				t.Fatalf("%d of 100 bytes after the half-close, %v", len(got), err)
			}
			r := wait(t, done)
			aToB, bToA := int64(len(data)), int64(100)
			if swap {
				aToB, bToA = bToA, aToB
			}
			if r != (result{aToB, bToA, nil}) {
				t.Errorf("Splice returns %+v", r)
			}
		})
	}
}

// A reset of one side becomes a reset of the other, never a clean end, whichever side is
// reset and whatever the other side does.
func TestSpliceReset(t *testing.T) {
	for name, swap := range map[string]bool{"by the client": false, "by the server": true} {
		t.Run(name, func(t *testing.T) {
			for _, other := range []string{"reads", "writes", "has closed its half"} {
				t.Run("while the other "+other, func(t *testing.T) {
					client, server, done := spliced(t, t.Context())
					from, to := client, server
					if swap {
						from, to = server, client
					}
					written := make(chan error, 1)
					switch other {
					case "reads":
						from.Write(data[:1000])
						io.ReadFull(to, make([]byte, 1000))
					case "writes":
						go func() {
							_, err := io.Copy(struct{ io.Writer }{to}, endless{})
							written <- err
						}()
						io.ReadFull(from, make([]byte, 1000))
					case "has closed its half":
						to.CloseWrite()
						io.Copy(io.Discard, from)
					}
					Reset(from)
					_, err := io.Copy(io.Discard, to)
					if other == "writes" { // Linux reports a reset once: to the write or to the read
						err = errors.Join(err, <-written)
					}
					if !errors.Is(err, syscall.ECONNRESET) {
						t.Errorf("the other side sees %v, want a reset", err)
					}
					if r := wait(t, done); r.err == nil {
						t.Error("Splice reports a clean end")
					}
				})
			}
		})
	}
}

// endless is a reader that never ends.
type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

// The end of the context resets both sides, also while no bytes move.
func TestSpliceContextDone(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	client, server, done := spliced(t, ctx)
	go client.Write(data[:10])
	io.ReadFull(server, make([]byte, 10))
	cancel()
	for name, c := range map[string]net.Conn{"client": client, "server": server} {
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("the %s reads %v, want a reset", name, err)
		}
	}
	if r := wait(t, done); r.err == nil || r.aToB != 10 {
		t.Errorf("Splice returns %+v", r)
	}
}

// With a context that is already done, Splice copies nothing.
func TestSpliceContextDoneBefore(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	client, _, done := spliced(t, ctx)
	if _, err := client.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the client reads %v, want a reset", err)
	}
	wait(t, done)
}

// fake is a tunnel conn that records its callbacks and the calls of Reset.
type fake struct {
	net.Conn
	mu      sync.Mutex // guards the following
	onReset func()
	onStop  func()
	resets  int
}

// CloseWrite half-closes the inner conn if that is a TCP conn.
func (f *fake) CloseWrite() error { return closeOutput(f.Conn) }

func closeOutput(c net.Conn) error {
	if cw, ok := c.(halfCloser); ok {
		return cw.CloseWrite()
	}
	return c.Close()
}

func (f *fake) OnReset(g func()) { f.mu.Lock(); f.onReset = g; f.mu.Unlock() }
func (f *fake) OnStop(g func())  { f.mu.Lock(); f.onStop = g; f.mu.Unlock() }

func (f *fake) Reset() error {
	f.mu.Lock()
	f.resets++
	f.mu.Unlock()
	return f.Close()
}

// call waits until Splice has registered its callback, and calls it.
func (f *fake) call(t *testing.T, which func() func()) {
	t.Helper()
	for end := time.Now().Add(testTimeout); time.Now().Before(end); time.Sleep(time.Millisecond) {
		f.mu.Lock()
		g := which()
		f.mu.Unlock()
		if g != nil {
			g()
			return
		}
	}
	t.Fatal("Splice has registered nothing")
}

// When a tunnel conn is aborted while no goroutine reads it, Splice resets the other side.
func TestSpliceOnReset(t *testing.T) {
	client, a := tcpPair(t)
	far, near := net.Pipe()
	defer far.Close()
	f := &fake{Conn: near}
	done := splice(t, t.Context(), a, f)
	f.call(t, func() func() { return f.onReset })
	if _, err := client.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the client reads %v, want a reset", err)
	}
	if r := wait(t, done); r.err == nil || f.resets == 0 {
		t.Errorf("Splice returns %+v after %d resets of the tunnel's side", r, f.resets)
	}
}

// When a tunnel conn takes no more bytes, Splice stops reading from the silent peer, with and
// without CloseRead. Bytes that the tunnel conn still sends arrive, and neither side is reset.
func TestSpliceOnStop(t *testing.T) {
	for name, wrap := range map[string]func(net.Conn) net.Conn{
		"with CloseRead":    func(c net.Conn) net.Conn { return c },
		"without CloseRead": func(c net.Conn) net.Conn { return struct{ halfCloser }{c.(*net.TCPConn)} },
	} {
		t.Run(name, func(t *testing.T) {
			client, a := tcpPair(t)
			server, b := tcpPair(t)
			f := &fake{Conn: b}
			done := splice(t, t.Context(), wrap(a), f)
			f.call(t, func() func() { return f.onStop })
			server.Write(data[:1000])
			server.Close()
			if got, err := io.ReadAll(client); err != nil || len(got) != 1000 {
				t.Errorf("%d of 1000 bytes arrive, %v", len(got), err)
			}
			if r := wait(t, done); r.bToA != 1000 || errors.Is(r.err, syscall.ECONNRESET) || f.resets != 0 {
				t.Errorf("Splice returns %+v after %d resets", r, f.resets)
			}
		})
	}
}

// halfCloser is a conn that can close its write side and nothing else.
type halfCloser interface {
	net.Conn
	CloseWrite() error
}

// If one side cannot half-close, Splice closes it when the other side's bytes end. The bytes have
// arrived, and the other side gets a reset, since an answer may be missing.
func TestSpliceWithoutCloseWrite(t *testing.T) {
	client, a := tcpPair(t)
	far, near := net.Pipe()
	done := splice(t, t.Context(), a, near)
	go func() {
		client.Write(data[:1000])
		client.CloseWrite()
	}()
	if got, err := io.ReadAll(far); err != nil || len(got) != 1000 {
		t.Errorf("%d of 1000 bytes arrive, %v", len(got), err)
	}
	if _, err := client.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the client reads %v, want a reset", err)
	}
	if r := wait(t, done); r.aToB != 1000 {
		t.Errorf("Splice returns %+v", r)
	}
}

// When the server has closed, the client's upload fails, and the bytes that the server
// sent before still arrive.
func TestSpliceWriteFails(t *testing.T) {
	client, server, done := spliced(t, t.Context())
	server.Write([]byte("too large"))
	got := make([]byte, 9)
	if _, err := io.ReadFull(client, got); err != nil {
		t.Fatal(err)
	}
	server.Close()
	_, err := io.Copy(struct{ io.Writer }{client}, endless{})
	if !errors.Is(err, syscall.EPIPE) && !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the upload ends with %v", err)
	}
	if r := wait(t, done); r.bToA != 9 || !errors.Is(r.err, syscall.EPIPE) && !errors.Is(r.err, syscall.ECONNRESET) {
		t.Errorf("Splice returns %+v; want the upload's error", r)
	}
}

// Reset of a TLS connection sends a TCP reset, not a close_notify alert, and does not wait for
// the peer.
func TestResetOfTLS(t *testing.T) {
	raw, far := tcpPair(t)
	start := time.Now()
	Reset(tls.Client(raw, &tls.Config{InsecureSkipVerify: true}))
	if _, err := far.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the peer reads %v, want a reset", err)
	}
	if d := time.Since(start); d > 4500*time.Millisecond { // package tls would wait for five seconds
		t.Errorf("it took %s", d)
	}
}

// broken is a conn whose Read panics.
type broken struct{ *net.TCPConn }

func (broken) Read([]byte) (int, error)         { panic("a fault in Read") }
func (broken) WriteTo(io.Writer) (int64, error) { panic("a fault in Read") }

// A panic in either direction resets both ends and reaches the goroutine that called Splice,
// whose guard counts it.
func TestSplicePanic(t *testing.T) {
	for name, order := range map[string]func(bad, good net.Conn) (a, b net.Conn){
		"from a to b": func(bad, good net.Conn) (a, b net.Conn) { return bad, good },
		"from b to a": func(bad, good net.Conn) (a, b net.Conn) { return good, bad },
	} {
		t.Run(name, func(t *testing.T) {
			client, x := tcpPair(t)
			server, y := tcpPair(t)
			x.SetDeadline(time.Time{})
			y.SetDeadline(time.Time{})
			a, b := order(broken{x}, y)
			var counters Counters
			err := Guard(slog.New(slog.DiscardHandler), &counters, "the conn ends", func() error {
				Splice(context.Background(), a, b)
				return nil
			})
			if err == nil || !strings.Contains(err.Error(), "a fault in Read") || counters.Panics.Load() != 1 {
				t.Errorf("%v, %d panics counted", err, counters.Panics.Load())
			}
			for _, c := range []net.Conn{client, server} {
				if _, err := io.ReadAll(c); !errors.Is(err, ErrReset) {
					t.Errorf("an end sees %v", err)
				}
			}
		})
	}
}
