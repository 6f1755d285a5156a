package rig

import (
	"errors"
	"net"
	"sync/atomic"
	"time"
)

// ErrLate says that this process was late to speak: it had no processor time. The https front door hangs up on a caller
// that is silent for four seconds, or for less while the cloud stops.
var ErrLate = errors.New("this process has been silent for more than a second on its connection")

// LateConn notes that this process was silent for more than a second although it was its turn to speak.
type LateConn struct {
	net.Conn
	late *atomic.Bool
	last atomic.Int64 // when this process has last received or sent something, in Unix nanoseconds
}

// NewLateConn returns c with a note in late. begun is when this process began to connect.
func NewLateConn(c net.Conn, begun time.Time, late *atomic.Bool) *LateConn {
	l := &LateConn{Conn: c, late: late}
	l.last.Store(begun.UnixNano())
	return l
}

// Read implements net.Conn.
func (c *LateConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.last.Store(time.Now().UnixNano())
	return n, err
}

// Write implements net.Conn.
func (c *LateConn) Write(b []byte) (int, error) {
	if time.Now().UnixNano()-c.last.Load() > int64(time.Second) {
		c.late.Store(true)
	}
	n, err := c.Conn.Write(b)
	c.last.Store(time.Now().UnixNano())
	return n, err
}
