package udp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"reflect"
	"slices"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

// Prepare opens what the front door needs to have these listeners instead of its own. With an error, the
// front door is as before; only flows of a port that an earlier change has removed may have ended. Until Commit or
// Abort, neither another change nor Run begins.
//
// A listener whose address stays keeps its socket: no datagram is lost. Its flows go on to their old target,
// and new flows get the new line. A listener that is removed opens no flow. Its flows end as when the cloud
// stops: when they have been idle for two seconds, or after tunnel.GracePeriod.
func (f *FrontDoor) Prepare(ctx context.Context, listeners []Listener) (tunnel.Prepared, error) {
	f.changing.Lock()
	c := &change{f: f, listeners: listeners}
	if err := c.prepare(ctx); err != nil {
		closeSockets(c.opened)
		f.changing.Unlock()
		return tunnel.Prepared{}, err
	}
	return tunnel.Prepared{
		Commit: func() { c.commit(); f.changing.Unlock() },
		Abort:  func() { closeSockets(c.opened); f.changing.Unlock() },
	}, nil
}

// SetLimits changes the limits of all ports. Open flows continue, even if there are more than the new limits permit.
func (f *FrontDoor) SetLimits(l Limits) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.cfg.Limits = l
	for _, p := range slices.Concat(f.open, f.leaving) {
		p.mu.Lock()
		p.table.limits = l.orDefault()
		p.mu.Unlock()
	}
}

// closing is how long a change waits for a removed port to close. This takes hardly any time, since the conns of the
// port are reset.
const closing = 5 * time.Second

// change is a change of the listeners. Its owner holds FrontDoor.changing.
type change struct {
	f         *FrontDoor
	listeners []Listener

	up       bool    // the front door serves; if not, prepare opens nothing
	next     []*port // the ports after the change, in the order of listeners
	opened   []*port // the ports of next that prepare has opened
	unwanted []*port // open ports that are not in next
}

func (c *change) prepare(ctx context.Context) error {
	f := c.f
	f.mu.Lock()
	up, stopped, conns := f.up, f.stopped, f.conns
	c.unwanted = slices.Clone(f.open)
	f.mu.Unlock()
	if stopped {
		return errors.New("the udp sockets are about to close")
	}
	if c.up = up; !up {
		return nil // Run opens them
	}
	addrs, errs := make([]*net.UDPAddr, len(c.listeners)), []error(nil)
	c.next = make([]*port, len(c.listeners))
	for i, l := range c.listeners {
		var err error
		if addrs[i], err = resolve(l); err != nil {
			errs = append(errs, listenError(l, err))
			continue
		}
		c.next[i] = c.keep(addrs[i])
	}
	for i, l := range c.listeners {
		if c.next[i] != nil || addrs[i] == nil {
			continue
		}
		p, err := c.open(ctx, conns, l, addrs[i])
		if err != nil {
			errs = append(errs, listenError(l, err))
			continue
		}
		c.next[i], c.opened = p, append(c.opened, p)
	}
	return errors.Join(errs...)
}

// keep removes from unwanted, and returns, the port with this address; nil: there is none.
func (c *change) keep(addr *net.UDPAddr) *port {
	i := slices.IndexFunc(c.unwanted, func(p *port) bool {
		return p.addr.IP.Equal(addr.IP) && p.addr.Port == addr.Port && p.addr.Zone == addr.Zone
	})
	if i < 0 {
		return nil
	}
	p := c.unwanted[i]
	c.unwanted = slices.Delete(c.unwanted, i, i+1)
	return p
}

// open opens a port. If a port that an earlier change has removed still has the address, open ends the flows of that
// port now.
func (c *change) open(ctx, conns context.Context, l Listener, addr *net.UDPAddr) (*port, error) {
	samePort := func(p *port) bool { return p.addr.Port == addr.Port && addr.Port != 0 }
	if i := slices.IndexFunc(c.unwanted, samePort); i >= 0 {
		return nil, fmt.Errorf("%s has the port until the change is done: remove that line, reload, and then add this one",
			c.unwanted[i].line.Listen)
	}
	c.f.mu.Lock()
	leaving := slices.Clone(c.f.leaving)
	c.f.mu.Unlock()
	for _, p := range leaving {
		if samePort(p) {
			p.endConns()
			select {
			case <-p.gone:
			case <-time.After(closing):
				return nil, errors.New("the port of an earlier change is still closing: try again")
			}
		}
	}
	return c.f.openPort(ctx, conns, l, addr)
}

func (c *change) commit() {
	f := c.f
	f.mu.Lock()
	defer f.mu.Unlock()
	f.listeners = c.listeners
	switch {
	case c.up && !f.up: // Run has begun to stop
		closeSockets(c.opened)
		return
	case !c.up:
		return
	}
	for i, p := range c.next {
		p.change(c.listeners[i])
	}
	f.open = c.next
	for _, p := range c.opened {
		f.start(p)
	}
	for _, p := range c.unwanted {
		f.leaving = append(f.leaving, p)
		p.leave()
		late := time.AfterFunc(f.grace, p.endConns)
		context.AfterFunc(p.conns, func() { late.Stop() })
	}
}

// left removes a port that has ended from the front door.
func (f *FrontDoor) left(p *port) {
	p.endConns()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.leaving = slices.DeleteFunc(f.leaving, func(other *port) bool { return other == p })
	close(p.gone)
}

// change makes l the line of the port, for new flows.
func (p *port) change(l Listener) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if reflect.DeepEqual(p.line, l) {
		return
	}
	sameTarget := p.line.Node == l.Node && p.line.Target == l.Target && reflect.DeepEqual(p.line.Among, l.Among)
	p.Listener, p.line = l, l
	p.Allow = allowOrLoopback(l)
	if sameTarget {
		return
	}
	clear(p.retryAt)
	for _, m := range p.current {
		p.retireLocked(m)
	}
}

// frontend returns the configured address of the port.
func (p *port) frontend() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.Listen
}
