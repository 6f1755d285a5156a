package api

import (
	"context"
	"net"
	"sync"
)

// insideListener is a net.Listener inside this process: each call of dial makes a conn, and Accept returns its other
// end.
type insideListener struct {
	conns  chan net.Conn // dial sends, Accept receives; unbuffered, so that no conn is left behind; never closed
	closed chan struct{} // Close closes it
	once   sync.Once     // makes Close close closed only once
}

func newInsideListener() *insideListener {
	return &insideListener{conns: make(chan net.Conn), closed: make(chan struct{})}
}

func (l *insideListener) dial(ctx context.Context) (net.Conn, error) {
	ours, theirs := net.Pipe()
	select {
	case l.conns <- theirs:
		return ours, nil
	case <-l.closed:
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Accept implements net.Listener.
func (l *insideListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (l *insideListener) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

// Addr implements net.Listener.
func (l *insideListener) Addr() net.Addr { return insideAddr{} }

// insideAddr is the address of an insideListener.
type insideAddr struct{}

// Network implements net.Addr.
func (insideAddr) Network() string { return "inside" }

// String implements net.Addr.
func (insideAddr) String() string { return "inside" }
