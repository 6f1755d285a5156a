package https

import (
	"context"
	"errors"
	"net"
	"os"
	"time"

	"tunnel.example/tunnel/pkg/hello"
	"tunnel.example/tunnel/pkg/listen"
)

// peek reads the ClientHello; Read will return the same bytes again. It gives up after timeout,
// when no byte has come within listen.FirstByte, or when ctx is done. It calls onFirstByte at the
// first byte. The one port has read the ClientHello already.
func (c *clientConn) peek(ctx context.Context, timeout time.Duration, onFirstByte func()) (h hello.Hello, err error) {
	if read, ok := c.Conn.(*hello.Conn); ok {
		onFirstByte()
		h, c.replay = read.Again()
		return h, nil
	}
	start := time.Now()
	if err = c.Conn.SetReadDeadline(start.Add(min(timeout, listen.FirstByte))); err != nil {
		return h, err
	}
	stop := context.AfterFunc(ctx, func() {
		c.Conn.SetReadDeadline(time.Unix(1, 0))
	})
	h, read, err := hello.Peek(&firstByte{c.Conn, func() {
		onFirstByte()
		c.Conn.SetReadDeadline(start.Add(timeout))
		if ctx.Err() != nil {
			c.Conn.SetReadDeadline(time.Unix(1, 0))
		}
	}})
	if !stop() {
		return h, context.Cause(ctx)
	}
	if err != nil {
		return h, err
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
