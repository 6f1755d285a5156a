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

// TellNetworks sets the function that gets the networks of the node's pods, from each message of the cloud. f must
// not block. Call TellNetworks before Run.
func (e *Edge) TellNetworks(f func([]netip.Prefix)) { e.pods.tell = f }

// TellNeighbours makes the edge ask the cloud for its neighbours: the other nodes in the networks that networks
// returns. f gets each answer. networks may be called at any time; if its ok is false, what was asked before still
// counts. f must not block. Call TellNeighbours before Run.
func (e *Edge) TellNeighbours(networks func() (all []netip.Prefix, ok bool), f func([]Neighbour)) {
	e.asker.links, e.asker.tell = networks, f
}

// InContainer reports whether packets to address a go to a container of this machine, and nowhere else. Only the
// machine's own routes decide; no message of a cloud changes the result.
func (e *Edge) InContainer(a netip.Addr) bool { return e.pods.inContainer(a) }

// Name implements tunnel.Module.
func (e *Edge) Name() string { return name }

// Routes implements tunnel.Routed.
func (e *Edge) Routes() map[string]tunnel.Handler {
	return map[string]tunnel.Handler{
		tunnel.TypeOpen: func(_ context.Context, in *tunnel.Incoming) error { return in.Serve(e.Dial) },
		// A cloud whose egress front door knows the nodes sends this message first. So the edge then asks this cloud
		// for its neighbours.
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

// Run implements tunnel.Module: it keeps asking for neighbours. Sessions call the handlers, and own the conns.
func (e *Edge) Run(ctx context.Context) error {
	e.asker.run(ctx)
	return nil
}
