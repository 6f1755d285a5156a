package stream

import (
	"context"
	"errors"
	"os"

	"tunnel.example/tunnel/pkg/tunnel"
)

// Client implements tunnel.Budget. Conns for clouds, conns for Konnectivity's proxy-servers and dials of traces
// count together against the Limits of the edge.

// Admit waits for room for a dial and its conn, and counts both. After a refusal neither is
// counted.
func (c *Client) Admit(ctx context.Context, r tunnel.Request) *tunnel.Refusal {
	return c.queue.Enter(ctx, nil, r)
}

// Dialled ends the dial of r. A nil err means that the dial made a conn. A dial that timed out or was
// cancelled counts as unanswered by its target.
func (c *Client) Dialled(r tunnel.Request, err error) {
	silent := errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded) ||
		errors.Is(err, context.Canceled)
	c.queue.Dialled(r.Addr, err == nil || !silent && (&tunnel.Refusal{Code: tunnel.CodeOf(err)}).Answered())
}

// Over stops counting an admitted conn that has ended, or an admitted dial that has failed.
func (c *Client) Over() { c.queue.Over() }
