package wsconn

import (
	"bufio"
	"context"
	"errors"
	"net"
	"net/http"
	"time"
)

const (
	// maxEmpty is how many pings, pongs and empty messages may arrive within Idle. They cost the receiver time, and
	// no limit of a session counts them.
	maxEmpty = 100
	// maxHeader is the longest header of a frame, in bytes (RFC 6455 section 5.2). A frame with data has one byte
	// of data at least.
	maxHeader = 14
	// maxOverhead is how many bytes may come within Idle beyond data and its headers. It covers what package
	// websocket has read ahead, two buffers and a chunk, and maxEmpty pings.
	maxOverhead = 64 << 10
)

// errFlood ends a WebSocket.
var errFlood = errors.New("the WebSocket's other end sends too many empty messages, pings or empty fragments")

// flood counts what the other end sends besides data. Package websocket does not show pings, pongs and the
// fragments of a message, but it reads all of them while receive waits. So one goroutine at a time owns a flood:
// first the goroutine of the handshake, then that of receive.
type flood struct {
	window time.Duration // how long the counts below run before they start again at 0; set once

	began       time.Time // when the counts below started
	empties     int       // pings, pongs and empty messages
	came, bytes int64     // came: all bytes read; bytes: those of data among them
	over        bool      // a limit was exceeded; it stays true
}

// renew begins to count again once a window is over.
func (f *flood) renew() {
	if now := time.Now(); now.Sub(f.began) >= f.window {
		*f = flood{window: f.window, began: now, over: f.over}
	}
}

// empty counts a ping, a pong or an empty message. It reports whether the count is within the limit.
func (f *flood) empty() bool {
	f.renew()
	f.empties++
	f.over = f.over || f.empties > maxEmpty
	return !f.over
}

// ping is the OnPingReceived of package websocket. It reports whether the ping is to be answered.
func (f *flood) ping(context.Context, []byte) bool { return f.empty() }

// pong is the OnPongReceived of package websocket.
func (f *flood) pong(context.Context, []byte) { f.empty() }

// data counts data.
func (f *flood) data(n int) { f.bytes += int64(n) }

// read reads from the connection below the WebSocket. It fails once too many bytes have come that are no data.
func (f *flood) read(c net.Conn, b []byte) (int, error) {
	if f.over {
		return 0, errFlood
	}
	n, err := c.Read(b)
	f.renew()
	f.came += int64(n)
	f.over = f.came > f.bytes*(1+maxHeader)+maxOverhead
	return n, err
}

// hijacked is a ResponseWriter whose hijacked connection is read and written by below.
type hijacked struct {
	http.ResponseWriter
	below *gather
}

// Hijack implements http.Hijacker.
func (h hijacked) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	c, rw, err := http.NewResponseController(h.ResponseWriter).Hijack()
	if err != nil {
		return nil, nil, err
	}
	h.below.Conn = c
	return h.below, bufio.NewReadWriter(rw.Reader, bufio.NewWriter(h.below)), nil
}
