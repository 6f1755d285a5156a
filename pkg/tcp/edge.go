package tcp

import (
	"context"

	"tunnel.example/tunnel/pkg/tunnel"
)

// Edge is the edge's module: it dials the targets that the cloud's front door asks for.
type Edge struct {
	dial tunnel.DialFunc
}

var _ tunnel.Routed = (*Edge)(nil)

// NewEdge returns the module. dial decides which targets are permitted.
func NewEdge(dial tunnel.DialFunc) *Edge { return &Edge{dial: dial} }

// Name implements tunnel.Module.
func (e *Edge) Name() string { return name }

// Routes implements tunnel.Routed.
func (e *Edge) Routes() map[string]tunnel.Handler {
	return map[string]tunnel.Handler{
		tunnel.TypeOpen: func(_ context.Context, in *tunnel.Incoming) error { return in.Serve(e.dial) },
	}
}

// Run implements tunnel.Module. The sessions own the conns and wait for them.
func (e *Edge) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}
