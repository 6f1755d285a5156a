package listen

import (
	"net"
	"sync"
	"time"
)

// Handover is a listener whose connections somebody else has accepted, and hands over. The zero value
// is not usable; see [NewHandover].
type Handover struct {
	// Set once.
	addr  func() net.Addr
	from  *Strangers    // of the listener that accepted the connections; nil: none
	conns chan net.Conn // sent by Give, never closed; unbuffered, so that no connection is left in it
	// closed is closed by Close.
	closed chan struct{}

	once sync.Once // makes Close close closed only once
}

// NewHandover returns a listener for connections accepted at addr. from counts their peers until they
// are handed over; nil: nothing does.
func NewHandover(addr func() net.Addr, from *Strangers) *Handover {
	return &Handover{addr: addr, from: from, conns: make(chan net.Conn), closed: make(chan struct{})}
}

// Give hands c over. It reports false if the listener is closed, or if nothing has accepted c within
// timeout; 0: any time. Then c still belongs to the caller.
func (h *Handover) Give(c net.Conn, timeout time.Duration) bool {
	var late <-chan time.Time
	if timeout > 0 {
		late = time.After(timeout)
	}
	select {
	case h.conns <- c:
		return true
	case <-h.closed:
		return false
	case <-late:
		return false
	}
}

// Accept implements net.Listener.
func (h *Handover) Accept() (net.Conn, error) {
	select {
	case c := <-h.conns:
		return c, nil
	case <-h.closed:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (h *Handover) Close() error {
	h.once.Do(func() { close(h.closed) })
	return nil
}

// Addr implements net.Listener.
func (h *Handover) Addr() net.Addr { return h.addr() }

// Met notes that the peer at a has proven who it is. The listener that accepted its connection then
// knows its source, too. A nil Handover notes nothing.
func (h *Handover) Met(a net.Addr) {
	if h != nil && h.from != nil {
		h.from.Know(AddrOf(a))
	}
}

// Holder is a connection that has read bytes from its socket which its owner has not read yet.
type Holder interface {
	HasUnread() bool
}

// Unread reports whether bytes of the peer have arrived that the owner of c has not read yet: in c
// itself, or in the kernel.
func Unread(c net.Conn) bool {
	if h, ok := c.(Holder); ok && h.HasUnread() {
		return true
	}
	return unread(c)
}
