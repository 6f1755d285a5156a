package stream

import "tunnel/pkg/tunnel"

// A Client is the budget of its edge: who else has the edge dial asks it, too
// (egress.Budget), and all of them share Limits.

// Admit counts a dial and the conn that comes of it, unless that is one too many.
func (c *Client) Admit() *tunnel.Refusal { return c.admit() }

// Dialled says that a dial has ended, one way or the other.
func (c *Client) Dialled() { c.dialing.Add(-1) }

// Over says that the conn has ended, or that there is none.
func (c *Client) Over() { c.serving.Add(-1) }
