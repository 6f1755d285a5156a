package egress

import (
	"context"
	"log/slog"
	"net"
	"net/netip"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/tunnel"
)

// Edge is the edge's module. It dials targets for the cloud's front door.
type Edge struct {
	policy *auth.Policy
	pods   *pods
	asker  *asker
}

var _ tunnel.Routed = (*Edge)(nil)

// NewEdge returns the module. It may dial the targets that policy permits. It may also dial the pods
// of its node, once the cloud has told their networks (networks.go).
func NewEdge(policy *auth.Policy, log *slog.Logger) *Edge {
	p := &pods{log: log.With("module", name), routes: readRoutes, devices: systemDevices()}
	return &Edge{policy: policy.Also(p.has), pods: p, asker: &asker{}}
}

// TellNetworks has f called with the networks of the node's pods, at each message of the cloud. f must not
// block. Call TellNetworks before Run.
func (e *Edge) TellNetworks(f func([]netip.Prefix)) { e.pods.tell = f }

// TellNeighbours has the edge ask the cloud for the other nodes in the networks of its links, and f called with each
// answer. links may be called at any time. f must not block. Call TellNeighbours before Run.
func (e *Edge) TellNeighbours(links func() []netip.Prefix, f func([]Neighbour)) {
	e.asker.links, e.asker.tell = links, f
}

// InContainer reports whether packets to a go to a container of this machine, and nowhere else. A cloud cannot change
// that.
func (e *Edge) InContainer(a netip.Addr) bool { return e.pods.inContainer(a) }

// Name implements tunnel.Module.
func (e *Edge) Name() string { return name }

// Routes implements tunnel.Routed.
func (e *Edge) Routes() map[string]tunnel.Handler {
	return map[string]tunnel.Handler{
		tunnel.TypeOpen: func(_ context.Context, in *tunnel.Incoming) error { return in.Serve(e.Dial) },
		// The first message of a cloud whose egress front door knows the nodes, so the one to answer.
		typeNetworks: func(ctx context.Context, in *tunnel.Incoming) error {
			err := e.pods.setNetworks(ctx, in)
			e.asker.ask(in.From)
			return err
		},
		typeNeighbours: e.asker.setNeighbours,
	}
}

// Dial dials a target that is permitted. It is a tunnel.DialFunc.
func (e *Edge) Dial(ctx context.Context, r tunnel.Request) (net.Conn, error) {
	return e.policy.DialRequest(ctx, r)
}

// Run implements tunnel.Module. Sessions call the module, and own its conns.
func (e *Edge) Run(ctx context.Context) error {
	e.asker.run(ctx)
	return nil
}
