package relay

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"time"

	"tunnel.example/tunnel/pkg/services"
	"tunnel.example/tunnel/pkg/tunnel"
	"tunnel.example/tunnel/pkg/udp"
)

// forward passes the datagrams that arrive at a socket to endpoints. serving ends the socket, conns ends the flows;
// forward returns after both.
func (r *Relay) forward(serving, conns context.Context, socket *net.UDPConn) error {
	local := unmapped(socket.LocalAddr().(*net.UDPAddr).AddrPort()) //nolint:forcetypeassert // it is a UDP socket
	f := udp.NewForwarder(conns, socket, &router{r, local}, udp.Config{
		Counters: &r.udp, Core: r.cfg.Counters, Log: r.log,
	})
	return f.Run(serving)
}

// router chooses an endpoint for each flow of a socket.
type router struct {
	relay *Relay
	local netip.AddrPort // of the socket
}

var _ udp.Router = (*router)(nil)

// Route implements udp.Router. A flow keeps its endpoint as long as the endpoint serves, even if new flows go to
// others.
func (o *router) Route(caller netip.AddrPort, had string) (target string, why udp.Reason, ok bool) {
	r := o.relay
	from := caller.Addr().Unmap()
	to, err := r.kernel.destination(unmapped(caller), o.local)
	switch {
	case errors.Is(err, errUntracked), err == nil && to == o.local:
		return "", udp.DropDenied, false // the kernel did not redirect it: a program sent to the relay's own address
	case err != nil:
		if n, log := r.warnFail.Allow(); log {
			r.log.Warn("a datagram to a Service is dropped", "caller", caller, "err", err, "skipped", n)
		}
		return had, udp.DropUnreachable, had != ""
	}
	f, w, spread, known := r.waysNow(address{to, protocolUDP})
	if !known {
		return "", udp.DropDenied, false
	}
	if still, ok := r.stillServes(f, had); ok {
		return still, 0, true
	}
	sticky := time.Duration(f.service.GetAffinitySeconds()) * time.Second
	key := affinityKey{from, f.path, f.port.GetName()}
	ordered := order(w, r.affinity.get(key, sticky), spread)
	if len(ordered) == 0 {
		return "", udp.DropUnreachable, false
	}
	works := func(a attempt) bool { return r.failures.get(a.target()) == nil }
	next := ordered[max(0, slices.IndexFunc(ordered, works))]
	r.affinity.put(key, next.address(), sticky)
	return next.target(), 0, true
}

// stillServes returns the target of the endpoint that a flow to a frontend had. The target changes if the endpoint is
// in another EndpointSlice now. ok is false if the endpoint serves no more, or if the flow had none.
func (r *Relay) stillServes(f frontend, had string) (target string, ok bool) {
	t, err := services.ParseTarget(had)
	if err != nil {
		return "", false
	}
	r.mu.RLock()
	defer r.mu.RUnlock()
	find := func(endpoints []services.Named) (target string, ok bool) {
		w := r.planner.ways(r.state, f, services.Serving(f.port, f.at.Addr(), endpoints))
		for _, one := range slices.Concat(w.direct, w.far) {
			if one.GetAddress() == services.AddressOf(t.Endpoint) && one.port == t.Port {
				return one.target(), true
			}
		}
		return "", false
	}
	if e := r.state.Endpoint(t.Endpoint); e != nil && services.ServiceOf(t.Endpoint) == f.path {
		if target, ok = find([]services.Named{{Path: t.Endpoint, Endpoint: e}}); ok {
			return target, true
		}
	}
	return find(r.state.Endpoints(f.path))
}

// datagramTimeout bounds the dial of a conn for datagrams. During the dial, the conn's datagrams wait or are dropped.
const datagramTimeout = 5 * time.Second

// Dial implements udp.Router.
func (o *router) Dial(ctx context.Context, target string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, datagramTimeout)
	defer cancel()
	c, err := o.relay.dialDatagrams(ctx, target)
	if err != nil {
		o.relay.failures.put(target, err)
	}
	return c, err
}

func (r *Relay) dialDatagrams(ctx context.Context, target string) (net.Conn, error) {
	t, err := services.ParseTarget(target)
	if err != nil {
		return nil, err
	}
	r.mu.RLock()
	e := r.state.Endpoint(t.Endpoint)
	direct := e != nil && r.planner.isDirect(e)
	if direct {
		_, direct = addressOf(r.state, e)
	}
	r.mu.RUnlock()
	to := way{services.Named{Path: t.Endpoint, Endpoint: e}, t.Port, t.Protocol}
	var c net.Conn
	switch {
	case direct:
		at := to.address()
		if err = r.mayDial(e, at); err != nil {
			return nil, err
		}
		c, err = r.direct.Open(ctx, tunnel.Request{Category: name, Network: tunnel.NetworkUDP, Addr: at.String()})
		return r.opened(viaNode, c, err)
	case e != nil:
		var answered bool
		if c, answered, err = r.near.reach(ctx, to); answered {
			return r.opened(viaNear, c, err)
		}
	}
	c, err = r.reachFar(ctx, target)
	return r.opened(viaCloud, c, err)
}

// anyTarget permits all targets, since the relay itself has chosen them.
type anyTarget struct{}

// DialUDP implements udp.Policy.
func (anyTarget) DialUDP(ctx context.Context, addr string, _ func(netip.AddrPort) time.Time) (*net.UDPConn, error) {
	if _, err := netip.ParseAddrPort(addr); err != nil {
		return nil, tunnel.Refusef(tunnel.Denied, "%v", err)
	}
	c, err := (&net.Dialer{Control: Unredirected}).DialContext(ctx, "udp", addr)
	if err != nil {
		return nil, tunnel.Refusef(tunnel.Unreachable, "%v", err)
	}
	return c.(*net.UDPConn), nil //nolint:forcetypeassert // it dials by "udp"
}

// ownTargets permits the endpoints on this node. A conn may live longer than its endpoint; then ownTargets refuses new
// flows.
type ownTargets struct {
	policy udp.Policy
	relay  *Relay
}

// DialUDP implements udp.Policy.
func (o ownTargets) DialUDP(
	ctx context.Context, addr string, refusedAt func(netip.AddrPort) time.Time,
) (*net.UDPConn, error) {
	at, err := netip.ParseAddrPort(addr)
	if err != nil || !o.relay.owns(address{unmapped(at), protocolUDP}) {
		return nil, tunnel.Refusef(tunnel.Denied, "no Service has an endpoint %s (UDP) on this node any more", addr)
	}
	return o.policy.DialUDP(ctx, addr, refusedAt)
}

// owns reports whether the endpoint at is on this node.
func (r *Relay) owns(at address) bool {
	r.mu.RLock()
	defer r.mu.RUnlock()
	_, own := r.plan.own[at]
	return own && !r.state.IsClusterIP(at.Addr()) // the address may have become a ClusterIP after the plan was made
}

const (
	// avoidTime is how long new flows avoid an endpoint that could not be reached, if the Service has another one.
	avoidTime = 10 * time.Second
	// maxFailures bounds the endpoints that are avoided.
	maxFailures = 1 << 10
)
