package udp

import (
	"context"
	"net"
	"net/netip"
	"time"

	"golang.org/x/sync/errgroup"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/tunnel"
)

const (
	// routeTime is how often a flow in use is routed again.
	routeTime = time.Second
	// maxMuxes is how many conns a forwarder may have. Each takes some 70 KiB.
	maxMuxes = 1024
	// maxOpened is how many of these conns the callers of one source may have opened.
	maxOpened = maxMuxes / 4
	// maxLookups is for how many new flows of one source the forwarder asks its router in a second. The goroutine that
	// receives asks, and a caller with ever new ports must leave it time for the others.
	maxLookups = 4096
	// maxLookupSources is how many sources are counted by themselves in a second; all others count as one.
	maxLookupSources = 1024
)

// lookups counts for how many new flows the router was asked in the present second, by source.
type lookups struct {
	began time.Time // of the second
	of    map[netip.Prefix]int
}

// allow reports whether the router may be asked for one more flow of a source.
func (l *lookups) allow(source netip.Prefix, now time.Time) bool {
	if l.of == nil || now.Sub(l.began) >= time.Second {
		l.began, l.of = now, make(map[netip.Prefix]int)
	}
	if len(l.of) >= maxLookupSources && l.of[source] == 0 {
		source = netip.Prefix{}
	}
	l.of[source]++
	return l.of[source] <= maxLookups
}

// A Router says where the datagrams of a Forwarder go.
type Router interface {
	// Route returns the target of a caller's datagrams. If ok is false, the forwarder drops them, and counts them under
	// why. had is the target of the caller's flow; "": there is no flow. If target is not had, the flow ends, and a new
	// flow begins. The forwarder calls Route for the first datagram of a flow, and once a second while datagrams come.
	Route(caller netip.AddrPort, had string) (target string, why Reason, ok bool)
	// Dial opens a conn for datagrams to a target, at whose other end is an Edge.
	Dial(ctx context.Context, target string) (net.Conn, error)
}

// Forwarder passes the datagrams of the callers of one socket to targets that a Router chooses. One conn for each
// target carries all flows to it.
type Forwarder struct {
	port *port
}

// NewForwarder returns a forwarder that owns the socket. conns is the context of its conns. Call Run once.
func NewForwarder(conns context.Context, socket *net.UDPConn, router Router, cfg Config) *Forwarder {
	cfg = cfg.orDefault()
	l := Listener{Listen: socket.LocalAddr().String(), Allow: auth.Sources{
		netip.PrefixFrom(netip.IPv4Unspecified(), 0), netip.PrefixFrom(netip.IPv6Unspecified(), 0),
	}}
	p := newPort(l, socket, conns, &cfg, cfg.Limits)
	p.router, p.table.perAddr = router, true
	return &Forwarder{port: p}
}

// Run serves until ctx is done. Then it opens no flow, and returns when all flows have been idle for two seconds, or
// the context of the conns is done. It closes the socket.
func (f *Forwarder) Run(ctx context.Context) error {
	p := f.port
	defer p.endConns()
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		err := p.receive()
		if err != nil {
			p.endConns() // nothing else would end the conns
		}
		return err
	})
	g.Go(func() error {
		p.sweep(gctx)
		p.closeSocket()
		p.close()
		return nil
	})
	return g.Wait()
}

// routeLocked returns the flow for a caller's datagrams; nil: the caller opens a new flow to target. It asks the router
// if f, the present flow of the caller, is nil or was routed more than routeTime ago. The caller holds mu. routeLocked
// releases mu while it asks the router, which is safe because only the goroutine that receives opens flows.
func (p *port) routeLocked(
	f *flow, caller netip.AddrPort, c *control, now time.Time,
) (to *flow, target string, why Reason, ok bool) {
	had := ""
	if f != nil {
		had = f.mux.to.Target
		if now.Sub(f.routed) < routeTime {
			return f, had, 0, true
		}
	} else if !p.lookups.allow(p.table.sourceOf(caller.Addr()), now) {
		p.core.Limited(tunnel.LimitFlowsPerAddress)
		if n, log := p.warnFlows.Allow(); log {
			p.log.Warn("datagrams are dropped: a caller begins too many flows in a second", "max", maxLookups,
				"caller", caller.Addr().String(), "skipped", n)
		}
		return nil, "", DropFlows, false
	}
	func() {
		p.mu.Unlock()
		defer p.mu.Lock() // lock again even after a panic
		target, why, ok = p.router.Route(caller, had)
	}()
	f = p.table.flows[flowKey{caller, c.local}] // look again: the flow may have ended meanwhile
	if f == nil {
		return nil, target, why, ok
	}
	if ok && target == had {
		f.routed = now
		return f, target, 0, true
	}
	p.endLocked(f)
	return nil, target, why, ok
}

// roomForMuxLocked reports whether a new flow of a caller may open another conn. If there are too many conns, it ends
// those without flows. The caller holds mu.
func (p *port) roomForMuxLocked(caller netip.Addr) bool {
	if p.router == nil || len(p.muxes) < maxMuxes && p.openers[p.table.sourceOf(caller)] < maxOpened {
		return true
	}
	hasEnded := false
	for m := range p.muxes {
		if len(m.flows) == 0 && !m.retired && (len(p.muxes) >= maxMuxes || m.opener == p.table.sourceOf(caller)) {
			p.retireLocked(m)
			hasEnded = true
		}
	}
	if hasEnded { // muxes shrinks when their conns have ended
		return true
	}
	if n, ok := p.warnFlows.Allow(); ok {
		p.log.Warn("datagrams are dropped: there are conns to too many targets", "max", maxMuxes,
			"max_per_caller", maxOpened, "caller", caller.String(), "skipped", n)
	}
	return false
}
