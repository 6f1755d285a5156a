// Package hello reads the ClientHello with which a TLS connection begins, without answering it.
//
//	h, read, err := hello.Peek(conn)
//	c := hello.NewConn(conn, conn.RemoteAddr(), h, read) // TLS can begin on c: Read returns the ClientHello again
//
// crypto/tls parses the ClientHello. The package decides nothing, and sets no deadline.
package hello

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"time"
)

// MaxLen bounds the bytes read before a ClientHello is complete. It is the length of the longest
// handshake message that crypto/tls accepts.
const MaxLen = 64 << 10

var (
	errSeen      = errors.New("the ClientHello was read")
	errProtocols = fmt.Errorf("the ClientHello offers more than %d protocols", maxProtocols)
	errTooLong   = fmt.Errorf("no ClientHello in the first %d bytes", MaxLen)
)

// Hello is the part of a ClientHello by which connections are told apart.
type Hello struct {
	ServerName string   // the SNI in lower case; empty without SNI
	Protocols  []string // ALPN, in the order of the client; empty without ALPN
}

// Peek reads a ClientHello from r. It returns the hello and every byte read from r, which may be more
// than the hello. crypto/tls parses it: Peek runs a TLS server that gives up once it has parsed the
// hello.
func Peek(r io.Reader) (h Hello, read []byte, err error) {
	peeked := &reader{r: r}
	var seen *tls.ClientHelloInfo
	err = tls.Server(peeked, &tls.Config{
		MinVersion: tls.VersionTLS10, // the server behind decides what is served
		GetConfigForClient: func(info *tls.ClientHelloInfo) (*tls.Config, error) {
			seen = info
			return nil, errSeen
		},
	}).Handshake()
	if seen == nil {
		if peeked.err != nil {
			err = peeked.err // without crypto/tls' text about a handshake
		}
		return Hello{}, peeked.read, err
	}
	if len(seen.SupportedProtos) > maxProtocols { // 20 times as large in memory as on the wire
		return Hello{}, peeked.read, errProtocols
	}
	return Hello{ServerName: strings.ToLower(seen.ServerName), Protocols: seen.SupportedProtos}, peeked.read, nil
}

// maxProtocols is how many protocols (ALPN) a client may offer.
const maxProtocols = 64

// reader is the conn from which crypto/tls reads a ClientHello. It records the bytes read and discards
// what crypto/tls writes.
type reader struct {
	net.Conn // nil: no other method is called
	r        io.Reader
	read     []byte // bytes returned by Read so far, at most MaxLen
	err      error  // last error of Read
}

func (h *reader) Read(p []byte) (int, error) {
	room := MaxLen - len(h.read)
	if room <= 0 {
		h.err = errTooLong
		return 0, h.err
	}
	n, err := h.r.Read(p[:min(len(p), room)])
	h.read = append(h.read, p[:n]...)
	if err != nil {
		h.err = err
	}
	return n, err
}

func (h *reader) Write(p []byte) (int, error)      { return len(p), nil }
func (h *reader) Close() error                     { return nil }
func (h *reader) SetDeadline(time.Time) error      { return nil }
func (h *reader) SetReadDeadline(time.Time) error  { return nil }
func (h *reader) SetWriteDeadline(time.Time) error { return nil }
func (h *reader) LocalAddr() net.Addr              { return nil }
func (h *reader) RemoteAddr() net.Addr             { return nil }

// PlainHTTPAnswer is what net/http answers to plain HTTP on an HTTPS port.
const PlainHTTPAnswer = "HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.\n"

// IsPlainHTTP reports whether err, of Peek, means that the caller spoke HTTP without TLS. It uses the
// same signs as net/http.
func IsPlainHTTP(err error) bool {
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

// Conn is a TCP connection whose ClientHello has been read. Read returns its bytes again.
type Conn struct {
	*net.TCPConn

	// Set once.
	remote net.Addr // the caller's address; behind a balancer not the socket's

	hello   Hello       // empty after Again; owned by the reader
	replay  []byte      // bytes that Read returns first; owned by the reader
	waiting atomic.Bool // replay is not empty
}

// NewConn returns the connection of a ClientHello that was read over socket. remote is the address of
// the caller, and read are the bytes that Peek returned.
func NewConn(socket *net.TCPConn, remote net.Addr, h Hello, read []byte) *Conn {
	c := &Conn{TCPConn: socket, remote: remote, hello: h, replay: read}
	c.waiting.Store(len(read) > 0)
	return c
}

// RemoteAddr returns the address of the caller.
func (c *Conn) RemoteAddr() net.Addr { return c.remote }

// Socket implements listen.Socketed.
func (c *Conn) Socket() *net.TCPConn { return c.TCPConn }

// HasUnread implements listen.Holder: the bytes of the ClientHello may still have to be read.
func (c *Conn) HasUnread() bool { return c.waiting.Load() }

// Again returns what Peek has returned, for an owner that replays the bytes itself. From then on Read
// returns the bytes that follow.
func (c *Conn) Again() (Hello, []byte) {
	h, read := c.hello, c.replay
	c.hello, c.replay = Hello{}, nil
	c.waiting.Store(false)
	return h, read
}

// Read implements net.Conn.
func (c *Conn) Read(p []byte) (int, error) {
	if len(c.replay) == 0 {
		return c.TCPConn.Read(p)
	}
	n := copy(p, c.replay)
	if c.replay = c.replay[n:]; len(c.replay) == 0 {
		c.replay = nil // up to MaxLen bytes: let them be collected
		c.waiting.Store(false)
	}
	return n, nil
}

// WriteTo implements io.WriterTo. The method of the socket would skip the bytes to be replayed.
func (c *Conn) WriteTo(w io.Writer) (int64, error) {
	return io.Copy(w, struct{ io.Reader }{c})
}
