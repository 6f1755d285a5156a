package wsconn

import (
	"net"
	"sync"
)

// gather is the connection below a WebSocket. Package websocket writes a message in pieces: a client's in many of
// 4 KiB, because it masks them, and a server's in two. Without gather, each piece would be a system call and a TLS
// record.
type gather struct {
	net.Conn
	flood *flood // counts what Read returns

	mu    sync.Mutex // guards the following, and is held while the connection below is written to
	begun bool       // a message has begun: its pieces wait in piece
	piece []byte     // from the pool; nil: nothing waits
	used  int        // how many bytes of piece are filled
}

// NetConn returns the connection below.
func (g *gather) NetConn() net.Conn { return g.Conn }

// Read implements net.Conn.
func (g *gather) Read(b []byte) (int, error) { return g.flood.read(g.Conn, b) }

// begin makes pieces wait until end.
func (g *gather) begin() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.begun = true
}

// end writes the pieces that wait.
func (g *gather) end() error {
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
