package stream

import (
	"context"
	"errors"
	"os"

	"tunnel/pkg/tunnel"
)

// A Client is the budget of its edge: who else has the edge dial asks it, too
// (konnectivity.Budget), and all of them share Limits.

// Admit waits for room for a dial, and counts it with the conn that comes of it.
func (c *Client) Admit(ctx context.Context, r tunnel.Request) *tunnel.Refusal {
	return c.queue.Enter(ctx, nil, r)
}

// Dialled says that the dial of r has ended with err, nil for a conn.
func (c *Client) Dialled(r tunnel.Request, err error) {
	silent := errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded) || errors.Is(err, context.Canceled)
	c.queue.Dialled(r.Addr, err == nil || !silent && (&tunnel.Refusal{Code: tunnel.CodeOf(err)}).Answered())
}

// Over says that the conn has ended, or that there is none.
func (c *Client) Over() { c.queue.Over() }
