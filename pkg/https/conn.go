package https

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"tunnel.example/tunnel/pkg/hello"
	"tunnel.example/tunnel/pkg/tunnel"
)

// clientConn is an accepted TCP connection whose first bytes have been read and will be read again.
// It does not embed *net.TCPConn, because WriteTo would skip those bytes.
type clientConn struct {
	net.Conn
	replay []byte // bytes that Read returns first; owned by the reader
	// left is how many more bytes Read returns before it fails; 0: any number. Owned by the reader.
	left int

	// Set before the connection is handed on, and never changed afterwards.
	port     int    // index of FrontDoor.ports
	target   string // the port's target on the edge
	sni      string // server name of the ClientHello, in lower case; "" without SNI
	passErr  error  // why passing the connection through to the node in sni has failed; nil: not tried
	passTold bool   // pass has told the Sink passErr: see tunnel.Visit.Told

	framed    *framedConn   // reads HTTP/1 from the connection; nil with HTTP/2
	stopWatch func() bool   // ends the AfterFunc that resets the connection at the end of the grace period
	done      chan struct{} // closed when net/http has closed or hijacked the connection

	mustLinger atomic.Bool // the caller may still be sending, so Close must not destroy our last bytes
}

// maxHandshake is how many bytes a caller may send before its TLS handshake is done. It leaves room for the longest
// ClientHello and for 32 KiB of certificates. Without it, crypto/tls would parse 256 KiB of certificates before it
// verifies the first one.
const maxHandshake = hello.MaxLen + 32<<10

var errLongHandshake = fmt.Errorf("the TLS handshake is longer than %d bytes", maxHandshake)

func (c *clientConn) Read(p []byte) (int, error) {
	if c.left == 0 {
		return c.read(p)
	}
	n, err := c.read(p[:min(len(p), c.left)])
	if c.left -= n; c.left == 0 && err == nil {
		return 0, errLongHandshake
	}
	return n, err
}

// read is Read without a limit.
func (c *clientConn) read(p []byte) (int, error) {
	if len(c.replay) > 0 {
		n := copy(p, c.replay)
		if c.replay = c.replay[n:]; len(c.replay) == 0 {
			c.replay = nil // the garbage collector can free its array of up to 64 KiB
		}
		return n, nil
	}
	return c.Conn.Read(p)
}

// tunnel.Splice uses the following methods to end a TCP connection.

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

// SetLinger and SyscallConn are the methods of the socket. tunnel.Splice needs them for two things. If
// this process is killed, the kernel resets the connection. And Splice can tell the caller's reset from
// a clean end.

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

// Close closes the connection. If the caller may still be sending, Close first reads for a moment:
// a close with unread bytes sends a reset, which can overtake our response.
func (c *clientConn) Close() error {
	if c.mustLinger.Load() {
		c.lingeringClose()
		return nil
	}
	return c.Conn.Close()
}

// lingerTime is how long lingeringClose waits for the caller; net/http waits as long.
const lingerTime = 500 * time.Millisecond

// lingeringClose closes the connection after giving the caller time to read what was written last.
func (c *clientConn) lingeringClose() {
	c.Conn.SetDeadline(time.Now().Add(lingerTime))
	if c.CloseWrite() == nil {
		io.Copy(io.Discard, c.Conn)
	}
	c.Conn.Close()
}

// TLS alerts that tell why a connection is not served (RFC 8446 section 6).
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

// alert ends the connection with a fatal TLS alert. It is sent in plaintext: there are no keys yet.
func (c *clientConn) alert(desc byte) {
	const fatal = 2
	c.Conn.SetWriteDeadline(time.Now().Add(lingerTime))
	c.Conn.Write([]byte{21, 3, 1, 0, 2, fatal, desc}) //nolint:errcheck // it fails only if the caller has gone
	c.lingeringClose()
}

// tlsConn is TLS over raw. Unlike tls.Conn it can be aborted, and Close does not wait for a peer
// that does not read.
type tlsConn struct {
	*tls.Conn
	raw    net.Conn
	replay []byte // bytes that net/http read too early: Read returns them first; owned by the reader
}

// closeTime bounds how long Close tries to send TLS's close-notify alert.
const closeTime = time.Second

func (c *tlsConn) Read(p []byte) (int, error) {
	if len(c.replay) > 0 {
		n := copy(p, c.replay)
		c.replay = c.replay[n:]
		return n, nil
	}
	return c.Conn.Read(p)
}

// Reset aborts the connection underneath.
func (c *tlsConn) Reset() error {
	tunnel.Reset(c.raw)
	return nil
}

// ResetBehind aborts the connection underneath, after the bytes written so far.
func (c *tlsConn) ResetBehind() { tunnel.ResetBehind(c.raw) }

// SetLinger and SyscallConn are the methods of the socket underneath. After a write has failed with a
// reset, both TLS and the kernel report a clean end to the next read. So Splice asks the socket.

func (c *tlsConn) SetLinger(sec int) error { return setLinger(c.raw, sec) }

func (c *tlsConn) SyscallConn() (syscall.RawConn, error) { return syscallConn(c.raw) }

func (c *tlsConn) Close() error {
	t := time.AfterFunc(closeTime, func() { tunnel.Reset(c.raw) })
	defer t.Stop()
	return c.Conn.Close()
}

// trackedConn is a conn to a target that calls onClose when it ends.
type trackedConn struct {
	net.Conn
	onClose func() // called once
	once    sync.Once
}

func (c *trackedConn) Close() error {
	defer c.once.Do(c.onClose)
	return c.Conn.Close()
}

// Reset aborts the connection.
func (c *trackedConn) Reset() error {
	defer c.once.Do(c.onClose)
	tunnel.Reset(c.Conn)
	return nil
}

// ResetBehind aborts the conn after the bytes written so far.
func (c *trackedConn) ResetBehind() {
	defer c.once.Do(c.onClose)
	tunnel.ResetBehind(c.Conn)
}

// CloseWrite half-closes the conn: we send nothing more.
func (c *trackedConn) CloseWrite() error { return closeWrite(c.Conn) }

// closeWrite half-closes c if c supports that.
func closeWrite(c net.Conn) error {
	if cw, ok := c.(interface{ CloseWrite() error }); ok {
		return cw.CloseWrite()
	}
	return errors.ErrUnsupported
}
