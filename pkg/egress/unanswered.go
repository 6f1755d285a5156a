package egress

import (
	"encoding/binary"
	"errors"
	"net"
	"sync"

	"google.golang.org/grpc/credentials"

	"tunnel.example/tunnel/pkg/tunnel"
)

// Before we answer a stream of ProxyService, its client has only a dial request or a close to send. gRPC
// cannot bound these bytes: the maximum message size applies to a whole server, and gRPC buffers a
// message before a handler sees it. So this file counts the bytes of HTTP/2 frames (RFC 9113 section
// 4.1) in each connection.

const (
	// maxUnanswered is how many bytes of data a stream may send before our answer. A dial request has
	// about 300.
	maxUnanswered = 64 << 10

	frameHead    = 9  // bytes
	prefaceSize  = 24 // bytes that a client sends first, RFC 9113 section 3.4
	frameData    = 0x0
	frameHeaders = 0x1
	frameReset   = 0x3
	flagEnd      = 0x1 // END_STREAM
)

// frames finds the frame headers in a stream of bytes.
type frames struct {
	skip int // bytes to the next frame header
	head [frameHead]byte
	have int // bytes of head that have been read
}

// feed parses b, the next bytes of the stream. It calls found for each frame header whose last byte is in b.
func (f *frames) feed(b []byte, found func(typ, flags byte, stream uint32, length int)) {
	for len(b) > 0 {
		if f.skip > 0 {
			n := min(f.skip, len(b))
			f.skip, b = f.skip-n, b[n:]
			continue
		}
		n := copy(f.head[f.have:], b)
		f.have, b = f.have+n, b[n:]
		if f.have == frameHead {
			f.have = 0
			f.skip = int(f.head[0])<<16 | int(f.head[1])<<8 | int(f.head[2])
			found(f.head[3], f.head[4], binary.BigEndian.Uint32(f.head[5:])&(1<<31-1), f.skip)
		}
	}
}

var (
	errUnanswered = errors.New("the caller sent more bytes before the answer than a dial request has")
	errStreams    = errors.New("the caller began a stream again, or more streams than it may")
)

// unansweredConn is a caller's connection. Reading fails after a stream has sent more than maxUnanswered
// bytes before our answer. It also fails after more than proxyStreams streams without an answer, and after a stream
// with a used id (RFC 9113 section 5.1.1). gRPC refuses such streams itself, and keeps an answer for each.
type unansweredConn struct {
	net.Conn
	counters *tunnel.Counters
	in       frames // from the caller; owned by the reader
	out      frames // to the caller; owned by the writer

	mu      sync.Mutex     // guards the following
	streams map[uint32]int // unanswered streams by id, with the bytes of data that each has sent
	last    uint32         // the highest id of a stream
}

func newUnansweredConn(c net.Conn, counters *tunnel.Counters) *unansweredConn {
	return &unansweredConn{Conn: c, counters: counters, in: frames{skip: prefaceSize}, streams: make(map[uint32]int)}
}

// Read implements net.Conn.
func (c *unansweredConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.mu.Lock()
	defer c.mu.Unlock()
	tooMuch, tooMany := false, false
	c.in.feed(b[:n], func(typ, _ byte, stream uint32, length int) {
		switch typ {
		case frameHeaders:
			if tooMany = tooMany || stream <= c.last || len(c.streams) == proxyStreams; !tooMany {
				c.streams[stream], c.last = 0, stream
			}
		case frameReset:
			delete(c.streams, stream)
		case frameData:
			if sent, unanswered := c.streams[stream]; unanswered {
				c.streams[stream] = sent + length
				tooMuch = tooMuch || sent+length > maxUnanswered
			}
		}
	})
	switch {
	case tooMuch:
		c.counters.Limited(tunnel.LimitMessage)
		return 0, errUnanswered
	case tooMany:
		c.counters.Limited(tunnel.LimitStreams)
		return 0, errStreams
	}
	return n, err
}

// Write implements net.Conn.
func (c *unansweredConn) Write(b []byte) (int, error) {
	c.mu.Lock()
	c.out.feed(b, func(typ, flags byte, stream uint32, _ int) {
		if typ == frameData || typ == frameReset || typ == frameHeaders && flags&flagEnd != 0 {
			delete(c.streams, stream)
		}
	})
	c.mu.Unlock()
	return c.Conn.Write(b)
}

// unansweredListener accepts callers without TLS as unansweredConns.
type unansweredListener struct {
	net.Listener
	counters *tunnel.Counters
}

// Accept implements net.Listener.
func (l unansweredListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return newUnansweredConn(c, l.counters), nil
}

// unansweredCreds make unansweredConns of callers over TLS, above the encryption.
type unansweredCreds struct {
	credentials.TransportCredentials
	counters *tunnel.Counters
}

// ServerHandshake implements credentials.TransportCredentials.
func (c unansweredCreds) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := c.TransportCredentials.ServerHandshake(raw)
	if err != nil {
		return conn, info, err
	}
	return newUnansweredConn(conn, c.counters), info, nil
}

// Clone implements credentials.TransportCredentials.
func (c unansweredCreds) Clone() credentials.TransportCredentials {
	return unansweredCreds{c.TransportCredentials.Clone(), c.counters}
}
