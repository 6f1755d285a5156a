package egress

import (
	"context"
	"log/slog"
	"net"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/tunnel"
)

// Edge is the edge's module. It dials targets for the cloud's front door.
type Edge struct {
	policy *auth.Policy
	pods   *pods
}

var _ tunnel.Routed = (*Edge)(nil)

// NewEdge returns the module. It may dial the targets that policy permits. It may also dial the pods
// of its node, once the cloud has told their networks (networks.go).
func NewEdge(policy *auth.Policy, log *slog.Logger) *Edge {
	p := &pods{log: log.With("module", name), routes: readRoutes, devices: systemDevices()}
	return &Edge{policy: policy.Also(p.has), pods: p}
}

// Name implements tunnel.Module.
func (e *Edge) Name() string { return name }

// Routes implements tunnel.Routed.
func (e *Edge) Routes() map[string]tunnel.Handler {
	return map[string]tunnel.Handler{
		tunnel.TypeOpen: func(_ context.Context, in *tunnel.Incoming) error { return in.Serve(e.Dial) },
		typeNetworks:    e.pods.setNetworks,
	}
}

// Dial dials a target that is permitted. It is a tunnel.DialFunc.
func (e *Edge) Dial(ctx context.Context, r tunnel.Request) (net.Conn, error) {
	return e.policy.DialRequest(ctx, r)
}

// Run implements tunnel.Module. It only waits: sessions call the module, and own its conns.
func (e *Edge) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}
