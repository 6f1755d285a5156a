package tcp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"syscall"

	"tunnel.example/tunnel/pkg/listen"
)

// door is one open listener. A change can replace its line (port) while it accepts, so that no caller is refused.
type door struct {
	// Set once.
	addr *net.TCPAddr // the configured address: its port is 0 if the kernel chooses the port
	ln   net.Listener

	port   atomic.Pointer[port] // the line for the next callers
	closed atomic.Bool          // set before ln is closed
}

// accept gives each permitted connection to serve, until ctx is done or the door is closed.
func (d *door) accept(ctx context.Context, serve func(*port, net.Conn)) error {
	err := listen.Accept(ctx, d.ln, func(c net.Conn) {
		if p := d.port.Load(); p.admits(c) {
			serve(p, c)
		}
	})
	if err != nil && !d.closed.Load() {
		return fmt.Errorf("accepting on %q of [mode.cloud.tcp]: %w", d.port.Load().Listen, err)
	}
	return nil
}

// close closes the listener. The conns of its callers continue.
func (d *door) close() {
	d.closed.Store(true)
	d.ln.Close()
}

func closeAll(doors []*door) {
	for _, d := range doors {
		d.close()
	}
}

// openAll opens all listeners, or none.
func (f *FrontDoor) openAll(ctx context.Context, listeners []Listener) ([]*door, error) {
	return listen.OpenAll(listeners, func(l Listener) (*door, error) {
		addr, err := resolve(l)
		if err != nil {
			return nil, listenError(l, err)
		}
		d, err := f.openOne(ctx, l, addr)
		if err != nil {
			return nil, listenError(l, err)
		}
		return d, nil
	}, (*door).close)
}

func listenError(l Listener, err error) error {
	return fmt.Errorf("listening on %q of [mode.cloud.tcp]: %w", l.Listen, err)
}

// resolve returns the address of a listener. The address that is checked here is the address that is
// opened.
func resolve(l Listener) (*net.TCPAddr, error) {
	addr, err := net.ResolveTCPAddr("tcp", l.Listen)
	if err != nil {
		return nil, fmt.Errorf("%w; write an address and a port, such as 127.0.0.1:6443", err)
	}
	if len(l.Allow) == 0 && !addr.IP.IsLoopback() {
		return nil, fmt.Errorf("anybody who reaches this address could reach %s on the edge; "+
			"say who may connect with %q = [\"10.0.0.0/8\"] under [mode.cloud.tcpallow], or listen on 127.0.0.1",
			l.Target, l.Listen)
	}
	return addr, nil
}

// openOne opens a listener at addr, which resolve has returned.
func (f *FrontDoor) openOne(ctx context.Context, l Listener, addr *net.TCPAddr) (*door, error) {
	network := "tcp"
	if addr.IP.To4() != nil {
		network = "tcp4" // otherwise 0.0.0.0 would also open every IPv6 address
	}
	ln, err := f.Sockets.Open(listen.Callers, listen.Name{Network: network, Address: addr.String()},
		func() (net.Listener, error) { return f.listen(ctx, network, addr.String()) })
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("%w; stop what listens there (ss -ltnp shows it), or choose another port", err)
	case errors.Is(err, syscall.EADDRNOTAVAIL):
		return nil, fmt.Errorf("%w; this machine has no such address", err)
	case errors.Is(err, syscall.EACCES):
		return nil, fmt.Errorf("%w; ports below 1024 need CAP_NET_BIND_SERVICE, choose a higher one", err)
	case err != nil:
		return nil, err
	}
	p := newPort(f, l)
	d := &door{addr: addr, ln: p.balancers.Listener(listen.Steady(ln, f.log))}
	d.port.Store(p)
	return d, nil
}
