package egress

import (
	"bufio"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"tunnel.example/tunnel/pkg/konnectivity"
	ports "tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/tunnel"
)

// This file serves HTTP CONNECT (RFC 9110 section 9.3.6) as kube-apiserver speaks it: over HTTP/1.1, with
// one connection for each conn. The same listeners serve SOCKS5: socks.go.

const (
	// requestTimeout bounds the TLS handshake and the request of a caller together.
	requestTimeout = 10 * time.Second
	// maxRequest bounds the header section of a request, in bytes.
	maxRequest = 64 << 10
)

// serveConnect serves HTTP CONNECT and SOCKS5 on ln until ctx is done.
func (f *FrontDoor) serveConnect(ctx context.Context, ln net.Listener, callers *tls.Config) error {
	conns, endConns := tunnel.Grace(ctx, f.grace)
	defer endConns()
	defer context.AfterFunc(ctx, func() { ln.Close() })()
	var live sync.WaitGroup
	defer live.Wait()
	err := ports.Accept(ctx, ln, func(c net.Conn) {
		live.Go(func() {
			if f.guard("the connection ends", func() error { f.serveConn(ctx, conns, c, callers); return nil }) != nil {
				tunnel.Reset(c)
			}
		})
	})
	if err != nil {
		endConns()
	}
	return err
}

// serveConn serves one connection. When requestCtx ends before the request is complete, the
// connection is closed. When conns ends, the dial or the conn ends.
func (f *FrontDoor) serveConn(requestCtx, conns context.Context, raw net.Conn, callers *tls.Config) {
	raw.SetDeadline(time.Now().Add(requestTimeout))
	// mayGoOn ends the wait for requestCtx. It returns false if the connection has been closed already.
	mayGoOn := context.AfterFunc(requestCtx, func() { raw.Close() })
	defer mayGoOn()
	c := &connectConn{Conn: raw, door: doorConnect, gap: newAnswerGap(), guard: f.guard}
	if callers != nil {
		t := tls.Server(raw, callers)
		if err := t.Handshake(); err != nil {
			f.balancers.UnexpectedIn(raw, err)
			f.log.Debug("caller refused", "caller", raw.RemoteAddr(), "err", err)
			raw.Close()
			return
		}
		if s, ok := raw.(*ports.Conn); ok {
			s.Met()
		}
		c.Conn = t
	}
	addr, err := c.request()
	if !mayGoOn() {
		return // the front door is stopping
	}
	if err != nil {
		f.log.Debug("caller refused", "frontend", c.door, "caller", c.callerName(), "err", err)
		c.refuse(err)
		return
	}
	// From here on, the stop of the front door no longer closes the connection at once.
	var o *opening
	target, err := c.dialWhileConnected(conns, f.guard, func(ctx context.Context) (conn net.Conn, err error) {
		conn, o, err = f.dial(ctx, c.door, addr, c.callerName())
		return conn, err
	})
	if err != nil {
		c.refuse(err)
		return
	}
	if err = c.accept(); err != nil {
		tunnel.Reset(c)
		tunnel.Reset(target)
		o.visit.Ended(0, 0, err, o.event)
		return
	}
	_, c.noHalfClose = target.(*konnectivity.Conn)
	f.splice(conns, o, c, target)
	c.awaiting.Wait()
}

// connectConn is a caller's connection. Its Read first returns the bytes that were read together with
// the request.
type connectConn struct {
	net.Conn
	door     string // doorConnect or doorSOCKS: the caller's protocol; set by request
	buffered []byte // bytes behind the request, which Read returns first; owned by the reader
	gap      answerGap

	noHalfClose bool           // the target's conn cannot half-close; set before the splice
	onStop      func()         // see awaitFIN; set before the splice
	awaiting    sync.WaitGroup // the goroutine of awaitFIN
	watched     atomic.Bool    // awaitFIN reads the socket: a second reader would block until it ends
	guard       func(what string, do func() error) error
}

// errMethod is the refusal of every method but CONNECT.
var errMethod = errors.New("this proxy only supports CONNECT passthrough")

