package rig

import (
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// ErrLate says that this process was late to speak: it had no processor time. The https front door hangs up on a caller
// that is silent for four seconds, or for less while the cloud stops.
var ErrLate = errors.New("this process has been silent for more than a second after it connected")

// LateConn notes in Late when its first Write comes more than a second after Begun.
type LateConn struct {
	net.Conn
	Begun time.Time
	Late  *atomic.Bool
	spoke sync.Once
}

// Write implements net.Conn.
func (c *LateConn) Write(b []byte) (int, error) {
	c.spoke.Do(func() { c.Late.Store(time.Since(c.Begun) > time.Second) })
	return c.Conn.Write(b)
}
