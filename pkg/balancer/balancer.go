// Package balancer lets a port stand behind load balancers that speak the PROXY protocol. Such a
// balancer sends a header before the first byte of each connection; the header says who the caller is.
//
//	b := balancer.New(balancer.Config{From: networks, Key: "proxyfrom", Table: "[mode.cloud.https]", Log: log})
//	ln = b.Listener(ln)
//	c, err := ln.Accept() // c.RemoteAddr() is the caller's address
//
// A connection from a balancer must begin with a header of version 1 or 2; otherwise it is closed. A
// header without a caller's address (the command LOCAL, and UNKNOWN in version 1) comes from a health
// check: such a connection keeps the address of the balancer. A connection from any other address
// passes unchanged. If it begins with a header, the owner of the port refuses it, see
// [Balancers.Unexpected].
//
// The header is read before the owner of the port counts the connection, so that the owner's limits
// count callers and not balancers. Until its header has come, a connection of a balancer is bounded by
// [MaxPending] and [HeaderTime].
//
// [Header] makes the header that a target gets, see package tcp.
//
// Package github.com/pires/go-proxyproto parses and writes headers. Its listener is not used: it reads
// the header at the first Read, so the caller would be unknown when limits count the connection.
package balancer

import (
	"bytes"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/tunnel"
)

const (
	// HeaderTime is how long a balancer may take to send its header. Its first byte must come within
	// listen.FirstByte. The specification (section 2) advises at least 3 s, in which TCP can send a
	// lost packet again.
	HeaderTime = 5 * time.Second
	// MaxPending is how many connections of balancers to one port may wait for their header at once. A
	// balancer sends the header together with the connection, so few connections wait.
	MaxPending = 1024
)

// Config configures [New].
type Config struct {
	From       auth.Sources // addresses of the balancers; none: there is no balancer
	Key, Table string       // where From is configured: "proxyfrom", "[mode.cloud.https]"
	Counters   *tunnel.Counters
	Log        *slog.Logger
}

// Balancers are the balancers in front of one or more ports.
type Balancers struct {
	cfg Config // set once

	// Each kind of warning has its own limiter, so that one kind does not hide another.
	noHeader, unexpected tunnel.Limiter
}

// New returns the balancers that cfg names.
func New(cfg Config) *Balancers {
	if cfg.Counters == nil {
		cfg.Counters = new(tunnel.Counters)
	}
	return &Balancers{cfg: cfg}
}

// Has reports whether a connection from peer comes from a balancer.
func (b *Balancers) Has(peer net.Addr) bool { return b.cfg.From.Permits(listen.AddrOf(peer)) }

// Listener returns a listener whose connections have the addresses of callers. It starts a goroutine
// at the first Accept, and one for each connection of a balancer until the header has come. Close waits
// for them.
func (b *Balancers) Listener(ln net.Listener) net.Listener {
	if len(b.cfg.From) == 0 {
		return ln
	}
	return newListener(ln, b)
}

// failed counts and logs that a balancer did not send a usable header.
func (b *Balancers) failed(c net.Conn, err error) {
	remote := c.RemoteAddr().String()
	if errors.Is(err, errSilent) { // a health check that only connects
		b.cfg.Log.Debug("a balancer has connected and sent nothing", "remote", remote)
		return
	}
	b.cfg.Counters.HeadersMissing.Add(1)
	if skipped, ok := b.noHeader.Allow(); ok {
		b.cfg.Log.Warn("connection of a balancer refused", "frontend", c.LocalAddr().String(), "remote", remote,
			"err", fmt.Sprintf("%v: switch the PROXY protocol on at the balancer, or remove its address from %s in %s",
				err, b.cfg.Key, b.cfg.Table), "skipped", skipped)
	}
}

// UnexpectedIn calls [Balancers.Unexpected] with the bytes at which a TLS handshake has failed.
func (b *Balancers) UnexpectedIn(c net.Conn, handshake error) bool {
	e, ok := errors.AsType[tls.RecordHeaderError](handshake)
	return ok && b.Unexpected(c, e.RecordHeader[:])
}

// Unexpected reports whether a connection begins with a PROXY header although no header is due. It then
// counts the connection, and logs a warning at a limited rate. No header is due if the peer is not a
// balancer, or if the balancer's header has been read already. first holds the first bytes of the
// connection. Fewer than HeaderBegin bytes are too few to tell: the result is false.
func (b *Balancers) Unexpected(c net.Conn, first []byte) bool {
	if !beginsHeader(first) {
		return false
	}
	b.cfg.Counters.HeadersUnexpected.Add(1)
	skipped, ok := b.unexpected.Allow()
	if !ok {
		return true
	}
	remote := listen.AddrOf(c.RemoteAddr())
	why := fmt.Sprintf("%s is not known as a balancer: if it is yours, write %s = [%q] into %s",
		remote, b.cfg.Key, remote, b.cfg.Table)
	if socket, ok := listen.Socket(c); ok && b.Has(socket.RemoteAddr()) {
		why = fmt.Sprintf("the balancer %s sends two headers: "+
			"if it stands behind another one, let it take that one's header (accept-proxy) instead of passing it on",
			listen.AddrOf(socket.RemoteAddr()))
	}
	b.cfg.Log.Warn("connection refused: it begins with a PROXY header",
		"frontend", c.LocalAddr().String(), "remote", c.RemoteAddr().String(), "err", why, "skipped", skipped)
	return true
}

// HeaderBegin is how many first bytes suffice to recognize a PROXY header. No TLS record begins with the
// same five bytes, and crypto/tls reports only five bytes of a record that it rejects.
const HeaderBegin = 5

// beginsHeader reports whether first is the start of a PROXY header.
func beginsHeader(first []byte) bool {
	return len(first) >= HeaderBegin && (bytes.HasPrefix(first, []byte(signature1[:HeaderBegin])) ||
		bytes.HasPrefix([]byte(signature2), first[:min(len(first), len(signature2))]))
}

// Conn is a connection from a balancer whose PROXY header has been read. Its next byte is the caller's.
type Conn struct {
	*net.TCPConn

	// Set once.
	caller net.Addr // who connected to the balancer; for a health check: the balancer itself
	dest   net.Addr // the address to which the caller connected; for a health check: the address of this port
	check  bool     // a health check: the header names no caller
}

// RemoteAddr returns the address of the caller.
func (c *Conn) RemoteAddr() net.Addr { return c.caller }

// Socket implements listen.Socketed.
func (c *Conn) Socket() *net.TCPConn { return c.TCPConn }

// IsCheck reports whether c comes from a balancer and its header names no caller. Then the balancer
// itself has connected, to see whether the port is open.
func IsCheck(c net.Conn) bool {
	via, ok := c.(*Conn)
	return ok && via.check
}
