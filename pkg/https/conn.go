package https

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"tunnel/pkg/tunnel"
)

// clientConn is an accepted TCP connection whose first bytes have been read and will
// be read again. It does not embed *net.TCPConn, whose WriteTo would leave them out.
type clientConn struct {
	net.Conn
	again []byte // owned by the reader

	// Set before it is handed on, and never changed afterwards.
	port    int    // index of FrontDoor.ports
	target  string // that port's target on the edge
	sni     string
	refused error // why it could not be passed through to the node that sni names

	framed  *framedConn   // HTTP/1 over it; nil with HTTP/2
	unwatch func() bool   // ends the watch that resets it when the front door's time is over
	ended   chan struct{} // closed when net/http has done with it

	lingers atomic.Bool // the caller is still sending: Close must not destroy our last bytes
}

func (c *clientConn) Read(p []byte) (int, error) {
	if len(c.again) > 0 {
		n := copy(p, c.again)
		if c.again = c.again[n:]; len(c.again) == 0 {
			c.again = nil // it may be 64 KiB
		}
		return n, nil
	}
	return c.Conn.Read(p)
}

// The ways to end a TCP connection, for tunnel.Splice.

func (c *clientConn) CloseWrite() error { return closeWrite(c.Conn) }

func (c *clientConn) CloseRead() error {
	if cr, ok := c.Conn.(interface{ CloseRead() error }); ok {
		return cr.CloseRead()
	}
	return nil
}

// Reset aborts the connection: the caller sees a reset.
func (c *clientConn) Reset() error {
	tunnel.Reset(c.Conn)
	return nil
}

// SetLinger and SyscallConn are the socket's own: by them tunnel.Splice has the kernel
// reset it should we be killed, and tells the caller's reset from a clean end.

func (c *clientConn) SetLinger(sec int) error { return setLinger(c.Conn, sec) }

func (c *clientConn) SyscallConn() (syscall.RawConn, error) { return syscallConn(c.Conn) }

func setLinger(c net.Conn, sec int) error {
	if l, ok := c.(interface{ SetLinger(sec int) error }); ok {
		return l.SetLinger(sec)
	}
	return errors.ErrUnsupported
}

func syscallConn(c net.Conn) (syscall.RawConn, error) {
	if sc, ok := c.(syscall.Conn); ok {
		return sc.SyscallConn()
	}
	return nil, errors.ErrUnsupported
}

// Close closes the connection. If the caller may still be sending, it is heard out
// for a moment: a close with unread bytes is a reset, which can overtake our answer.
func (c *clientConn) Close() error {
	if c.lingers.Load() {
		c.part()
		return nil
	}
	return c.Conn.Close()
}

// partTime is as long as net/http waits in the same situation.
const partTime = 500 * time.Millisecond

// part closes the connection so that what was written last is read by the caller.
func (c *clientConn) part() {
	c.Conn.SetDeadline(time.Now().Add(partTime)) //nolint:errcheck // then the read below fails at once
	if c.CloseWrite() == nil {
		io.Copy(io.Discard, c.Conn) //nolint:errcheck // nobody is interested
	}
	c.Conn.Close()
}

// TLS alerts that say why a connection is not served (RFC 8446 section 6).
const (
	alertAccessDenied     = 49
	alertInternalError    = 80
	alertMissingExtension = 109
	alertUnrecognizedName = 112
)

// alertOf returns the alert for a connection that could not be passed through.
func alertOf(err error) byte {
	switch tunnel.CodeOf(err) {
	case tunnel.NoSuchNode:
		return alertUnrecognizedName
	case tunnel.Denied:
		return alertAccessDenied
	default:
		return alertInternalError
	}
}

// alert ends the connection with a fatal TLS alert, in the clear, as it is before
// keys exist.
func (c *clientConn) alert(desc byte) {
	const fatal = 2
	c.Conn.SetWriteDeadline(time.Now().Add(partTime)) //nolint:errcheck // then the write fails at once
	c.Conn.Write([]byte{21, 3, 1, 0, 2, fatal, desc}) //nolint:errcheck // said out of kindness
	c.part()
}

// tlsConn is TLS over raw. It keeps what tls.Conn alone cannot do: it can be aborted,
// and closing it does not wait for a peer that takes nothing.
type tlsConn struct {
	*tls.Conn
	raw   net.Conn
	again []byte // read first: what net/http had read too much; owned by the reader
}

// closeTime is how long a close may try to say goodbye.
const closeTime = time.Second

func (c *tlsConn) Read(p []byte) (int, error) {
	if len(c.again) > 0 {
		n := copy(p, c.again)
		c.again = c.again[n:]
		return n, nil
	}
	return c.Conn.Read(p)
}

// Reset aborts the connection underneath.
func (c *tlsConn) Reset() error {
	tunnel.Reset(c.raw)
	return nil
}

// ResetBehind aborts the connection underneath, behind what was written.
func (c *tlsConn) ResetBehind() { tunnel.ResetBehind(c.raw) }

// SetLinger and SyscallConn are those of the socket underneath. TLS reports a reset that a
// write has got as a clean end to the next read, as the kernel does.

func (c *tlsConn) SetLinger(sec int) error { return setLinger(c.raw, sec) }

func (c *tlsConn) SyscallConn() (syscall.RawConn, error) { return syscallConn(c.raw) }

func (c *tlsConn) Close() error {
	t := time.AfterFunc(closeTime, func() { tunnel.Reset(c.raw) })
	defer t.Stop()
	return c.Conn.Close()
}

// trackedConn is a conn to a target. Its end is told to whoever waits for it.
type trackedConn struct {
	net.Conn
	ended func() // called once
	once  sync.Once
}

func (c *trackedConn) Close() error {
	defer c.once.Do(c.ended)
	return c.Conn.Close()
}

// Reset aborts the connection.
func (c *trackedConn) Reset() error {
	defer c.once.Do(c.ended)
	tunnel.Reset(c.Conn)
	return nil
}

// ResetBehind aborts the connection behind what was written.
func (c *trackedConn) ResetBehind() {
	defer c.once.Do(c.ended)
	tunnel.ResetBehind(c.Conn)
}

// CloseWrite ends our direction.
func (c *trackedConn) CloseWrite() error { return closeWrite(c.Conn) }

// closeWrite half-closes c if it can.
func closeWrite(c net.Conn) error {
	if cw, ok := c.(interface{ CloseWrite() error }); ok {
		return cw.CloseWrite()
	}
	return errors.ErrUnsupported
}
