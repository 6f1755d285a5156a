package https

import (
	"bytes"
	"crypto/tls"
	"errors"
	"net/http"
	"os"
	"strconv"

	"tunnel/pkg/tunnel"
)

// framedConn is the conn that net/http reads HTTP/1 from. It finds requests that say
// twice, and so perhaps differently, where they end: by Content-Length and by
// Transfer-Encoding. RFC 9112 section 6.3 lets a server refuse those, since they are
// how requests are smuggled; net/http takes them and forgets the Content-Length. In HTTP/1.0
// Transfer-Encoding alone is such a request (section 6.1).
//
// It knows where a head starts because it counts the bytes of bodies with a
// Content-Length. Of a chunked body it sees no end; such a request is the last one on
// its connection (see proxy.ServeHTTP).
type framedConn struct {
	*tls.Conn
	counters *tunnel.Counters // set once

	// Owned by the reader: net/http has one at a time.
	held  []byte // read and not yet given to net/http
	frame framing
	late  bool          // the end of a head has not come in time
	buf   [4 << 10]byte // what held points into
}

func (c *framedConn) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	if len(c.held) == 0 {
		if c.frame.in != inHead {
			n, err := c.Conn.Read(p[:c.frame.upTo(len(p))])
			c.frame.body(n)
			return n, err
		}
		n, err := c.Conn.Read(c.buf[:])
		if n == 0 {
			if len(c.frame.head) > 0 && !c.late && errors.Is(err, os.ErrDeadlineExceeded) {
				c.late = true
				c.counters.Limited(tunnel.LimitHandshakeTimeout)
			}
			return 0, err
		}
		c.held = c.buf[:n]
	}
	p = p[:min(len(p), len(c.held))]
	n := c.frame.next(c.held[:len(p)])
	if c.frame.long {
		c.frame.long = false
		c.counters.Limited(tunnel.LimitHeaders)
	}
	copy(p, c.held[:n])
	c.held = c.held[n:]
	return n, nil
}

// framing follows the requests on an HTTP/1 connection. One with nothing but most set is
// before the first one.
type framing struct {
	most int // bytes of a head that net/http takes; set once
	in   part
	left int64  // of a body whose length is known
	head []byte // what was read of a head; its last line may be incomplete
	both bool   // a head had Content-Length and Transfer-Encoding
	// encoded: a head had Transfer-Encoding. net/http forgets that in HTTP/1.0, and believes
	// the Content-Length.
	encoded bool
	long    bool // a head is longer than net/http takes
}

type part int

const (
	inHead part = iota
	inBody      // of known length
	inRest      // whatever comes belongs to the last request, or is refused by net/http
)

// next takes bytes from p, at least one, that belong to one part, and returns how
// many.
func (f *framing) next(p []byte) int {
	if f.in != inHead {
		n := f.upTo(len(p))
		f.body(n)
		return n
	}
	for i, b := range p {
		f.head = append(f.head, b)
		switch {
		case b != '\n':
		case len(bytes.Trim(f.head, "\r\n")) == 0:
			f.head = f.head[:0] // empty lines before a request
		case bytes.HasSuffix(f.head, []byte("\n\r\n")), bytes.HasSuffix(f.head, []byte("\n\n")):
			f.headEnds()
			return i + 1
		}
		// net/http grants as much more, and reads nothing beyond.
		f.long = f.long || len(f.head) == f.most+4<<10
		if len(f.head) > f.most+4<<10 {
			f.in, f.head = inRest, nil
			return i + 1
		}
	}
	return len(p)
}

// headEnds reads how the request's body is framed.
func (f *framing) headEnds() {
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
	f.head = f.head[:0]
	n, err := strconv.ParseUint(string(length), 10, 63)
	switch {
	case hasEncoding:
		f.in, f.both, f.encoded = inRest, hasLength, true
	case hasLength && err != nil: // net/http refuses it
		f.in = inRest
	case hasLength && n > 0:
		f.in, f.left = inBody, int64(n)
	}
}

// upTo returns how many of n bytes may belong to the part that is being read.
func (f *framing) upTo(n int) int {
	if f.in == inBody {
		return int(min(int64(n), f.left))
	}
	return n
}

// body takes n bytes that belong to a body.
func (f *framing) body(n int) {
	if f.in != inBody {
		return
	}
	if f.left -= int64(n); f.left == 0 {
		f.in = inHead
	}
}
