package stream

import (
	"bytes"
	"io"
	"net"
	"syscall"
	"testing"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/conn"
	"tunnel.example/tunnel/pkg/tunnel"
)

// A reset stays behind the bytes that were sent before it, as TCP has it when nothing is lost:
// a server that answers early and closes with unread input is understood.
func TestResetStaysBehindTheBytes(t *testing.T) { eachWay(t, resetStaysBehindTheBytes) }

func resetStaysBehindTheBytes(t *testing.T, r *rig) {
	e := r.join("edge1", direct)
	want := blob(conn.MaxPayload + 100)
	const rounds = 50
	lost := 0
	for range rounds {
		c, far := r.pair("edge1")
		go far.Write(want) // the reset follows at once
		io.ReadFull(c, make([]byte, 1))
		far.SetLinger(0)
		far.Close()
		_, err := io.Copy(io.Discard, c)
		wantErr(t, "the caller's read", err, syscall.ECONNRESET)
	}
	for range rounds {
		began := time.Now()
		c, far := r.pair("edge1")
		c.Write([]byte("more than the target reads"))
		io.ReadFull(far, make([]byte, 1))
		written := make(chan struct{})
		go func() {
			far.Write(want)
			far.Close() // a reset: input is unread
			close(written)
		}()
		<-written
		got, err := io.ReadAll(c)
		wantErr(t, "the caller's read", err, syscall.ECONNRESET)
		if !bytes.Equal(got, want) && time.Since(began) < resetWaits { // else the reset need not wait any more
			lost++
		}
	}
	if lost > 0 {
		t.Errorf("%d of %d callers do not get the target's whole answer", lost, rounds)
	}
	r.idle(e)
}

// The same from the caller's side, through what front doors do.
func TestCallersResetStaysBehindTheBytes(t *testing.T) {
	eachWay(t, func(t *testing.T, r *rig) {
		e := r.join("edge1", direct)
		want := blob(conn.MaxPayload + 100)
		for range 50 {
			began := time.Now()
			c, far := r.pair("edge1")
			caller, near := socketPair(t)
			spliced := make(chan struct{})
			go func() {
				tunnel.Splice(t.Context(), near, c)
				close(spliced)
			}()
			far.Write([]byte("xy"))
			io.ReadFull(caller, make([]byte, 1)) // y stays unread, so that its close is a reset
			caller.Write(want)
			caller.Close()
			got, err := io.ReadAll(far)
			wantErr(t, "the target's read", err, syscall.ECONNRESET)
			if !bytes.Equal(got, want) && time.Since(began) < resetWaits {
				t.Fatalf("the target gets %d of %d bytes before the reset", len(got), len(want))
			}
			<-spliced
		}
		r.idle(e)
	})
}

// What Write has taken arrives before the reset, though it was not sent yet.
func TestWrittenThenReset(t *testing.T) {
	eachWay(t, func(t *testing.T, r *rig) {
		e := r.join("edge1", direct)
		for range 30 {
			began := time.Now()
			c, far := r.pair("edge1")
			c.Write([]byte("hello"))
			c.(interface{ ResetBehind() }).ResetBehind()
			got, err := io.ReadAll(far)
			wantErr(t, "the target's read", err, syscall.ECONNRESET)
			if string(got) != "hello" && time.Since(began) < resetWaits {
				t.Fatalf("the target gets %q before the reset", got)
			}
		}
		r.idle(e)
	})
}

// resetWaits is how long a reset waits behind bytes that the other side does not take (abortTime of pkg/conn). What a
// busy machine has not read by then is rightly lost.
const resetWaits = time.Second

// socketPair is a TCP connection on loopback.
func socketPair(t *testing.T) (a, b *net.TCPConn) {
	t.Helper()
	l := testkit.NewTarget(t)
	c, err := net.Dial("tcp", l.Address())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c.(*net.TCPConn), l.Next(t)
}

// A reset does not wait for longer than resetWaits behind bytes that nobody takes.
func TestResetBehindBytesThatNobodyTakes(t *testing.T) {
	eachWay(t, func(t *testing.T, r *rig) {
		e := r.join("edge1", direct)
		c, far := r.pair("edge1")
		far.SetReadBuffer(4 << 10)
		full := make(chan error, 1)
		go func() {
			_, err := io.Copy(struct{ io.Writer }{c}, endless{})
			full <- err
		}()
		last := uint64(0)
		sender := r.counters
		if r.reaches {
			sender = r.edges
		}
		within(t, patience, "nothing moves any more", func() bool {
			time.Sleep(200 * time.Millisecond)
			now := sender.BytesSent.Load()
			stands := now > 0 && now == last
			last = now
			return stands
		})
		c.(interface{ ResetBehind() }).ResetBehind()
		wantErr(t, "the caller's write", <-full, syscall.ECONNRESET)
		r.eventually("the conn is over at both ends", func() bool {
			return e.client.Session().Conns.Load() == 0
		})
		_, err := io.Copy(io.Discard, far)
		wantErr(t, "the target's read", err, syscall.ECONNRESET)
		r.idle(e)
	})
}

// endless gives bytes without end.
type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }
