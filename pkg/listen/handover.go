package listen

import (
	"net"
	"sync"
	"time"
)

// Handover is a listener for connections that another listener has accepted: its user passes them to Give, and Accept
// returns them. The zero value is not usable; see [NewHandover].
type Handover struct {
	// Set once.
	addr  func() net.Addr
	from  *Strangers    // counts strangers for the listener that accepted the connections; nil: nobody counts
	conns chan net.Conn // sent by Give, never closed; unbuffered, so that no connection is left in it
	// closed is closed by Close.
	closed chan struct{}

	once sync.Once // makes Close close closed only once
}

// NewHandover returns a listener for connections that another listener has accepted at addr. from counts the
// strangers among their peers for that listener; nil: nobody counts.
func NewHandover(addr func() net.Addr, from *Strangers) *Handover {
	return &Handover{addr: addr, from: from, conns: make(chan net.Conn), closed: make(chan struct{})}
}

// Give waits until Accept takes c. It returns false if the listener is closed, or if no Accept has taken c within
// timeout; then c still belongs to the caller. With timeout 0, Give waits without a limit.
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

// Met notes that the peer at a has proven who it is. Its source is then a known source also for the listener that
// accepted the connection. A nil Handover notes nothing.
func (h *Handover) Met(a net.Addr) {
	if h != nil && h.from != nil {
		h.from.Know(AddrOf(a))
	}
}

// Holder is a connection with a buffer: it may have read bytes from its socket that its owner has not read yet.
type Holder interface {
	HasUnread() bool
}

// Unread reports whether received bytes wait for the owner of c: in c's own buffer, or in the kernel.
func Unread(c net.Conn) bool {
	if h, ok := c.(Holder); ok && h.HasUnread() {
		return true
	}
	return unread(c)
}
