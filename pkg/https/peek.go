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

	"tunnel.example/tunnel/pkg/listen"
)

const (
	// maxHello bounds the bytes read before a ClientHello is complete. It is the length of the
	// longest handshake message that crypto/tls accepts.
	maxHello = 64 << 10
)

var (
	errHelloSeen    = errors.New("the ClientHello was read")
	errHelloTooLong = fmt.Errorf("no ClientHello in the first %d bytes", maxHello)
)

// hello is the part of a ClientHello that we use.
type hello struct {
	serverName string // lower case; empty without SNI
}

// peekHello reads a ClientHello from r. It returns the hello and every byte read from r, which may
// be more than the hello. crypto/tls parses it: we run a TLS server that gives up once it has
// parsed the hello.
func peekHello(r io.Reader) (h hello, read []byte, err error) {
	peeked := &helloReader{r: r}
	var seen *tls.ClientHelloInfo
	err = tls.Server(peeked, &tls.Config{
		MinVersion: tls.VersionTLS10, // decide and terminate choose what we serve
		GetConfigForClient: func(info *tls.ClientHelloInfo) (*tls.Config, error) {
			seen = info
			return nil, errHelloSeen
		},
	}).Handshake()
	if seen == nil {
		if peeked.err != nil {
			err = peeked.err // without crypto/tls' text about a handshake
		}
		return hello{}, peeked.read, err
	}
	return hello{serverName: strings.ToLower(seen.ServerName)}, peeked.read, nil
}

// helloReader is the conn from which crypto/tls reads a ClientHello. It records the bytes read and
// discards what crypto/tls writes.
type helloReader struct {
	net.Conn // nil: no other method is called
	r        io.Reader
	read     []byte // bytes returned by Read so far, at most maxHello
	err      error  // last error of Read
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

// peek reads the ClientHello; Read will return the same bytes again. It gives up after timeout,
// when no byte has come within listen.FirstByte, or when ctx is done. It calls onFirstByte at the
// first byte.
func (c *clientConn) peek(ctx context.Context, timeout time.Duration, onFirstByte func()) (hello, error) {
	start := time.Now()
	if err := c.Conn.SetReadDeadline(start.Add(min(timeout, listen.FirstByte))); err != nil {
		return hello{}, err
	}
	stop := context.AfterFunc(ctx, func() {
		c.Conn.SetReadDeadline(time.Unix(1, 0))
	})
	h, read, err := peekHello(&firstByte{c.Conn, func() {
		onFirstByte()
		c.Conn.SetReadDeadline(start.Add(timeout))
		if ctx.Err() != nil {
			c.Conn.SetReadDeadline(time.Unix(1, 0))
		}
	}})
	if !stop() {
		return hello{}, context.Cause(ctx)
	}
	if err != nil {
		return hello{}, err
	}
	c.replay = read
	return h, c.Conn.SetReadDeadline(time.Time{})
}

// firstByte calls onFirst once, when the first byte has come.
type firstByte struct {
	net.Conn
	onFirst func() // nil after the call
}

func (f *firstByte) Read(p []byte) (int, error) {
	n, err := f.Conn.Read(p)
	if f.onFirst == nil {
		return n, err
	}
	// A Read after its deadline fails even if bytes wait in the kernel: this process was late.
	late := errors.Is(err, os.ErrDeadlineExceeded) && listen.Unread(f.Conn)
	if n > 0 || late {
		f.onFirst() // also sets the next deadline
		f.onFirst = nil
	}
	if late {
		return f.Conn.Read(p)
	}
	return n, err
}

// isPlainHTTP reports whether err means that the caller spoke HTTP without TLS. It uses the same
// signs as net/http.
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
