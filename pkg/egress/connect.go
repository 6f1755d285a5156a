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
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"tunnel/pkg/konnectivity"
	ports "tunnel/pkg/listen"
	"tunnel/pkg/tunnel"
)

// HTTP CONNECT (RFC 9110 section 9.3.6), as kube-apiserver speaks it: HTTP/1.1, one
// connection for each conn.

const (
	// requestTimeout is how long a caller may take to shake hands and to ask.
	requestTimeout = 10 * time.Second
	// mostRequest bounds the head of a request, in bytes.
	mostRequest = 64 << 10
)

// serveConnect serves HTTP CONNECT on ln until ctx is done.
func (f *FrontDoor) serveConnect(ctx context.Context, ln net.Listener, callers *tls.Config) error {
	conns, endConns := tunnel.Grace(ctx, f.grace)
	defer endConns()
	defer context.AfterFunc(ctx, func() { ln.Close() })()
	if callers != nil {
		callers = callers.Clone()
		callers.NextProtos = []string{"http/1.1"}
	}
	var live sync.WaitGroup
	defer live.Wait()
	for {
		c, err := ln.Accept()
		switch {
		case err == nil:
			live.Go(func() {
				if f.guard("the connection ends", func() error { f.serveOne(ctx, conns, c, callers); return nil }) != nil {
					tunnel.Reset(c)
				}
			})
		case ctx.Err() != nil:
			return nil
		default:
			endConns()
			return err
		}
	}
}

// serveOne serves one connection: its request until asking is done, the conn until conns is.
func (f *FrontDoor) serveOne(asking, conns context.Context, raw net.Conn, callers *tls.Config) {
	raw.SetDeadline(time.Now().Add(requestTimeout)) //nolint:errcheck // then reading fails at once
	late := context.AfterFunc(asking, func() { raw.Close() })
	defer late()
	c := &connectConn{Conn: raw, apart: newApart(), guard: f.guard}
	if callers != nil {
		t := tls.Server(raw, callers)
		if err := t.Handshake(); err != nil {
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
	if !late() {
		return // we are stopping
	}
	if err != nil {
		c.refuse(err)
		return
	}
	target, err := c.whileHere(conns, f.guard, func(ctx context.Context) (net.Conn, error) {
		return f.dial(ctx, doorConnect, addr, c.caller())
	})
	if err != nil {
		f.log.Debug("dial refused", "target", addr, "err", err)
		c.refuse(err)
		return
	}
	if _, err = io.WriteString(c.Conn, "HTTP/1.1 200 Connection Established\r\n\r\n"); err != nil {
		tunnel.Reset(c)
		tunnel.Reset(target)
		return
	}
	c.apart.answered = time.Now()
	_, c.noHalfClose = target.(*konnectivity.Conn)
	f.splice(conns, doorConnect, addr, c, target)
	c.awaiting.Wait()
}

// connectConn is a caller's connection, whose first bytes were read with its request.
type connectConn struct {
	net.Conn
	again []byte // read first; owned by the reader
	apart apart

	noHalfClose bool   // the target's conn has one end for both directions; set before the splice
	onStop      func() // likewise
	awaiting    sync.WaitGroup
	watched     atomic.Bool // by awaitFIN; a second reader of the socket would wait for the first
	guard       func(what string, do func() error) error
}

// errMethod is for every request that is none of ours.
var errMethod = errors.New("this proxy only supports CONNECT passthrough")

// request reads the head of a request, and returns the target. That stands in the request
// line; the Host of kube-apiserver is always 127.0.0.1.
func (c *connectConn) request() (addr string, err error) {
	limited := &io.LimitedReader{R: c.Conn, N: mostRequest}
	r := bufio.NewReader(limited)
	req, err := http.ReadRequest(r)
	switch {
	case limited.N <= 0:
		return "", fmt.Errorf("the head of the request is longer than %d bytes", mostRequest)
	case err != nil:
		return "", fmt.Errorf("not a request: %w", err)
	case req.Method != http.MethodConnect:
		return "", errMethod
	}
	c.again = make([]byte, r.Buffered())
	io.ReadFull(r, c.again) //nolint:errcheck // it has them
	return req.RequestURI, nil
}

// whileHere dials; a caller that leaves meanwhile ends it.
func (c *connectConn) whileHere(ctx context.Context, guard func(what string, do func() error) error, dial func(context.Context) (net.Conn, error)) (net.Conn, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	c.SetDeadline(time.Time{}) //nolint:errcheck // then reading fails at once
	early := make([]byte, 4<<10)
	var n int
	var watching sync.WaitGroup
	watching.Go(func() {
		if guard("the dial ends", func() (err error) { n, err = c.Conn.Read(early); return err }) != nil {
			cancel()
		}
	})
	target, err := dial(ctx)
	c.SetReadDeadline(time.Unix(1, 0)) //nolint:errcheck // likewise
	watching.Wait()
	c.SetReadDeadline(time.Time{}) //nolint:errcheck // likewise
	c.again = append(c.again, early[:n]...)
	return target, err
}

// caller says who asks, for the edge's eyes.
func (c *connectConn) caller() string {
	if t, ok := c.Conn.(*tls.Conn); ok {
		return t.ConnectionState().PeerCertificates[0].Subject.CommonName // verified: there is one
	}
	return c.RemoteAddr().Network()
}

// refuse answers with an error and closes the connection. The codes are those of
// Konnectivity's server.
func (c *connectConn) refuse(err error) {
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
	c.SetDeadline(time.Now().Add(partTime)) //nolint:errcheck // then the write fails at once
	fmt.Fprintf(c.Conn, "HTTP/1.1 %d %s\r\nConnection: close\r\nContent-Type: text/plain; charset=utf-8\r\n\r\n%s\n", status, phrase(text), text)
	// A close with unread bytes is a reset, which can overtake our answer.
	if c.CloseWrite() == nil {
		io.Copy(io.Discard, c.Conn) //nolint:errcheck // nobody is interested
	}
	c.Conn.Close()
}

// phrase is a text as the reason phrase of a status line (RFC 9112 section 4). kube-apiserver
// shows its user that, and not the body.
func phrase(text string) string {
	const most = 500
	return strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return ' '
		}
		return r
	}, text[:min(len(text), most)])
}

