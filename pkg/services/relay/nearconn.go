package relay

import (
	"crypto/tls"
	"net"
	"sync"
	"syscall"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

// nearSilence is how long the kernel of another edge may acknowledge nothing while this machine's kernel resends.
// Without this bound, Linux resends for some 15 minutes.
const nearSilence = 30 * time.Second

// nearLooks is how often a conn asks its kernel within nearSilence.
const nearLooks = 6

// nearConn is a conn between two edges.
//
// TCP_USER_TIMEOUT bounds the handshake and the request, see boundSilence. After carry, the conn has no such timeout. A
// stalled reader may let its peer wait for any time, and TCP_USER_TIMEOUT cannot distinguish a stalled reader from a
// cut link (tcp(7)). So after carry the conn asks its kernel from time to time whether the peer still acknowledges.
type nearConn struct {
	// Set once.
	*tls.Conn
	tcp     *net.TCPConn
	asked   bool          // this edge has asked for the conn: the endpoint is at the other edge
	silence time.Duration // nearSilence, but shorter in tests

	mu      sync.Mutex  // guards the following
	check   *time.Timer // calls look; nil before carry
	ended   bool        // Close or Reset was called
	onReset func()      // set by Splice: what to call when look resets the conn; nil before Splice
	unheard time.Time   // when look first saw that the kernel resends unanswered; zero: the kernel does not

	moved    int64 // bytes of both directions, see Answered
	received bool  // the last bytes came from the other edge
	passed   bool  // Splice has written the bytes that Read has last returned
}

var _ tunnel.Resetter = (*nearConn)(nil)

// carry starts the checks of a conn that both edges have agreed on. It is called before Splice.
func (c *nearConn) carry() {
	unboundSilence(c.tcp)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.moved, c.received = 0, false // the lines that edges send each other are not part of the conn
	c.check = time.AfterFunc(c.silence/nearLooks, c.look)
}

// look resets the conn if the kernel of the other edge has acknowledged nothing for silence. A peer that does not read
// still acknowledges.
func (c *nearConn) look() {
	now := time.Now()
	ago, resends := resendsOf(c.tcp)
	c.mu.Lock()
	switch {
	case !resends:
		c.unheard = time.Time{}
	case c.unheard.IsZero(), now.Add(-ago).After(c.unheard):
		c.unheard = now // the conn may have been idle before, so an old acknowledgement proves nothing
	}
	lost := resends && now.Sub(c.unheard) >= c.silence
	if !lost && !c.ended {
		c.check.Reset(c.silence / nearLooks)
	}
	onReset := c.onReset
	c.mu.Unlock()
	if !lost {
		return
	}
	c.Reset() //nolint:errcheck // the conn is given up
	if onReset != nil {
		onReset()
	}
}

// OnReset is for tunnel.Splice. If look resets the conn, it calls f.
func (c *nearConn) OnReset(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.onReset = f
}

// end stops the calls of look.
func (c *nearConn) end() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended = true
	if c.check != nil {
		c.check.Stop()
	}
}

// Read implements net.Conn.
func (c *nearConn) Read(b []byte) (int, error) {
	c.mu.Lock()
	c.passed = true // Splice writes all bytes of a read before the next one
	c.mu.Unlock()
	n, err := c.Conn.Read(b)
	if n > 0 {
		c.mu.Lock()
		c.moved += int64(n)
		c.received, c.passed = true, false
		c.mu.Unlock()
	}
	return n, err
}

// Write implements net.Conn.
func (c *nearConn) Write(b []byte) (int, error) {
	c.mu.Lock()
	c.moved += int64(len(b))
	c.received = false
	c.mu.Unlock()
	return c.Conn.Write(b)
}

// Answered reports whether the last bytes of the conn came from the other edge and were handed on: then the last
// request has its answer. moved counts the bytes of both directions. While the process stops, tunnel.Splice ends such a
// conn at a quiet moment. At the edge that has the endpoint, ok is always false.
func (c *nearConn) Answered() (moved int64, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.moved, c.asked && c.received && c.passed
}

// Close implements net.Conn.
func (c *nearConn) Close() error {
	c.end()
	return c.Conn.Close()
}

// Reset implements tunnel.Resetter.
func (c *nearConn) Reset() error {
	c.end()
	c.tcp.SetLinger(0)
	return c.tcp.Close()
}

// SetLinger is for tunnel.ResetOnDeath.
func (c *nearConn) SetLinger(sec int) error { return c.tcp.SetLinger(sec) }

// SyscallConn implements syscall.Conn: tunnel.Splice asks the kernel about the socket.
func (c *nearConn) SyscallConn() (syscall.RawConn, error) { return c.tcp.SyscallConn() }
