package tcp

import (
	"context"
	"errors"
	"net"
	"reflect"
	"slices"
	"syscall"

	"tunnel.example/tunnel/pkg/tunnel"
)

// Prepare prepares a change to other listeners: it opens what the change needs. If Prepare returns an error, the front
// door is as before. Another change, or Run, begins only after Commit or Abort.
//
// A listener whose address stays is not closed, so no caller is refused, and its next callers get the new line. In two
// cases Prepare closes a listener before it opens the new one: the new address overlaps the old address at the same
// port, or the balancers (ProxyFrom) differ. Conns continue, also conns of a removed listener.
func (f *FrontDoor) Prepare(ctx context.Context, listeners []Listener) (tunnel.Prepared, error) {
	f.changing.Lock()
	c := &change{f: f, listeners: listeners}
	if err := c.prepare(ctx); err != nil {
		c.abort(ctx)
		f.changing.Unlock()
		return tunnel.Prepared{}, err
	}
	return tunnel.Prepared{
		Commit: func() { c.commit(); f.changing.Unlock() },
		Abort:  func() { c.abort(ctx); f.changing.Unlock() },
	}, nil
}

// change is a change of the listeners. Its owner holds FrontDoor.changing.
type change struct {
	f         *FrontDoor
	listeners []Listener

	up     bool    // the front door serves; if not, prepare opens nothing
	next   []*door // the doors after the change, in the order of listeners
	opened []*door // the doors of next that prepare has opened
	left   []*door // open doors that are not in next
	closed []*door // old doors that prepare has closed, since a new address overlaps theirs
}

func (c *change) prepare(ctx context.Context) error {
	c.f.mu.Lock()
	up, stopped, open := c.f.up, c.f.stopped, slices.Clone(c.f.open)
	c.f.mu.Unlock()
	if stopped {
		return errors.New("the tcp listeners are about to close")
	}
	c.up, c.left = up, open
	if !up {
		return nil // Run opens them
	}
	addrs, errs := make([]*net.TCPAddr, len(c.listeners)), []error(nil)
	c.next = make([]*door, len(c.listeners))
	for i, l := range c.listeners {
		var err error
		if addrs[i], err = resolve(l); err != nil {
			errs = append(errs, listenError(l, err))
			continue
		}
		c.next[i] = c.keep(l, addrs[i])
	}
	for i, l := range c.listeners {
		if c.next[i] != nil || addrs[i] == nil {
			continue
		}
		d, err := c.f.openOne(ctx, l, addrs[i])
		if errors.Is(err, syscall.EADDRINUSE) && c.closePort(addrs[i].Port) {
			d, err = c.f.openOne(ctx, l, addrs[i])
		}
		if err != nil {
			errs = append(errs, listenError(l, err))
			continue
		}
		c.next[i], c.opened = d, append(c.opened, d)
	}
	return errors.Join(errs...)
}

// keep removes from left, and returns, the open door that can serve the line l; nil: there is none.
func (c *change) keep(l Listener, addr *net.TCPAddr) *door {
	i := slices.IndexFunc(c.left, func(d *door) bool {
		return d.addr.IP.Equal(addr.IP) && d.addr.Port == addr.Port && d.addr.Zone == addr.Zone &&
			slices.Equal(d.port.Load().ProxyFrom, l.ProxyFrom)
	})
	if i < 0 {
		return nil
	}
	d := c.left[i]
	c.left = slices.Delete(c.left, i, i+1)
	return d
}

// closePort closes the doors of left that have this port number, and reports whether there was one.
func (c *change) closePort(port int) (found bool) {
	c.left = slices.DeleteFunc(c.left, func(d *door) bool {
		if d.addr.Port != port {
			return false
		}
		d.close()
		c.closed, found = append(c.closed, d), true
		return true
	})
	return found
}

func (c *change) commit() {
	f := c.f
	f.mu.Lock()
	defer f.mu.Unlock()
	f.listeners = c.listeners
	if c.up && !f.up { // Run has begun to stop
		closeAll(c.opened)
		return
	}
	if !c.up {
		return
	}
	for i, d := range c.next {
		if l := c.listeners[i]; !reflect.DeepEqual(d.port.Load().line, l) {
			d.port.Store(newPort(f, l))
		}
	}
	f.open = c.next
	for _, d := range c.opened {
		f.start(d)
	}
	closeAll(c.left)
}

// abort closes what prepare has opened, and opens again what it has closed.
func (c *change) abort(ctx context.Context) {
	closeAll(c.opened)
	f := c.f
	for _, d := range c.closed {
		l := d.port.Load().line
		again, err := f.openOne(ctx, l, d.addr)
		if err != nil {
			f.log.Error("a port is closed, since it could not be opened again after a change that failed; "+
				"restart the cloud", "frontend", l.Listen, "err", err)
			continue
		}
		f.mu.Lock()
		if i := slices.Index(f.open, d); f.up && i >= 0 {
			f.open[i] = again
			f.start(again)
		} else {
			again.close()
		}
		f.mu.Unlock()
	}
}
