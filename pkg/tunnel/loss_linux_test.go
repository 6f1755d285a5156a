package tunnel

import (
	"errors"
	"io"
	"net"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// giveUpSoon makes the kernel abandon c with ETIMEDOUT when its peer acknowledges nothing for
// 300 ms.
func giveUpSoon(t *testing.T, c *net.TCPConn) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, 300)
	})
	if err != nil {
		t.Fatal(err)
	}
}

// A connection that the kernel abandons is lost, whatever the error: the other side must not see a
// clean end. The kernel reports the error only once, to the write of one half. The read of the
// other half then returns what looks like a clean end.
func TestSpliceTimeout(t *testing.T) {
	for name, swap := range map[string]bool{"of the client": false, "of the server": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			client, a := tcpPair(t)
			server, b := tcpPair(t)
			a.SetDeadline(time.Time{})
			b.SetDeadline(time.Time{})
			vanishing, near, other := client, a, server
			if swap {
				vanishing, near, other = server, b, client
			}
			vanishing.SetReadBuffer(4 << 10)
			giveUpSoon(t, near)
			done := splice(t, t.Context(), a, b)

			vanishing.Write(data[:1000])
			if _, err := io.ReadFull(other, make([]byte, 1000)); err != nil {
				t.Fatal(err)
			}
			written := make(chan error, 1)
			go func() { // the vanishing side takes none of this
				_, err := io.Copy(struct{ io.Writer }{other}, endless{})
				written <- err
			}()
			_, err := other.Read(make([]byte, 1))
			if err = errors.Join(err, <-written); !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("the other side sees %v, want a reset", err)
			}
			if r := wait(t, done); r.err == nil {
				t.Error("Splice reports a clean end")
			}
		})
	}
}

// Splice returns if a side closes its half and then vanishes.
func TestSpliceTimeoutAfterHalfClose(t *testing.T) {
	client, a := tcpPair(t)
	server, b := tcpPair(t)
	a.SetDeadline(time.Time{})
	b.SetDeadline(time.Time{})
	client.SetReadBuffer(4 << 10)
	giveUpSoon(t, a)
	done := splice(t, t.Context(), a, b)
	client.CloseWrite()
	if _, err := server.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Fatalf("the server reads %v behind the half-close", err)
	}
	// So many bytes that some stay in the kernel, since the client does not read, and so few that
	// no write waits.
	server.Write(data[:256<<10])
	wait(t, done)
}

// stuck is a conn whose peer reads nothing: Write waits until the conn is closed.
type stuck struct {
	net.Conn
	writes chan struct{} // closed by the first Write
	closed chan struct{}
}

func (s *stuck) Write([]byte) (int, error) {
	close(s.writes)
	<-s.closed
	return 0, net.ErrClosed
}

func (s *stuck) Read([]byte) (int, error) { <-s.closed; return 0, ErrReset }
func (s *stuck) Reset() error             { return s.Close() }

func (s *stuck) Close() error {
	if !IsClosed(s.closed) {
		close(s.closed)
	}
	return nil
}

// Splice notices a reset although the half that would read it waits in a write, and no bytes
// arrive in the other direction.
func TestSpliceNoticesResetOfUnreadConn(t *testing.T) {
	t.Parallel()
	client, a := tcpPair(t)
	a.SetDeadline(time.Time{})
	s := &stuck{writes: make(chan struct{}), closed: make(chan struct{})}
	done := splice(t, t.Context(), a, s)
	client.Write(data[:1000])
	<-s.writes
	Reset(client)
	if r := wait(t, done); r.aToB != 0 || r.err == nil { // within testTimeout: lookInterval and resetTime
		t.Errorf("Splice returns %+v", r)
	}
}

// Bytes that a side sent before its reset arrive, although the write of the other half gets the
// reset.
func TestSpliceBytesBeforeReset(t *testing.T) {
	for range 50 {
		began := time.Now()
		client, server, done := spliced(t, t.Context())
		go io.Copy(struct{ io.Writer }{client}, endless{})
		io.ReadFull(server, make([]byte, 1000))
		server.Write([]byte("too large"))
		server.Close() // with unread input: a reset
		// A reset waits a second at most: a busy machine may be later.
		if got, _ := io.ReadAll(client); string(got) != "too large" && time.Since(began) < time.Second {
			t.Fatalf("the client gets %q before the reset", got)
		}
		wait(t, done)
	}
}

// slow is a conn over a slow link: each Write takes 60 ms, and each Read returns 4 bytes after
// 20 ms.
type slow struct {
	net.Conn
	got    int // bytes written
	once   sync.Once
	closed chan struct{} // closed by Reset or Close
}

func (s *slow) Write(p []byte) (int, error) {
	select {
	case <-time.After(60 * time.Millisecond):
		s.got += len(p)
		return len(p), nil
	case <-s.closed:
		return 0, net.ErrClosed
	}
}

func (s *slow) Read([]byte) (int, error) {
	select {
	case <-time.After(20 * time.Millisecond):
		return 4, nil
	case <-s.closed:
		return 0, ErrReset
	}
}

func (s *slow) SetReadDeadline(time.Time) error { return nil }
func (s *slow) CloseRead() error                { return nil }
func (s *slow) CloseWrite() error               { return nil }
func (s *slow) Reset() error                    { s.once.Do(func() { close(s.closed) }); return nil }
func (s *slow) Close() error                    { return s.Reset() }

// A target answers early and closes with unread input. The caller gets all bytes of the answer
// that our kernel has, also if that takes longer than resetTime.
func TestSpliceSlowBytesBeforeReset(t *testing.T) {
	t.Parallel()
	server, b := tcpPair(t)
	b.SetDeadline(time.Time{})
	b.SetReadBuffer(8 << 20)
	server.Write(data)
	if !allAcked(server, testTimeout) {
		t.Fatal("the kernel has not taken the answer")
	}
	s := &slow{closed: make(chan struct{})}
	done := splice(t, t.Context(), s, b)
	io.ReadFull(server, make([]byte, 4))
	for unread := 0; unread == 0; { // the target must have unread bytes, so that its close is a reset
		raw, _ := server.SyscallConn()
		raw.Control(func(fd uintptr) { unread, _ = unix.IoctlGetInt(int(fd), unix.SIOCINQ) })
	}
	server.Close()
	wait(t, done)
	if s.got != len(data) {
		t.Errorf("%d of %d bytes arrive before the reset", s.got, len(data))
	}
}

// The half that waits to learn whether the other half got an error waits for resetTime at most. The other half may need
// longer to end: it waits for acknowledgements, or the machine has no time for it. Then it ends with an error and never
// passes a clean end on.
func TestEndedByLossWaitsOnce(t *testing.T) {
	peer, src := tcpPair(t)
	peer.Close()
	if _, err := src.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	src.CloseWrite() // the socket has ended in both directions now, without an error
	dog := new(watchdog)
	own, back := newDirection(src, dog), newDirection(src, dog)
	ended := make(chan bool, 1)
	go func() { ended <- endedByLoss(src, own, back) }()
	select {
	case lost := <-ended:
		if lost {
			t.Error("a connection without an error counts as lost")
		}
	case <-time.After(testTimeout):
		t.Error("the half waits for ever")
	}
	back.end(nil, syscall.ECONNRESET)
}
