package https

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"time"

	"tunnel/pkg/listen"
)

const (
	// maxHello bounds the bytes read before a ClientHello is complete. It is the
	// longest handshake message that crypto/tls takes.
	maxHello = 64 << 10
)

var (
	errHelloSeen    = errors.New("the ClientHello was read")
	errHelloTooLong = fmt.Errorf("no ClientHello in the first %d bytes", maxHello)
)

// hello is what we want to know from a ClientHello.
type hello struct {
	serverName string // lower case; empty when there is no SNI
}

// peekHello reads a ClientHello from r and returns it together with every byte it
// took from r, which may be more than the hello. crypto/tls does the parsing: it is
// run as a server that gives up as soon as it has told us what it saw.
func peekHello(r io.Reader) (h hello, read []byte, err error) {
	peeked := &helloReader{r: r}
	var seen *tls.ClientHelloInfo
	err = tls.Server(peeked, &tls.Config{
		MinVersion: tls.VersionTLS10, // whom we serve is decided later
		GetConfigForClient: func(info *tls.ClientHelloInfo) (*tls.Config, error) {
			seen = info
			return nil, errHelloSeen
		},
	}).Handshake()
	if seen == nil {
		if peeked.err != nil {
			err = peeked.err // crypto/tls wraps it in words about a handshake
		}
		return hello{}, peeked.read, err
	}
	return hello{serverName: strings.ToLower(seen.ServerName)}, peeked.read, nil
}

// helloReader is the conn that crypto/tls reads a ClientHello from. It remembers what
// was read and swallows what crypto/tls answers.
type helloReader struct {
	net.Conn // nil: no other method is called
	r        io.Reader
	read     []byte
	err      error
}

func (h *helloReader) Read(p []byte) (int, error) {
	room := maxHello - len(h.read)
	if room <= 0 {
		h.err = errHelloTooLong
		return 0, h.err
	}
	n, err := h.r.Read(p[:min(len(p), room)])
	h.read = append(h.read, p[:n]...)
	if err != nil {
		h.err = err
	}
	return n, err
}

func (h *helloReader) Write(p []byte) (int, error)      { return len(p), nil }
func (h *helloReader) Close() error                     { return nil }
func (h *helloReader) SetDeadline(time.Time) error      { return nil }
func (h *helloReader) SetReadDeadline(time.Time) error  { return nil }
func (h *helloReader) SetWriteDeadline(time.Time) error { return nil }
func (h *helloReader) LocalAddr() net.Addr              { return nil }
func (h *helloReader) RemoteAddr() net.Addr             { return nil }

// peek reads the ClientHello; what it read will be read again. It gives up after
// timeout, when no byte has come within listen.FirstByte, or when ctx is done. It calls
// spoke at the first byte.
func (c *clientConn) peek(ctx context.Context, timeout time.Duration, spoke func()) (hello, error) {
	begun := time.Now()
	if err := c.Conn.SetReadDeadline(begun.Add(min(timeout, listen.FirstByte))); err != nil {
		return hello{}, err
	}
	stop := context.AfterFunc(ctx, func() { c.Conn.SetReadDeadline(time.Unix(1, 0)) }) //nolint:errcheck // the read ends by its timeout, then
	h, read, err := peekHello(&firstByte{c.Conn, func() {
		spoke()
		c.Conn.SetReadDeadline(begun.Add(timeout)) //nolint:errcheck // the next read fails, then
		if ctx.Err() != nil {
			c.Conn.SetReadDeadline(time.Unix(1, 0)) //nolint:errcheck // likewise
		}
	}})
	if !stop() {
		return hello{}, context.Cause(ctx)
	}
	if err != nil {
		return hello{}, err
	}
	c.again = read
	return h, c.Conn.SetReadDeadline(time.Time{})
}

// firstByte calls seen once, when the first byte has come.
type firstByte struct {
	net.Conn
	seen func() // nil when it has been called
}

func (f *firstByte) Read(p []byte) (int, error) {
	n, err := f.Conn.Read(p)
	if f.seen == nil {
		return n, err
	}
	// A read after its deadline fails also while bytes wait in the kernel: this process was late.
	late := errors.Is(err, os.ErrDeadlineExceeded) && listen.Unread(f.Conn)
	if n > 0 || late {
		f.seen() // sets the next deadline
		f.seen = nil
	}
	if late {
		return f.Conn.Read(p)
	}
	return n, err
}

// isPlainHTTP reports whether err says that the caller spoke HTTP without TLS, by
// the same signs as net/http.
func isPlainHTTP(err error) bool {
	re, ok := errors.AsType[tls.RecordHeaderError](err)
	if !ok {
		return false
	}
	switch string(re.RecordHeader[:]) {
	case "GET /", "HEAD ", "POST ", "PUT /", "OPTIO":
		return true
	}
	return false
}
