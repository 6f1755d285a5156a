package udp

import (
	"errors"
	"net"
	"sync"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

// wire is a net.Conn that turns datagrams into the bytes of frames, and back. tunnel.Splice copies between
// a wire and the tunnel's conn: it reads frames from the wire's queue, and writes the frames that arrive.
type wire struct {
	// Set once.
	name addr
	out  *queue
	// ended is called once, when the other side has ended the conn or the conn is lost. Splice may still
	// read frames then.
	ended func()

	once sync.Once // calls ended
	in   splitter  // owned by the goroutine of Splice that writes
	// flush is called after the frames of a Write were handled. Set once.
	flush func()
}

// addr is the address of both ends of a wire, for logs.
type addr string

// Network implements net.Addr.
func (addr) Network() string { return "udp frames" }

// String implements net.Addr.
func (a addr) String() string { return string(a) }

var (
	_ net.Conn        = (*wire)(nil)
	_ tunnel.Resetter = (*wire)(nil)
)

// Read returns frames for the other side. It returns io.EOF after end of the queue.
func (w *wire) Read(p []byte) (int, error) { return w.out.Read(p) }

// SetTrySend is called by Splice. try sends a frame at once, or returns false; nil: all frames go through the queue.
func (w *wire) SetTrySend(try func(head, body []byte) bool) {
	w.out.mu.Lock()
	defer w.out.mu.Unlock()
	w.out.try = try
}

// Write handles the frames in p. An error of the protocol ends the conn by a reset.
func (w *wire) Write(p []byte) (int, error) {
	err := w.in.feed(p)
	w.flush()
	if err != nil {
		w.over()
		return 0, err
	}
	return len(p), nil
}

// CloseWrite is called by Splice when the other side has ended the conn.
func (w *wire) CloseWrite() error {
	w.once.Do(w.ended)
	w.out.end()
	return nil
}

// CloseRead is called by Splice when the other side accepts no more frames.
func (w *wire) CloseRead() error { return w.Reset() }

// Reset is called by Splice when the conn is lost.
func (w *wire) Reset() error {
	w.over()
	return nil
}

// Close is called by Splice when the conn has ended.
func (w *wire) Close() error { return w.Reset() }

func (w *wire) over() {
	w.once.Do(w.ended)
	w.out.abort(tunnel.ErrReset, DropLost)
}

// LocalAddr implements net.Conn.
func (w *wire) LocalAddr() net.Addr { return w.name }

// RemoteAddr implements net.Conn.
func (w *wire) RemoteAddr() net.Addr { return w.name }

// errDeadline says that a wire has no deadlines. Splice sets one only on a conn without CloseRead.
var errDeadline = errors.New("a conn of datagrams has no deadlines")

// SetDeadline implements net.Conn.
func (w *wire) SetDeadline(time.Time) error { return errDeadline }

// SetReadDeadline implements net.Conn.
func (w *wire) SetReadDeadline(time.Time) error { return errDeadline }

// SetWriteDeadline implements net.Conn.
func (w *wire) SetWriteDeadline(time.Time) error { return errDeadline }
