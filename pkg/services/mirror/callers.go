package mirror

import (
	"context"
	"net"
	"net/netip"
	"sync"

	"tunnel.example/tunnel/pkg/kube"
	"tunnel.example/tunnel/pkg/tunnel"
)

const (
	// maxConns bounds the connections to all ports of twins. Each costs two file descriptors if the cloud itself dials
	// the endpoint.
	maxConns = 4096
	// maxConnsPerAddress bounds the connections of one caller. It also ends a loop that MayDial cannot see: an
	// EndpointSlice may lead the cloud's own connections back to a port of a twin, for example by a ClusterIP.
	maxConnsPerAddress = 1024
)

// callers counts the connections to the ports of twins.
type callers struct {
	max, maxPerAddress int // set once

	mu    sync.Mutex // guards the following
	total int
	of    map[netip.Addr]int // by the caller's address; never 0
}

// enter counts a connection of a caller. If a limit is reached, enter counts nothing, and returns the limit and true.
func (c *callers) enter(from netip.Addr) (limit tunnel.Limit, full bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.of[from] >= c.maxPerAddress:
		return tunnel.LimitMirrorPerAddress, true
	case c.total >= c.max:
		return tunnel.LimitMirror, true
	case c.of == nil:
		c.of = make(map[netip.Addr]int)
	}
	c.total++
	c.of[from]++
	return 0, false
}

// leave uncounts a connection that enter has counted.
func (c *callers) leave(from netip.Addr) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.total--
	if c.of[from]--; c.of[from] == 0 {
		delete(c.of, from)
	}
}

// reset resets a connection for which enter returned a limit.
func (m *Mirror) reset(c net.Conn, d *door, limit tunnel.Limit) {
	m.cfg.Counters.Limited(limit)
	if skipped, ok := m.warnFull.Allow(); ok {
		m.log.Warn("a connection to a twin is reset: there are too many", "target", *d.addr.Load(),
			"remote", c.RemoteAddr().String(), "limit", limit.String(), "skipped", skipped)
	}
	tunnel.Reset(c)
}

// callerKey is the key of a context's value that marks the connections of a twin's callers. MayDial reads the value.
type callerKey struct{}

// know stores the addresses of the cloud's replicas for MayDial.
func (m *Mirror) know(replicas []kube.Slice) {
	all := make(map[netip.Addr]bool)
	for _, s := range replicas {
		for _, e := range s.Endpoints {
			if at, err := netip.ParseAddr(e.Address); err == nil {
				all[at.Unmap()] = true
			}
		}
	}
	m.replicas.Store(&all)
}

// MayDial refuses the dial to at if ctx belongs to a caller of a twin, and at is a port of a twin. Otherwise the conn
// would come back to a replica, again and again. Other callers may dial such a port.
func (m *Mirror) MayDial(ctx context.Context, at netip.AddrPort) error {
	replicas := m.replicas.Load()
	if ctx.Value(callerKey{}) == nil || replicas == nil || at.Port() < m.cfg.First || at.Port() > m.cfg.Last ||
		!(*replicas)[at.Addr().Unmap()] {
		return nil
	}
	return tunnel.Refusef(tunnel.Denied, "the endpoint %s is a port of this cloud for twins: it would call itself", at)
}
