package listen

import (
	"encoding/binary"
	"errors"
	"net"
	"sync/atomic"
	"time"

	"golang.org/x/net/http2"
)

// Metered is an accepted connection below a gRPC server. It counts frames that cost gRPC more than they cost the peer,
// before gRPC sees them:
//
//   - HEADERS, which open streams. gRPC answers some of them itself: it runs no handler and no interceptor, quotes what
//     the peer has sent, and keeps thousands of answers for a peer that does not read.
//   - Frames without payload data: SETTINGS, PING, PRIORITY, WINDOW_UPDATE, RST_STREAM, empty DATA and others. In
//     SETTINGS, each setting counts: gRPC copies all, and one of them makes it look at each stream. DATA
//     with padding or with a few bytes counts as well: gRPC clients send none, but for the tail of a message.
type Metered struct {
	net.Conn

	// Set once.
	flooded func(streams, frames int) bool // called with the numbers of new ones; true: too many
	pause   time.Duration                  // how long Read waits before it fails after a flood, see lastPauses

	wrote atomic.Bool // something was written since over became true
	ended atomic.Bool // over, for Write

	// Owned by Read.
	skip   int    // how many bytes come before the next frame's header: the rest of the preface or of a payload
	header []byte // the part of the next frame's header that was read so far
	over   bool   // flooded has returned true
}

// http2Header is the length of a frame header in bytes (RFC 9113 section 4.1).
const http2Header = 9

// settingBytes is the length of a setting in bytes (RFC 9113 section 6.5.1).
const settingBytes = 6

// tinyData is the least length of DATA that does not count, in bytes. The head of a gRPC message has five.
const tinyData = 8

// lastPauses is how many pauses Read waits at most for gRPC to send a last status, which a busy process may do late.
// After the status, Read waits for one more pause.
const lastPauses = 3

// ErrFlooded is the error of every Read of a Metered after a flood.
var ErrFlooded = errors.New("too many HTTP/2 streams, or frames without data")

// NewMetered returns c as a Metered. Nothing may have been read from c. flooded is called by Read. After it has
// returned true, Read drops what it has read. It waits for lastPauses pauses at most, so that gRPC can send a last
// status, and then fails.
func NewMetered(c net.Conn, pause time.Duration, flooded func(streams, frames int) bool) *Metered {
	return &Metered{
		Conn: c, flooded: flooded, pause: pause, skip: len(http2.ClientPreface), header: make([]byte, 0, http2Header),
	}
}

// Read implements net.Conn.
func (c *Metered) Read(b []byte) (n int, err error) {
	if !c.over {
		n, err = c.Conn.Read(b)
		streams, frames := c.count(b[:n])
		c.over = streams+frames > 0 && c.flooded(streams, frames)
	}
	if c.over {
		c.ended.Store(true)
		for range lastPauses {
			told := c.wrote.Load()
			time.Sleep(c.pause)
			if told {
				break
			}
		}
		return 0, ErrFlooded
	}
	return n, err
}

// Write implements net.Conn.
func (c *Metered) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	if c.ended.Load() {
		c.wrote.Store(true)
	}
	return n, err
}

// count returns how many HEADERS, and how many frames without payload data, have a header that ends in b.
func (c *Metered) count(b []byte) (streams, frames int) {
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
			return streams, frames
		}
		length := int(binary.BigEndian.Uint32(c.header) >> 8)
		typ, flags := http2.FrameType(c.header[3]), http2.Flags(c.header[4])
		switch {
		case typ == http2.FrameHeaders:
			streams++
		case typ == http2.FrameSettings:
			frames += 1 + length/settingBytes
		case typ != http2.FrameData, length < tinyData, flags.Has(http2.FlagDataPadded):
			frames++
		}
		c.skip, c.header = length, c.header[:0]
	}
	return streams, frames
}
