package egress

import (
	"context"
	"net"

	"tunnel/pkg/auth"
	"tunnel/pkg/tunnel"
)

// Edge is the edge's module: it dials what the cloud's front door asks for.
type Edge struct {
	policy *auth.Policy
	pods   *pods
}

// NewEdge returns the module. policy decides what may be dialled, beside the pods of this
// node where the cloud knows them (networks.go).
func NewEdge(policy *auth.Policy) *Edge {
	p := &pods{routes: readRoutes, devices: theDevices()}
	return &Edge{policy: policy.Also(p.has), pods: p}
}

// Name implements tunnel.Module.
func (e *Edge) Name() string { return name }

// Routes implements tunnel.Module.
func (e *Edge) Routes() map[string]tunnel.Handler {
	return map[string]tunnel.Handler{
		tunnel.TypeOpen: func(_ context.Context, from *tunnel.Session, m *tunnel.Message) error {
			return from.Serve(m, e.Dial)
		},
		typeNetworks: e.pods.hear,
	}
}

// Dial dials what this edge may, a tunnel.DialFunc.
func (e *Edge) Dial(ctx context.Context, r tunnel.Request) (net.Conn, error) {
	return e.policy.DialRequest(ctx, r)
}

// Run implements tunnel.Module. The sessions do the work and wait for it.
func (e *Edge) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}
