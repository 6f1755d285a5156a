package balancer

import (
	"context"
	"net"
	"sync"

	"tunnel.example/tunnel/pkg/listen"
	"tunnel.example/tunnel/pkg/tunnel"
)

// listener is the listener that Balancers.Listener returns.
type listener struct {
	net.Listener // accepts from callers and balancers

	// Set once.
	balancers *Balancers
	strangers *listen.Strangers // connections of balancers that have not sent their header
	accepted  chan accepted     // run and identify send to Accept; never closed; unbuffered: Close finds none in it
	closed    chan struct{}     // closed by Close

	starting, closing sync.Once
	running           sync.WaitGroup // the goroutine of run, and one of identify for each connection of a balancer
}

// accepted is the result of one Accept.
type accepted struct {
	conn net.Conn // nil: err is set
	err  error
}

func newListener(ln net.Listener, b *Balancers) *listener {
	return &listener{
		Listener: ln, balancers: b,
		// A few balancers are the source of all connections, so there is no limit for one source.
		strangers: listen.NewStrangers(MaxPending, MaxPending),
		accepted:  make(chan accepted), closed: make(chan struct{}),
	}
}

// Accept implements net.Listener.
func (l *listener) Accept() (net.Conn, error) {
	l.starting.Do(func() { l.running.Go(l.run) })
	select {
	case a := <-l.accepted:
		return a.conn, a.err
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener. It closes the connections that Accept has not returned.
func (l *listener) Close() (err error) {
	l.closing.Do(func() {
		close(l.closed)
		err = l.Listener.Close()
		l.starting.Do(func() {}) // a later Accept does not start run
		l.running.Wait()
	})
	return err
}

// run accepts connections until the listener is closed or fails.
func (l *listener) run() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			l.give(accepted{err: err})
			return
		}
		tcp, ok := c.(*net.TCPConn)
		if !ok || !l.balancers.Has(c.RemoteAddr()) {
			l.give(accepted{conn: c})
			continue
		}
		l.running.Go(func() {
			b := l.balancers
			identify := func() error { l.identify(ctx, tcp); return nil }
			if tunnel.Guard(b.cfg.Log, b.cfg.Counters, "the connection ends", identify) != nil {
				tunnel.Reset(tcp)
			}
		})
	}
}

// give passes a connection or an error to Accept.
func (l *listener) give(a accepted) {
	select {
	case l.accepted <- a:
	case <-l.closed:
		if a.conn != nil {
			tunnel.Reset(a.conn)
		}
	}
}

// identify reads the header of a connection, and passes the connection to Accept. ctx is done when the
// listener is closed.
func (l *listener) identify(ctx context.Context, c *net.TCPConn) {
	limited := func() { l.balancers.cfg.Counters.Limited(tunnel.LimitProxyHeader) }
	p, _ := l.strangers.Probation(c, listen.Terms{
		Time: HeaderTime, Bytes: prefix2 + maxRest2, Late: limited, Evicted: limited,
	})
	if p == nil {
		limited()
		tunnel.Reset(c)
		return
	}
	stop := context.AfterFunc(ctx, func() { c.Close() })
	says, err := readHeader(p)
	p.Release()
	switch {
	case !stop():
		return // closed
	case err != nil:
		l.balancers.failed(c, err)
		tunnel.Reset(c)
		return
	}
	via := &Conn{TCPConn: c, caller: says.caller, dest: says.dest}
	if via.caller == nil {
		via.caller, via.dest, via.check = c.RemoteAddr(), c.LocalAddr(), true
	}
	l.give(accepted{conn: via})
}
