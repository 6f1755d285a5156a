package stream

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/nettest"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/conn"
	"tunnel.example/tunnel/pkg/tunnel"
)

// connPair makes a conn on the cloud and the target's end of it.
func (r *rig) connPair() (cloud, edge net.Conn, stop func(), err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, nil, nil, err
	}
	defer l.Close()
	cloud, err = r.dial("edge1", l.Addr().String())
	if err != nil {
		return nil, nil, nil, err
	}
	edge, err = l.Accept()
	if err != nil {
		return nil, nil, nil, err
	}
	return cloud, edge, func() { cloud.Close(); edge.Close() }, nil
}

// TestConn runs the net package's conformance suite through the whole tunnel, both
// ways round.
func TestConn(t *testing.T) {
	eachWay(t, func(t *testing.T, r *rig) {
		e := r.join("edge1", direct)
		t.Run("cloud first", func(t *testing.T) {
			nettest.TestConn(t, func() (c1, c2 net.Conn, stop func(), err error) { return r.connPair() })
		})
		t.Run("edge first", func(t *testing.T) {
			nettest.TestConn(t, func() (c1, c2 net.Conn, stop func(), err error) {
				c2, c1, stop, err = r.connPair()
				return
			})
		})
		r.idle(e)
	})
}

var sizes = []int{0, 1, 4 << 10, conn.MaxPayload, conn.MaxPayload + 1, 4 << 20}

func blob(n int) []byte {
	b := make([]byte, n)
	var seed [32]byte
	rand.NewChaCha8(seed).Read(b)
	return b
}

// Every byte before a close arrives, both ways, whatever the size.
func TestBytesBeforeCloseArrive(t *testing.T) { eachWay(t, bytesBeforeCloseArrive) }

func bytesBeforeCloseArrive(t *testing.T, r *rig) {
	e := r.join("edge1", direct)
	for _, n := range sizes {
		want := blob(n)
		c, far := r.pair("edge1")
		go func() {
			c.Write(want)
			c.Close()
		}()
		if got := testkit.ReadAll(t, far); !bytes.Equal(got, want) {
			t.Errorf("cloud to edge: %d of %d bytes arrived", len(got), n)
		}
		far.Close()

		c, far = r.pair("edge1")
		go func() {
			far.Write(want)
			far.Close()
		}()
		if got := testkit.ReadAll(t, c); !bytes.Equal(got, want) {
			t.Errorf("edge to cloud: %d of %d bytes arrived", len(got), n)
		}
		c.Close()
	}
	r.idle(e)
}

// A direction ends by itself; the other goes on.
func TestHalfClose(t *testing.T) { eachWay(t, halfClose) }

func halfClose(t *testing.T, r *rig) {
	e := r.join("edge1", direct)
	ask, answer := blob(100<<10), blob(200<<10)
	for name, swap := range map[string]bool{"cloud closes first": false, "edge closes first": true} {
		t.Run(name, func(t *testing.T) {
			c, far := r.pair("edge1")
			var first, second net.Conn = c, far
			if swap {
				first, second = far, c
			}
			go func() {
				first.Write(ask)
				first.(interface{ CloseWrite() error }).CloseWrite()
			}()
			if got := testkit.ReadAll(t, second); !bytes.Equal(got, ask) {
				t.Fatalf("%d of %d bytes arrived before the half-close", len(got), len(ask))
			}
			go func() {
				second.Write(answer)
				second.Close()
			}()
			if got := testkit.ReadAll(t, first); !bytes.Equal(got, answer) {
				t.Fatalf("%d of %d bytes arrived after the half-close", len(got), len(answer))
			}
		})
	}
	r.idle(e)
}

// A reset of one end is a reset at the other, never a clean end.
func TestReset(t *testing.T) { eachWay(t, reset) }

