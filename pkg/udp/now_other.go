//go:build !unix

package udp

import (
	"errors"
	"net"
	"net/netip"
	"syscall"
	"time"
)

// sender sends datagrams. On this system it waits for room in a socket's buffer.
type sender struct{}

func newSender() *sender { return new(sender) }

func (*sender) send(to *endSocket, p, _ []byte) error {
	_, err := to.conn.Write(p)
	return err
}

func (*sender) sendTo(by *endSocket, _ bool, caller netip.AddrPort, p, control []byte) error {
	_, _, err := by.conn.WriteMsgUDPAddrPort(p, control, caller)
	return err
}

// endSocket is a UDP socket: of a flow at an edge, connected to the target, or of a port, not connected.
type endSocket struct {
	conn *net.UDPConn
	raw  syscall.RawConn
}

// receive calls handle for each datagram, until the socket is closed or handle returns false.
// failed gets errors of single datagrams, such as a refusal. On this system it holds a buffer of the
// pool all the time.
func (e *endSocket) receive(pool *buffers, handle func(p []byte) bool, failed func(error) (goOn bool)) error {
	b := pool.get()
	defer pool.put(b)
	for {
		n, err := e.conn.Read(b[:])
		switch {
		case errors.Is(err, net.ErrClosed):
			return err
		case err != nil && !failed(err), err == nil && !handle(b[:n]):
			return nil
		case err != nil:
			time.Sleep(time.Millisecond) // an error that repeats must not keep a processor busy
		}
	}
}