// partTime is how long a refused caller may take to read why.
const partTime = 500 * time.Millisecond

// Read implements net.Conn.
func (c *connectConn) Read(b []byte) (int, error) {
	if len(c.again) > 0 {
		n := copy(b, c.again)
		c.again = c.again[n:]
		return n, nil
	}
	n, err := c.Conn.Read(b)
	c.apart.said()
	if errors.Is(err, io.EOF) {
		c.awaitFIN()
	}
	return n, err
}

// OnStop has f called when the caller is seen to read no more; see awaitFIN.
func (c *connectConn) OnStop(f func()) { c.onStop = f }

// awaitFIN is called when the caller has ended its direction. Over TLS a close_notify alone
// is a half-close, and what the target still says reaches the caller (RFC 8446 section 6.1). A
// FIN behind it is a close, though TCP does not tell that from a half-close. It counts where the
// target's conn knows no half-close: the target would wait for the end of an upload.
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
	c.awaiting.Go(func() { // until a FIN or a reset comes, or the splice has ended and closes the socket
		ended := false
		err := raw.Read(func(fd uintptr) bool {
			var known bool
			ended, known = hasEnded(fd)
			return known
		})
		if err == nil && ended {
			c.guard("the conn is not ended early", func() error { stop(); return nil }) //nolint:errcheck // it ends later
		}
	})
}

// Write implements net.Conn.
func (c *connectConn) Write(b []byte) (int, error) {
	c.apart.wait()
	return c.Conn.Write(b)
}

// WriteBuffers writes several pieces in one system call.
func (c *connectConn) WriteBuffers(v *net.Buffers) (int64, error) {
	c.apart.wait()
	return v.WriteTo(c.Conn)
}

// The ways to end a connection, for tunnel.Splice.

// CloseWrite ends our direction.
func (c *connectConn) CloseWrite() error {
	if cw, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return cw.CloseWrite()
	}
	return errors.ErrUnsupported
}

// CloseRead says that nothing more is read, where the connection can say that.
func (c *connectConn) CloseRead() error {
	if cr, ok := c.Conn.(interface{ CloseRead() error }); ok {
		return cr.CloseRead()
	}
	return nil
}

// Reset aborts the connection.
func (c *connectConn) Reset() error {
	tunnel.Reset(c.Conn)
	return nil
}

// socket is what the connection is at the bottom.
func (c *connectConn) socket() net.Conn {
	if t, ok := c.Conn.(*tls.Conn); ok {
		return t.NetConn()
	}
	return c.Conn
}

// SetLinger and SyscallConn are the socket's own: by them tunnel.Splice has the kernel
// reset it should we be killed, and tells the caller's reset from a clean end.

// SetLinger implements net.TCPConn's.
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
