package tcp

import (
	"errors"
	"net"

	"tunnel.example/tunnel/pkg/balancer"
	"tunnel.example/tunnel/pkg/listen"
)

// callerConn is a caller's connection as the splice reads it. Read can add a PROXY header for the target before the
// caller's bytes, and can refuse a caller whose own first bytes are a PROXY header.
type callerConn struct {
	*net.TCPConn

	// Owned by the reader.
	header  []byte // Read returns it first, at once: the target gets it even if the caller sends nothing
	first   []byte // the caller's first bytes, at most balancer.HeaderBegin of them, until checked
	checked bool   // first has been checked, or needs no check

	unexpected func(first []byte) bool // reports whether the caller's first bytes are refused; set once
}

// errUnexpectedHeader is the error of Read for a caller whose PROXY header is refused. The log has a line about it.
var errUnexpectedHeader = errors.New("the caller has sent a PROXY header, and is not known as a balancer")

// from returns the connection that the splice reads: c, or a callerConn over c.
func (p *port) from(c net.Conn) (net.Conn, error) {
	// Without balancers, the port forwards any first bytes: a header may be for the target.
	if p.SendProxy == 0 && len(p.ProxyFrom) == 0 {
		return c, nil
	}
	tcp, ok := listen.Socket(c)
	if !ok {
		return nil, errors.New("not a TCP connection")
	}
	with := &callerConn{TCPConn: tcp, checked: len(p.ProxyFrom) == 0}
	with.unexpected = func(first []byte) bool { return p.balancers.Unexpected(c, first) }
	if p.SendProxy == 0 {
		return with, nil
	}
	var err error
	with.header, err = balancer.Header(p.SendProxy, c)
	return with, err
}

// Read implements net.Conn.
func (c *callerConn) Read(b []byte) (int, error) {
	if len(c.header) > 0 {
		n := copy(b, c.header)
		c.header = c.header[n:]
		return n, nil
	}
	n, err := c.TCPConn.Read(b)
	if n > 0 && !c.checked && c.check(b[:n]) {
		return 0, errUnexpectedHeader
	}
	return n, err
}

// check adds b to the caller's first bytes, and reports whether these bytes begin a PROXY header that is refused. It
// lets fewer bytes than balancer.HeaderBegin pass: they are no whole header, and the caller may wait for an answer.
func (c *callerConn) check(b []byte) bool {
	c.first = append(c.first, b[:min(len(b), balancer.HeaderBegin-len(c.first))]...)
	if len(c.first) < balancer.HeaderBegin {
		return false
	}
	refused := c.unexpected(c.first)
	c.first, c.checked = nil, true
	return refused
}