func reset(t *testing.T, r *rig) {
	e := r.join("edge1", direct)
	t.Run("target resets", func(t *testing.T) {
		c, far := r.pair("edge1")
		c.Write([]byte("x"))
		io.ReadFull(far, make([]byte, 1))
		far.SetLinger(0)
		far.Close()
		_, err := c.Read(make([]byte, 1))
		wantErr(t, "cloud's read", err, syscall.ECONNRESET)
	})
	t.Run("caller resets", func(t *testing.T) {
		c, far := r.pair("edge1")
		c.Write([]byte("x"))
		io.ReadFull(far, make([]byte, 1))
		tunnel.Reset(c)
		far.SetReadDeadline(time.Now().Add(patience))
		_, err := far.Read(make([]byte, 1))
		wantErr(t, "target's read", err, syscall.ECONNRESET)
	})
	t.Run("caller resets while the edge reads nothing", func(t *testing.T) {
		c, far := r.pair("edge1")
		far.SetReadBuffer(4 << 10)
		c.SetWriteDeadline(time.Now().Add(300 * time.Millisecond))
		n, err := io.Copy(struct{ io.Writer }{c}, rand.NewChaCha8([32]byte{}))
		var timeout net.Error
		if !errors.As(err, &timeout) || !timeout.Timeout() {
			t.Fatalf("writing to a reader that stalls: %d bytes, error %v; want a timeout", n, err)
		}
		tunnel.Reset(c)
		far.SetReadDeadline(time.Now().Add(patience))
		_, err = io.Copy(io.Discard, far)
		wantErr(t, "target's read", err, syscall.ECONNRESET)
	})
	r.idle(e)
}

// When the caller has closed for good, the target's writes fail instead of filling
// buffers for ever.
func TestCallerGone(t *testing.T) { eachWay(t, callerGone) }

func callerGone(t *testing.T, r *rig) {
	e := r.join("edge1", direct)
	c, far := r.pair("edge1")
	c.Close()
	far.SetWriteDeadline(time.Now().Add(patience))
	_, err := io.Copy(struct{ io.Writer }{far}, rand.NewChaCha8([32]byte{}))
	if !errors.Is(err, syscall.EPIPE) && !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("target writes to a caller that has gone: %v, want a broken pipe", err)
	}
	far.Close()
	r.idle(e)
}

// A caller that has gone leaves nothing behind, also where the target is silent and
// keeps its end open: who never writes would never learn that nobody reads.
func TestCallerGoneTargetSilent(t *testing.T) { eachWay(t, callerGoneTargetSilent) }

func callerGoneTargetSilent(t *testing.T, r *rig) {
	e := r.join("edge1", direct)
	c, far := r.pair("edge1")
	c.Write([]byte("the last words"))
	c.Close()
	if got := testkit.ReadAll(t, far); string(got) != "the last words" {
		t.Errorf("%q arrived before the close", got)
	}
	r.idle(e)
}

// Both directions move at once, and one that is stuck does not hold up the other.
func TestFullDuplex(t *testing.T) { eachWay(t, fullDuplex) }

func fullDuplex(t *testing.T, r *rig) {
	e := r.join("edge1", direct)
	c, far := r.pair("edge1")
	data := blob(8 << 20)
	sum := sha256.Sum256(data)
	done := make(chan error, 2)
	send := func(w net.Conn) {
		_, err := w.Write(data)
		w.(interface{ CloseWrite() error }).CloseWrite()
		done <- err
	}
	go send(c)
	go send(far) // neither reads before both write
	for _, rd := range []io.Reader{far, c} {
		h := sha256.New()
		if _, err := io.Copy(h, rd); err != nil || [32]byte(h.Sum(nil)) != sum {
			t.Errorf("bytes differ, error %v", err)
		}
	}
	for range 2 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	c.Close()
	far.Close()
	r.idle(e)
}

// A reader that stalls holds its own window and nobody else's.
func TestStalledReadersLeaveOthersAlone(t *testing.T) { eachWay(t, stalledReadersLeaveOthersAlone) }

