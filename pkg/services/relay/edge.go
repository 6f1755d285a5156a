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

// Policy decides which endpoints the edge may connect to. *auth.Policy is one.
type Policy interface {
	udp.Policy
	DialRequest(ctx context.Context, r tunnel.Request) (net.Conn, error)
	Permits(to netip.AddrPort) bool
}

// Edge is the edge's module for conns that come from other nodes: it dials the endpoints of this node.
type Edge struct {
	relay     *Relay
	policy    Policy
	datagrams *udp.Edge
}

var _ tunnel.Routed = (*Edge)(nil)

// NewEdge returns the module. r knows the endpoints. policy connects to them. It should permit the addresses of Home:
// a user who may write EndpointSlices can claim that any address is on this node. r itself dials endpoints of this node
// under the same policy.
func NewEdge(r *Relay, policy Policy) *Edge {
	e := &Edge{relay: r, policy: policy, datagrams: udp.NewEdge(ownTargets{policy, r}, r.cfg.Datagrams)}
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

// Run implements tunnel.Module. The sessions own the conns and wait for them.
func (e *Edge) Run(ctx context.Context) error { return e.datagrams.Run(ctx) }

// stateTime is how long an open waits for a state that has its endpoint. The cloud may have learnt of a new endpoint
// earlier than this node.
const stateTime = 2 * time.Second

// serve dials an endpoint of this node.
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

// waitForOwn reports whether this node has an endpoint, now or within stateTime.
func (r *Relay) waitForOwn(ctx context.Context, at address) bool {
	late := time.NewTimer(stateTime)
	defer late.Stop()
	for {
		r.mu.Lock()
		changed := r.changed.Next()
		r.mu.Unlock()
		if r.owns(at) {
			return true
		}
		select {
		case <-changed:
		case <-late.C:
			return false
		case <-ctx.Done():
			return false
		}
	}
}

// Home reports whether an address is one of this node or of its pods. Both the cloud and the machine have to say so:
// in spec.podCIDRs of the node's Node, and routed to a container; or one of its InternalIPs, and one of this machine.
// So a user who may write EndpointSlices cannot reach other containers, and a cloud cannot reach the network around
// the node.
func (r *Relay) Home(addr netip.Addr) bool {
	addr = addr.Unmap()
	isPod, isNode := r.claimed(addr)
	return addr.IsGlobalUnicast() &&
		(isPod && r.cfg.InContainer != nil && r.cfg.InContainer(addr) || isNode && r.cfg.IsOwn != nil && r.cfg.IsOwn(addr))
}

// claimed reports whether the cloud says that an address is one of a pod of this node, or of the node itself.
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
