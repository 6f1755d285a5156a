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

// door is one open listener. Its port can be replaced while it accepts, so that no caller is refused.
type door struct {
	// Set once.
	addr *net.TCPAddr // as configured: a port that the kernel chooses is 0
	ln   net.Listener

	port   atomic.Pointer[port] // for the next callers
	closed atomic.Bool          // set before ln is closed
}

// accept gives each permitted connection to serve, until ctx is done or the door is closed.
func (d *door) accept(ctx context.Context, serve func(*port, net.Conn)) error {
	for {
		c, err := d.ln.Accept()
		p := d.port.Load()
		switch {
		case err == nil:
		case ctx.Err() != nil || d.closed.Load():
			return nil
		default:
			return fmt.Errorf("accepting on %q of [mode.cloud.tcp]: %w", p.Listen, err)
		}
		if p.admits(c) {
			serve(p, c)
		}
	}
}

// close closes the listener. The conns of its callers go on.
func (d *door) close() {
	d.closed.Store(true)
	d.ln.Close()
}

func closeAll(doors []*door) {
	for _, d := range doors {
		d.close()
	}
}

// openAll opens all listeners. If any of them fails, it closes the others and returns all failures
// in one error.
func (f *FrontDoor) openAll(ctx context.Context, listeners []Listener) ([]*door, error) {
	var open []*door
	var errs []error
	for _, l := range listeners {
		addr, err := resolve(l)
		var d *door
		if err == nil {
			d, err = f.openOne(ctx, l, addr)
		}
		if err != nil {
			errs = append(errs, listenError(l, err))
			continue
		}
		open = append(open, d)
	}
	if err := errors.Join(errs...); err != nil {
		closeAll(open)
		return nil, err
	}
	return open, nil
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