// request reads a request of HTTP or SOCKS5, and returns the target. The first byte tells the protocol. request does
// not read what follows the request.
func (c *connectConn) request() (addr string, err error) {
	limited := &io.LimitedReader{R: c.Conn, N: maxRequest}
	r := bufio.NewReader(limited)
	if first, _ := r.Peek(1); len(first) == 1 && first[0] == socksVersion {
		c.door = doorSOCKS
		addr, err = socksRequest(r, c.Conn)
	} else {
		addr, err = httpRequest(r)
	}
	switch {
	case limited.N <= 0:
		return "", fmt.Errorf("the header of the request is longer than %d bytes", maxRequest)
	case err != nil:
		return "", err
	}
	c.buffered = make([]byte, r.Buffered())
	io.ReadFull(r, c.buffered) //nolint:errcheck // r has that many bytes
	return addr, nil
}

// httpRequest reads a request of HTTP. The target is in the request line; the Host of kube-apiserver is always
// 127.0.0.1.
func httpRequest(r *bufio.Reader) (addr string, err error) {
	req, err := http.ReadRequest(r)
	switch {
	case err != nil:
		return "", fmt.Errorf("not a request: %w", err)
	case req.Method != http.MethodConnect:
		return "", errMethod
	}
	return req.RequestURI, nil
}

// dialWhileConnected calls dial, and cancels it when the caller closes its connection.
func (c *connectConn) dialWhileConnected(
	ctx context.Context, guard func(what string, do func() error) error, dial func(context.Context) (net.Conn, error),
) (net.Conn, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	c.SetDeadline(time.Time{})
	early := make([]byte, 4<<10)
	var n int
	var watching sync.WaitGroup
	watching.Go(func() {
		if guard("the dial ends", func() (err error) { n, err = c.Conn.Read(early); return err }) != nil {
			cancel()
		}
	})
	target, err := dial(ctx)
	// A deadline in the past ends the Read of the goroutine above. The bytes that this Read has got are in
	// c.buffered, for connectConn.Read.
	c.SetReadDeadline(time.Unix(1, 0))
	watching.Wait()
	c.SetReadDeadline(time.Time{})
	c.buffered = append(c.buffered, early[:n]...)
	return target, err
}

// callerName names the caller, for the policy and the log of the edge.
func (c *connectConn) callerName() string {
	if t, ok := c.Conn.(*tls.Conn); ok {
		return t.ConnectionState().PeerCertificates[0].Subject.CommonName // verified, so there is one
	}
	return c.RemoteAddr().Network()
}

// accept answers that the target is connected.
func (c *connectConn) accept() error {
	if c.door == doorSOCKS {
		_, err := c.Conn.Write(socksAnswer(socksOK))
		return err // no gap: the answer of SOCKS5 has a known length, so callers read no byte behind it
	}
	_, err := io.WriteString(c.Conn, "HTTP/1.1 200 Connection Established\r\n\r\n")
	c.gap.answered = time.Now()
	return err
}

// refuse answers with an error and closes the connection.
func (c *connectConn) refuse(err error) {
	answer := httpRefusal
	if c.door == doorSOCKS {
		answer = socksRefusal
	}
	c.SetDeadline(time.Now().Add(refusalTime))
	c.Conn.Write(answer(err)) //nolint:errcheck // the caller has gone
	// Closing a socket with unread bytes resets it, and the reset can overtake our answer.
	if c.CloseWrite() == nil {
		discard(c.Conn)
	}
	c.Conn.Close()
}

// discard reads until the end, or until nothing has come for refusalTime. It looks twice, since this process may have
// been off the processor for that time. It gives up after refusalMost.
func discard(c net.Conn) {
	b := make([]byte, 4<<10)
	for last, quiet := time.Now().Add(refusalMost), false; time.Now().Before(last); {
		c.SetReadDeadline(time.Now().Add(refusalTime))
		switch n, err := c.Read(b); {
		case n > 0:
			quiet = false
		case !errors.Is(err, os.ErrDeadlineExceeded), quiet:
			return
		default:
			quiet = true
		}
	}
}

// httpRefusal returns the answer that refuses a request of HTTP because of err. The status codes are those of
// Konnectivity's server.
func httpRefusal(err error) []byte {
	status, text := http.StatusBadGateway, err.Error()
	r, refused := errors.AsType[*tunnel.Refusal](err)
	switch {
	case errors.Is(err, errMethod):
		status = http.StatusMethodNotAllowed
	case !refused:
	case r.Code == tunnel.NoSuchNode:
		status, text = http.StatusInternalServerError, "currently no tunnels available: "+r.Text
	case r.Code == tunnel.Timeout:
		status = http.StatusGatewayTimeout
	case r.Code == tunnel.Overloaded:
		status = http.StatusServiceUnavailable
	}
	const head = "HTTP/1.1 %d %s\r\nConnection: close\r\nContent-Type: text/plain; charset=utf-8\r\n\r\n"
	return fmt.Appendf(nil, head+"%s\n", status, phrase(text), text)
}

