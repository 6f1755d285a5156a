package stream

import (
	"encoding/binary"
	"errors"
	"net"
	"time"

	"golang.org/x/net/http2"
)

// meteredConn is the connection of an edge below HTTP/2. It counts the frames that carry
// nothing: SETTINGS, PING, PRIORITY, WINDOW_UPDATE, RST_STREAM, empty DATA and others. gRPC
// takes as many of them as come, and each costs it more than the edge.
type meteredConn struct {
	net.Conn
	flooded func(frames int) bool // has counted so many more; true: they are too many

	// Owned by Read.
	skip   int // bytes until the next frame's header: of the preface, or of a payload
	header []byte
	over   bool
}

// http2Header is the length of a frame's header (RFC 9113 section 4.1).
const http2Header = 9

var errFlooded = errors.New("too many HTTP/2 frames without data")

func newMeteredConn(c net.Conn, flooded func(int) bool) *meteredConn {
	return &meteredConn{Conn: c, flooded: flooded, skip: len(http2.ClientPreface), header: make([]byte, 0, http2Header)}
}

// Read implements net.Conn. After a flood it reads nothing more, and fails when the status
// that ends the session has had time to leave.
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

// count returns how many of the frames that begin in b carry nothing.
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
		if !(typ == http2.FrameData && length > 0) && typ != http2.FrameHeaders { // headers are counted as streams
			frames++
		}
		c.skip, c.header = length, c.header[:0]
	}
	return frames
}
