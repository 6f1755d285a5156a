package wsconn

import (
	"net"
	"sync"
)

// gather is a connection that writes the pieces of a message at once. Without it, each piece would be a system call.
//
// There is one below a WebSocket: package websocket writes a client's message in pieces of 4 KiB, because it masks
// them, and a server's in two. There may be another one below the TLS of a box in between, see [Below]: a message that
// holds a full record of the TLS above takes two records.
type gather struct {
	net.Conn
	flood *flood // counts what Read returns; nil: nobody counts

	mu    sync.Mutex // guards the following, and is held while the connection below is written to
	begun bool       // a message has begun: its pieces wait in piece
	piece []byte     // from the pool; nil: nothing waits
	used  int        // how many bytes of piece are filled
}

// Below returns a connection over raw, for the TLS between raw and a WebSocket of [Dial]. All TLS records of a message
// leave in one system call.
func Below(raw net.Conn) net.Conn { return &gather{Conn: raw} }

// gatherIn returns the gather at c or below it; nil: there is none.
func gatherIn(c net.Conn) *gather {
	for {
		if g, ok := c.(*gather); ok {
			return g
		}
		layer, ok := c.(interface{ NetConn() net.Conn })
		if !ok {
			return nil
		}
		c = layer.NetConn()
	}
}

// NetConn returns the connection below.
func (g *gather) NetConn() net.Conn { return g.Conn }

// Read implements net.Conn.
func (g *gather) Read(b []byte) (int, error) {
	if g.flood == nil {
		return g.Conn.Read(b)
	}
	return g.flood.read(g.Conn, b)
}

// begin makes pieces wait until end. On a nil gather, both do nothing.
func (g *gather) begin() {
	if g == nil {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.begun = true
}

// end writes the pieces that wait.
func (g *gather) end() error {
	if g == nil {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.begun = false
	err := g.flushLocked()
	if g.piece != nil {
		pool.Put(g.piece) //nolint:staticcheck // allocating a slice header is cheap beside allocating its bytes
		g.piece = nil
	}
	return err
}

// flushLocked writes the pieces that wait. The caller holds mu.
func (g *gather) flushLocked() error {
	if g.used == 0 {
		return nil
	}
	_, err := g.Conn.Write(g.piece[:g.used])
	g.used = 0
	return err
}

// Write implements net.Conn.
func (g *gather) Write(b []byte) (int, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.begun || len(b) > chunkSize {
		if err := g.flushLocked(); err != nil {
			return 0, err
		}
		return g.Conn.Write(b)
	}
	if g.piece == nil {
		piece, _ := pool.Get().([]byte)
		g.piece = piece[:chunkSize]
	}
	if g.used+len(b) > chunkSize {
		if err := g.flushLocked(); err != nil {
			return 0, err
		}
	}
	g.used += copy(g.piece[g.used:], b)
	return len(b), nil
}
