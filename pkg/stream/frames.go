package stream

import (
	"encoding/binary"
	"errors"
	"net"
	"time"

	"golang.org/x/net/http2"
)

// meteredConn is the connection of an edge, below HTTP/2. It counts the frames without payload
// data: SETTINGS, PING, PRIORITY, WINDOW_UPDATE, RST_STREAM, empty DATA and others. gRPC accepts
// any number of such frames, and each frame costs gRPC more than it costs the edge.
type meteredConn struct {
	net.Conn
	flooded func(frames int) bool // called with the number of new frames; true: too many

	// Owned by Read.
	skip   int    // how many bytes come before the next frame's header: the rest of the preface or of a payload
	header []byte // the part of the next frame's header that was read so far
	over   bool   // flooded has returned true
}

// http2Header is the length of a frame header in bytes (RFC 9113 section 4.1).
const http2Header = 9

// errFlooded is the error of every Read after a flood.
var errFlooded = errors.New("too many HTTP/2 frames without data")

func newMeteredConn(c net.Conn, flooded func(int) bool) *meteredConn {
	return &meteredConn{Conn: c, flooded: flooded, skip: len(http2.ClientPreface), header: make([]byte, 0, http2Header)}
}

// Read implements net.Conn. After a flood it reads nothing more. It fails only after lastWords, so
// that gRPC has time to send the status that ends the session.
func (c *meteredConn) Read(b []byte) (int, error) {
	if c.over {
		time.Sleep(lastWords)
		return 0, errFlooded
	}
	n, err := c.Conn.Read(b)
	if frames := c.count(b[:n]); frames > 0 && c.flooded(frames) {
		c.over = true
	}
	return n, err
}

// count returns how many frames without payload data have a header that ends in b.
func (c *meteredConn) count(b []byte) (frames int) {
	for len(b) > 0 {
		if c.skip > 0 {
			n := min(c.skip, len(b))
			c.skip -= n
			b = b[n:]
			continue
		}
		n := min(http2Header-len(c.header), len(b))
		c.header = append(c.header, b[:n]...)
		b = b[n:]
		if len(c.header) < http2Header {
			return frames
		}
		length, typ := int(binary.BigEndian.Uint32(c.header)>>8), http2.FrameType(c.header[3])
		if !(typ == http2.FrameData && length > 0) && typ != http2.FrameHeaders { // HEADERS count as streams
			frames++
		}
		c.skip, c.header = length, c.header[:0]
	}
	return frames
}