func stalledReadersLeaveOthersAlone(t *testing.T, r *rig) {
	e := r.join("edge1", direct)
	var stalled []net.Conn
	for range 20 { // of 1 MiB each: more than the connection's window
		c, far := r.pair("edge1")
		stalled = append(stalled, c)
		go io.Copy(far, rand.NewChaCha8([32]byte{}))
		go io.Copy(struct{ io.Writer }{c}, rand.NewChaCha8([32]byte{}))
	}
	c, far := r.pair("edge1")
	data := blob(4 << 20)
	go func() {
		far.Write(data)
		far.Close()
	}()
	if got := testkit.ReadAll(t, c); !bytes.Equal(got, data) {
		t.Errorf("%d of %d bytes arrived beside stalled readers", len(got), len(data))
	}
	c.Close()
	for _, s := range stalled {
		tunnel.Reset(s)
	}
	r.idle(e)
}

// A lost session resets its conns at both ends, also where half of one has ended.
func TestSessionLost(t *testing.T) {
	r := newRig(t)
	e := r.join("edge1", direct)
	c1, far1 := r.pair("edge1")
	c2, far2 := r.pair("edge1")
	c2.(interface{ CloseWrite() error }).CloseWrite()
	testkit.ReadAll(t, far2)
	r.dir.Lookup("edge1").Close(errors.New("cut by the test"))
	for name, c := range map[string]net.Conn{"cloud's": c1, "target's": far1, "cloud's half-closed": c2} {
		c.SetReadDeadline(time.Now().Add(patience))
		_, err := c.Read(make([]byte, 1))
		wantErr(t, name+" read", err, syscall.ECONNRESET)
	}
	r.eventually("the target that was half-closed cannot write any more", func() bool {
		_, err := far2.Write([]byte("x"))
		return err != nil
	})
	r.eventually("the edge comes back", func() bool { return r.dir.Holds("edge1") && e.client.Ready() == nil })
	r.idle(e)
}

// Small writes are delivered without waiting for more.
func TestSmallWritesAreNotHeldBack(t *testing.T) {
	r := newRig(t)
	r.join("edge1", direct)
	c, far := r.pair("edge1")
	go io.Copy(far, far)
	buf := make([]byte, 3)
	for range 100 {
		c.SetDeadline(time.Now().Add(patience))
		if _, err := c.Write([]byte("abc")); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c, buf); err != nil || string(buf) != "abc" {
			t.Fatalf("echo gave %q, %v", buf, err)
		}
	}
}

// What a caller has read before it splices is not lost, and WriteTo goes on from it.
func TestSpliceAfterRead(t *testing.T) {
	r := newRig(t)
	r.join("edge1", direct)
	c, far := r.pair("edge1")
	go func() {
		far.Write([]byte("hello, world"))
		far.Close()
	}()
	first := make([]byte, 5)
	if _, err := io.ReadFull(c, first); err != nil {
		t.Fatal(err)
	}
	var rest bytes.Buffer
	if _, err := c.(io.WriterTo).WriteTo(&rest); err != nil || string(first)+rest.String() != "hello, world" {
		t.Errorf("got %q and %q, error %v", first, &rest, err)
	}
}

func TestDialGivesUp(t *testing.T) {
	r := newRig(t)
	dialing, cancelled := make(chan struct{}), make(chan struct{})
	e := r.join("edge1", func(ctx context.Context, _ tunnel.Request) (net.Conn, error) {
		close(dialing)
		<-ctx.Done()
		close(cancelled)
		return nil, ctx.Err()
	})
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		<-dialing
		cancel()
	}()
	_, err := r.dir.Dial(ctx, tunnel.Request{Node: "edge1", Category: "tcp", Network: "tcp", Addr: "x:1"})
	if err == nil || tunnel.CodeOf(err) != tunnel.Gone {
		t.Errorf("a dial that was cancelled: %v, want gone", err)
	}
	select {
	case <-cancelled:
	case <-time.After(patience):
		t.Error("the edge goes on dialling for a caller that has gone")
	}
	r.idle(e)
}
