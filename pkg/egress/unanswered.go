package egress

import (
	"encoding/binary"
	"errors"
	"net"
	"sync"

	"google.golang.org/grpc/credentials"

	"tunnel/pkg/tunnel"
)

// Until a stream of ProxyService has been answered, its client has nothing to send but the
// dial request, or a close. gRPC cannot bound that: its longest message is the same for a
// whole server, and it buffers a message before anybody sees it. So the frames of HTTP/2
// (RFC 9113 section 4.1) are counted on their way.

const (
	// mostUnanswered is how many bytes a stream may send before our first data: a dial
	// request has some 300.
	mostUnanswered = 64 << 10

	frameHead    = 9  // bytes
	prefaceSize  = 24 // of a client, RFC 9113 section 3.4
	frameData    = 0x0
	frameHeaders = 0x1
	frameReset   = 0x3
	flagEnd      = 0x1 // END_STREAM
)

// frames finds the heads of frames in a stream of bytes.
type frames struct {
	skip int // bytes to the next head
	head [frameHead]byte
	have int // of head
}

// take calls found for each frame whose head ends in b.
func (f *frames) take(b []byte, found func(typ, flags byte, stream uint32, length int)) {
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

var errUnanswered = errors.New("more bytes than a dial request has came before the answer")

// unansweredConn is a caller's connection that fails when a stream sends more than
// mostUnanswered before it is answered.
type unansweredConn struct {
	net.Conn
	counters *tunnel.Counters
	in       frames // owned by the reader
	out      frames // owned by the writer

	mu      sync.Mutex     // guards the following
	streams map[uint32]int // those that have not been answered: the bytes that have come
}

func newUnansweredConn(c net.Conn, counters *tunnel.Counters) *unansweredConn {
	return &unansweredConn{Conn: c, counters: counters, in: frames{skip: prefaceSize}, streams: make(map[uint32]int)}
}

// Read implements net.Conn.
func (c *unansweredConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.mu.Lock()
	defer c.mu.Unlock()
	tooMany := false
	c.in.take(b[:n], func(typ, _ byte, stream uint32, length int) {
		switch typ {
		case frameHeaders:
			if _, known := c.streams[stream]; !known {
				c.streams[stream] = 0
			}
		case frameReset:
			delete(c.streams, stream)
		case frameData:
			if came, unanswered := c.streams[stream]; unanswered {
				c.streams[stream] = came + length
				tooMany = tooMany || came+length > mostUnanswered
			}
		}
	})
	if tooMany {
		c.counters.Limited(tunnel.LimitMessage)
		return 0, errUnanswered
	}
	return n, err
}

// Write implements net.Conn.
func (c *unansweredConn) Write(b []byte) (int, error) {
	c.mu.Lock()
	c.out.take(b, func(typ, flags byte, stream uint32, _ int) {
		if typ == frameData || typ == frameReset || typ == frameHeaders && flags&flagEnd != 0 {
			delete(c.streams, stream)
		}
	})
	c.mu.Unlock()
	return c.Conn.Write(b)
}

// unansweredListener accepts connections without TLS.
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

// unansweredCreds are those of connections with TLS.
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