// phrase returns a text as the reason phrase of a status line (RFC 9112 section 4). kube-apiserver shows
// its user the reason phrase, and not the content.
func phrase(text string) string {
	const limit = 500
	return strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return ' '
		}
		return r
	}, text[:min(len(text), limit)])
}

const (
	// refusalTime is how long a refused caller may take to read our answer, and be silent after it.
	refusalTime = 500 * time.Millisecond
	// refusalMost is how long a refused caller may go on to send.
	refusalMost = 5 * time.Second
)

// Read implements net.Conn.
func (c *connectConn) Read(b []byte) (int, error) {
	if len(c.buffered) > 0 {
		n := copy(b, c.buffered)
		c.buffered = c.buffered[n:]
		return n, nil
	}
	n, err := c.Conn.Read(b)
	c.gap.callerSent()
	if errors.Is(err, io.EOF) {
		c.awaitFIN()
	}
	return n, err
}

// OnStop sets the function that awaitFIN calls when it finds that the caller reads no more.
func (c *connectConn) OnStop(f func()) { c.onStop = f }

// awaitFIN is called when the caller has ended its direction. Over TLS, a close_notify alone is a
// half-close: bytes of the target still reach the caller (RFC 8446 section 6.1). A FIN after the
// close_notify counts as a close of the whole connection, although TCP cannot tell a close from a
// half-close. awaitFIN waits for this FIN only if the target's conn cannot half-close. Without awaitFIN, a
// target that waits for the end of the caller's bytes would see it only when the idle conn times out.
func (c *connectConn) awaitFIN() {
	if _, ok := c.Conn.(*tls.Conn); !ok || !c.noHalfClose || c.onStop == nil {
		return
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return
	}
	stop := c.onStop
	c.onStop = nil
	c.watched.Store(true)
	c.awaiting.Go(func() { // ends with a FIN, a reset, or when the splice closes the socket
		ended := false
		err := raw.Read(func(fd uintptr) bool {
			var known bool
			ended, known = hasEnded(fd)
			return known
		})
		if err == nil && ended {
			//nolint:errcheck // after a panic, the conn ends later, by its timeout
			c.guard("the conn is not ended early", func() error { stop(); return nil })
		}
	})
}

// Write implements net.Conn.
func (c *connectConn) Write(b []byte) (int, error) {
	c.gap.wait()
	return c.Conn.Write(b)
}

// WriteBuffers writes several pieces in one system call.
func (c *connectConn) WriteBuffers(v *net.Buffers) (int64, error) {
	c.gap.wait()
	return v.WriteTo(c.Conn)
}

// CloseWrite ends our direction. tunnel.Splice uses CloseWrite, CloseRead and Reset.
func (c *connectConn) CloseWrite() error {
	if cw, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return cw.CloseWrite()
	}
	return errors.ErrUnsupported
}

// CloseRead stops reading. TLS has no CloseRead, so there a deadline ends the read.
func (c *connectConn) CloseRead() error {
	if cr, ok := c.Conn.(interface{ CloseRead() error }); ok {
		return cr.CloseRead()
	}
	return c.SetReadDeadline(time.Unix(1, 0))
}

// Reset aborts the connection.
func (c *connectConn) Reset() error {
	tunnel.Reset(c.Conn)
	return nil
}

// socket returns the connection without TLS.
func (c *connectConn) socket() net.Conn {
	if t, ok := c.Conn.(*tls.Conn); ok {
		return t.NetConn()
	}
	return c.Conn
}

// SetLinger and SyscallConn give tunnel.Splice access to the socket below TLS. With SetLinger, Splice makes the
// kernel reset the connection if this process is killed. With SyscallConn, it tells a reset from a clean end.

// SetLinger calls SetLinger of the socket, if the socket has this method of net.TCPConn.
func (c *connectConn) SetLinger(sec int) error {
	if l, ok := c.socket().(interface{ SetLinger(sec int) error }); ok {
		return l.SetLinger(sec)
	}
	return errors.ErrUnsupported
}

// SyscallConn implements syscall.Conn.
func (c *connectConn) SyscallConn() (syscall.RawConn, error) {
	if sc, ok := c.socket().(syscall.Conn); ok && !c.watched.Load() {
		return sc.SyscallConn()
	}
	return nil, errors.ErrUnsupported
}
