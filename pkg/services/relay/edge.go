package relay

import (
	"context"
	"net"
	"net/netip"
	"slices"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
	"tunnel.example/tunnel/pkg/udp"
)

// Policy decides to which endpoints the edge may connect, and connects to them. *auth.Policy is one.
type Policy interface {
	udp.Policy
	DialRequest(ctx context.Context, r tunnel.Request) (net.Conn, error)
	Permits(to netip.AddrPort) bool
}

// Edge is the edge's module for conns from other nodes. It dials endpoints on this node, and nothing else.
type Edge struct {
	relay     *Relay
	policy    Policy
	datagrams *udp.Edge
}

var _ tunnel.Routed = (*Edge)(nil)

// NewEdge returns the module. r knows the endpoints of this node, and policy dials them. From now on, r also asks
// policy before it dials such an endpoint itself. policy should permit the addresses for which r.Home is true, and no
// others because of a Service: a user who may write EndpointSlices can claim that any address is on this node.
func NewEdge(r *Relay, policy Policy) *Edge {
	cfg := r.cfg.Datagrams
	cfg.Share = 4                          // the caller is a node
	cfg.Keeps = func(target string) bool { // else a pod that is no endpoint could get the address, and the datagrams
		at, err := netip.ParseAddrPort(target)
		return err == nil && r.owns(address{unmapped(at), protocolUDP})
	}
	e := &Edge{relay: r, policy: policy, datagrams: udp.NewEdge(ownTargets{policy, r}, cfg)}
	r.ends = append(r.ends, e.datagrams)
	r.mu.Lock()
	r.permits = policy.Permits
	r.mu.Unlock()
	return e
}

// SetFlows changes how many flows of UDP each end may have at once, see udp.EdgeConfig.
func (r *Relay) SetFlows(n int) {
	for _, end := range r.ends {
		end.SetFlows(n)
	}
}

// Name implements tunnel.Module.
func (e *Edge) Name() string { return name }

// Routes implements tunnel.Routed.
func (e *Edge) Routes() map[string]tunnel.Handler {
	return map[string]tunnel.Handler{
		tunnel.TypeOpen: func(_ context.Context, in *tunnel.Incoming) error { return in.Serve(e.serve) },
	}
}

// Run implements tunnel.Module. The sessions own the conns, and wait for them to end.
func (e *Edge) Run(ctx context.Context) error { return e.datagrams.Run(ctx) }

// stateTime is how long an open waits until the state of this node has the endpoint. The cloud may have learnt of a new
// endpoint before this node has.
const stateTime = 2 * time.Second

// loadTime is how long an open waits at most, also for the state of the file. Callers give an open 10 s, and 5 s for
// datagrams.
const loadTime = 4 * time.Second

// serve dials an endpoint of this node for another node. It refuses every other address.
func (e *Edge) serve(ctx context.Context, req tunnel.Request) (net.Conn, error) {
	addr, err := netip.ParseAddrPort(req.Addr)
	protocol := map[string]string{"tcp": protocolTCP, tunnel.NetworkUDP: protocolUDP}[req.Network]
	if err != nil || protocol == "" {
		return nil, tunnel.Refusef(tunnel.Denied, "%s %q is no port of an endpoint", req.Network, req.Addr)
	}
	at := address{unmapped(addr), protocol}
	if !e.relay.waitForOwn(ctx, at) {
		return nil, tunnel.Refusef(tunnel.Denied, "no Service has an endpoint %s (%s) on node %s, as far as it knows: "+
			"tunnel services ls on it shows what it knows, and since when", at, protocol, e.relay.cfg.Node)
	}
	if protocol == protocolUDP {
		return e.datagrams.Open(ctx, req)
	}
	return e.policy.DialRequest(ctx, req)
}

// waitForOwn reports whether the endpoint at is on this node. It waits up to stateTime for a state in which the
// endpoint is. The time counts from when the file was read: after tunnel restart, the new process can read it only when
// the old process has closed it.
func (r *Relay) waitForOwn(ctx context.Context, at address) bool {
	last, counts := time.Now().Add(loadTime), false
	late := time.After(loadTime)
	for {
		r.mu.Lock()
		changed, loaded := r.changed.Next(), r.loaded || r.current
		r.mu.Unlock()
		if r.owns(at) {
			return true
		}
		if loaded && !counts {
			late, counts = time.After(min(stateTime, time.Until(last))), true
		}
		select {
		case <-changed:
		case <-late:
			return false
		case <-ctx.Done():
			return false
		}
	}
}

// Home reports whether an address belongs to this node or to one of its pods. Both the cloud and the machine must say
// so. The address of a pod is in spec.podCIDRs of the node's Node, and routed to a container. The address of the node
// is one of the Node's InternalIPs, and one of this machine. So a user who may write EndpointSlices cannot reach other
// containers, and a cloud cannot reach the network around the node.
func (r *Relay) Home(addr netip.Addr) bool {
	addr = addr.Unmap()
	isPod, isNode := r.claimed(addr)
	return addr.IsGlobalUnicast() &&
		(isPod && r.cfg.InContainer != nil && r.cfg.InContainer(addr) || isNode && r.cfg.IsOwn != nil && r.cfg.IsOwn(addr))
}

// claimed reports what the cloud says of an address. isPod: it is in the networks of this node's pods. isNode: it is an
// InternalIP of this node.
func (r *Relay) claimed(addr netip.Addr) (isPod, isNode bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	self := r.state.Node(string(r.cfg.Node))
	isPod = slices.ContainsFunc(self.GetPodCidrs(), func(text string) bool {
		network, err := netip.ParsePrefix(text)
		return err == nil && network.Contains(addr)
	})
	isNode = slices.ContainsFunc(self.GetInternalIps(), func(text string) bool {
		ip, err := netip.ParseAddr(text)
		return err == nil && ip.Unmap() == addr
	})
	return isPod, isNode
}
