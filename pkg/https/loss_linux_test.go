package https

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/tunnel"
)

// A reset of a TLS connection resets the other side, also if a write gets the error first.
func TestTLSResetIsNotACleanEnd(t *testing.T) {
	ca := newCA(t, "ca")
	server := &tls.Config{Certificates: []tls.Certificate{*ca.issue("here", "here")}}
	roots := ca.pool
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

// tcpPair returns both ends of a TCP connection on loopback.
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

// target is a conn to a target. Its first Write closes waits and blocks until letGo is closed. Its
// Read returns io.EOF when ends is closed. ended receives how the caller's bytes ended; capacity 1,
// for the first end.
type target struct {
	net.Conn
	waits, letGo, ends chan struct{}
	once               sync.Once
	ended              chan string
}

func (c *target) Write(p []byte) (int, error) {
	c.once.Do(func() {
		close(c.waits)
		<-c.letGo
	})
	return len(p), nil
}

func (c *target) Read([]byte) (int, error) {
	<-c.ends
	return 0, io.EOF
}

func (c *target) note(how string) error {
	select {
	case c.ended <- how:
	default:
	}
	return nil
}

func (c *target) CloseWrite() error               { return c.note("cleanly") }
func (c *target) CloseRead() error                { return nil }
func (c *target) Reset() error                    { return c.note("by a reset") }
func (c *target) Close() error                    { return c.note("by a close") }
func (c *target) SetReadDeadline(time.Time) error { return nil }

// TLS's close_notify is a write, and may be the write that gets the caller's reset. The caller's
// upload still ends with a reset.
func TestCloseNotifyGetsTheReset(t *testing.T) {
	ca := newCA(t, "ca")
	server := &tls.Config{Certificates: []tls.Certificate{*ca.issue("here", "here")}}
	roots := ca.pool
	callerRaw, nearRaw := tcpPair(t)
	near := &tlsConn{Conn: tls.Server(nearRaw, server), raw: nearRaw}
	caller := tls.Client(callerRaw, &tls.Config{RootCAs: roots, ServerName: "here"})
	far := &target{
		waits: make(chan struct{}), letGo: make(chan struct{}), ends: make(chan struct{}),
		ended: make(chan string, 1),
	}
	spliced := make(chan struct{})
	go func() {
		tunnel.Splice(context.Background(), near, far)
		close(spliced)
	}()
	caller.Write(make([]byte, 1000))
	<-far.waits
	tunnel.Reset(callerRaw)
	raw, err := nearRaw.SyscallConn()
	must(t, err)
	for reset := false; !reset; time.Sleep(time.Millisecond) { // until the reset has arrived
		must(t, raw.Control(func(fd uintptr) {
			info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
			reset = err == nil && info.State == unix.BPF_TCP_CLOSE
		}))
	}
	close(far.ends) // makes Splice send the close_notify
	testkit.Eventually(t, "the close_notify has got the reset", func() bool {
		var pending int16
		raw.Control(func(fd uintptr) {
			fds := []unix.PollFd{{Fd: int32(fd)}}
			unix.Poll(fds, 0)
			pending = fds[0].Revents & unix.POLLERR
		})
		return pending == 0
	})
	close(far.letGo)
	if how := <-far.ended; how != "by a reset" {
		t.Errorf("the caller's cut-off upload ends %s", how)
	}
	<-spliced
}
