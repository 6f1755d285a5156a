package https

import (
	"bytes"
	"crypto/tls"
	"errors"
	"net/http"
	"os"
	"strconv"

	"tunnel.example/tunnel/pkg/tunnel"
)

// framedConn is the conn from which net/http reads HTTP/1. It detects requests that state the end
// of their body twice, and so perhaps differently: by Content-Length and by Transfer-Encoding. They
// are a means of request smuggling, and RFC 9112 section 6.3 permits refusing them. net/http
// accepts them and drops the Content-Length. In HTTP/1.0 Transfer-Encoding alone is such a request
// (section 6.1).
//
// It knows where a head starts because it counts the bytes of bodies with a Content-Length. It does
// not detect the end of a chunked body; a request with one is the last on its connection (see
// proxy.ServeHTTP).
type framedConn struct {
	*tls.Conn
	counters *tunnel.Counters // set once

	// Owned by the reader. net/http has one reader at a time.
	buffered []byte // read from Conn and not yet given to net/http; part of buf
	frame    framing
	timedOut bool          // the deadline passed in the middle of a head
	buf      [4 << 10]byte // what the last Read of Conn returned
}

func (c *framedConn) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	if len(c.buffered) == 0 {
		if c.frame.part != inHead {
			n, err := c.Conn.Read(p[:c.frame.upTo(len(p))])
			c.frame.readBody(n)
			return n, err
		}
		n, err := c.Conn.Read(c.buf[:])
		if n == 0 {
			if len(c.frame.head) > 0 && !c.timedOut && errors.Is(err, os.ErrDeadlineExceeded) {
				c.timedOut = true
				c.counters.Limited(tunnel.LimitHandshakeTimeout)
			}
			return 0, err
		}
		c.buffered = c.buf[:n]
	}
	p = p[:min(len(p), len(c.buffered))]
	n := c.frame.next(c.buffered[:len(p)])
	if c.frame.tooLong {
		c.frame.tooLong = false
		c.counters.Limited(tunnel.LimitHeaders)
	}
	copy(p, c.buffered[:n])
	c.buffered = c.buffered[n:]
	return n, nil
}

// framing finds the heads of the requests on an HTTP/1 connection. A framing with only maxHead set
// is at the start of the first one.
type framing struct {
	maxHead   int    // bytes that net/http accepts as a head; set once
	part      part   // what the next byte belongs to
	remaining int64  // bytes left of a body with a Content-Length
	head      []byte // bytes read of a head; the last line may be incomplete
	begun     bool   // head has other bytes than ends of lines
	both      bool   // a head had both Content-Length and Transfer-Encoding
	// A head had Transfer-Encoding. In HTTP/1.0 net/http drops that header and uses the
	// Content-Length.
	encoded bool
	tooLong bool // a head is longer than net/http accepts
}

// part is a part of an HTTP/1 connection.
type part int

const (
	inHead part = iota
	inBody      // of a body with a Content-Length
	inRest      // the rest of the last request, or bytes that net/http refuses
)

// next reads bytes from p that belong to one part, at least one byte, and returns how many.
func (f *framing) next(p []byte) int {
	if f.part != inHead {
		n := f.upTo(len(p))
		f.readBody(n)
		return n
	}
	for i, b := range p {
		f.head = append(f.head, b)
		f.begun = f.begun || b != '\r' && b != '\n'
		switch {
		case b != '\n':
		case !f.begun:
			f.head = f.head[:0] // empty lines before a request
		case bytes.HasSuffix(f.head, []byte("\n\r\n")), bytes.HasSuffix(f.head, []byte("\n\n")):
			f.endHead()
			return i + 1
		}
		// net/http accepts 4 KiB more than its limit, and reads nothing beyond that.
		f.tooLong = f.tooLong || len(f.head) == f.maxHead+4<<10
		if len(f.head) > f.maxHead+4<<10 {
			f.part, f.head = inRest, nil
			return i + 1
		}
	}
	return len(p)
}

// endHead determines how the request's body is framed.
func (f *framing) endHead() {
	var length []byte
	hasLength, hasEncoding := false, false
	for line := range bytes.Lines(f.head) {
		name, value, _ := bytes.Cut(line, []byte(":"))
		switch http.CanonicalHeaderKey(string(name)) {
		case "Content-Length":
			hasLength, length = true, bytes.TrimSpace(value)
		case "Transfer-Encoding":
			hasEncoding = true
		}
	}
	f.head, f.begun = f.head[:0], false
	n, err := strconv.ParseUint(string(length), 10, 63)
	switch {
	case hasEncoding:
		f.part, f.both, f.encoded = inRest, hasLength, true
	case hasLength && err != nil: // net/http refuses such a request
		f.part = inRest
	case hasLength && n > 0:
		f.part, f.remaining = inBody, int64(n)
	}
}

// upTo returns how many of n bytes may belong to the current part.
func (f *framing) upTo(n int) int {
	if f.part == inBody {
		return int(min(int64(n), f.remaining))
	}
	return n
}

// readBody counts n bytes of a body.
func (f *framing) readBody(n int) {
	if f.part != inBody {
		return
	}
	if f.remaining -= int64(n); f.remaining == 0 {
		f.part = inHead
	}
}
