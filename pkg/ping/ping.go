// Package ping measures the round trip between the cloud and a node, inside the tunnel.
//
//	edge:  ping.NewEdge()                                  // a module of the edge
//	cloud: trip, err := ping.Node(ctx, dialer, "edge1")    // a conn to that module, and an echo
//	cloud: trip, err := ping.Target(ctx, dialer, "edge1", "10.0.0.5:22")
//
// A ping is an ordinary conn to the edge's module "ping", which sends every byte back. So a ping takes the
// same way as callers' conns do: through other replicas, over data connections, within the node's limits.
// The edge dials nothing for it. An edge older than this package refuses the conn: [ErrOld].
package ping

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"tunnel.example/tunnel/pkg/tunnel"
)

// name is the edge's module, and the category of its opens.
const name = "ping"

// Edge is the edge's module: it echoes.
type Edge struct{}

var _ tunnel.Routed = Edge{}

// NewEdge returns the module.
func NewEdge() Edge { return Edge{} }

// Name implements tunnel.Module.
func (Edge) Name() string { return name }

// Routes implements tunnel.Routed.
func (Edge) Routes() map[string]tunnel.Handler {
	return map[string]tunnel.Handler{
		tunnel.TypeOpen: func(_ context.Context, in *tunnel.Incoming) error {
			return in.Serve(func(context.Context, tunnel.Request) (net.Conn, error) { return newEcho(), nil })
		},
	}
}

// Run implements tunnel.Module. The sessions own the conns and wait for them.
func (Edge) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

// echo is a conn whose written bytes come back. Its two directions have a goroutine each, in tunnel.Splice.
type echo struct {
	*io.PipeReader
	w *io.PipeWriter
}

func newEcho() echo {
	r, w := io.Pipe()
	return echo{r, w}
}

// Write implements net.Conn. It waits until the bytes are read.
func (e echo) Write(p []byte) (int, error) { return e.w.Write(p) }

// CloseWrite ends the bytes that come back.
func (e echo) CloseWrite() error { return e.w.Close() }

// Reset implements tunnel.Resetter.
func (e echo) Reset() error {
	return errors.Join(e.w.CloseWithError(tunnel.ErrReset), e.CloseWithError(tunnel.ErrReset))
}

// Close implements net.Conn.
func (e echo) Close() error { return errors.Join(e.w.Close(), e.PipeReader.Close()) }

// LocalAddr implements net.Conn.
func (echo) LocalAddr() net.Addr { return addr{} }

// RemoteAddr implements net.Conn.
func (echo) RemoteAddr() net.Addr { return addr{} }

// SetDeadline implements net.Conn. Splice sets a deadline only to end a direction.
func (e echo) SetDeadline(t time.Time) error { return e.SetReadDeadline(t) }

// SetReadDeadline implements net.Conn.
func (e echo) SetReadDeadline(t time.Time) error {
	if !t.IsZero() && !t.After(time.Now()) {
		e.w.CloseWithError(tunnel.ErrReset)
	}
	return nil
}

// SetWriteDeadline implements net.Conn.
func (echo) SetWriteDeadline(time.Time) error { return nil }

// addr is the address of an echo.
type addr struct{}

// Network implements net.Addr.
func (addr) Network() string { return name }

// String implements net.Addr.
func (addr) String() string { return name }

// Trip says how long the parts of a ping took.
type Trip struct {
	Open time.Duration // until the conn was open: a round trip and, for a target, the edge's dial
	Echo time.Duration // until a few bytes came back from the edge on the open conn; 0 for a target
}

// ErrOld is the error of an edge that has no module for pings.
var ErrOld = errors.New("the node answers no pings: its edge is older than tunnel ping, or it is a konnectivity agent")

// payload is the size of an echo in bytes: one small packet.
const payload = 16

// Node measures the round trip from the cloud, which has dialer, to the edge of a node.
func Node(ctx context.Context, dialer tunnel.Dialer, node tunnel.NodeName) (Trip, error) {
	began := time.Now()
	c, err := dialer.Dial(ctx, tunnel.Request{
		Node: node, Category: name, Network: name, Addr: net.JoinHostPort(name, "0"), Caller: "tunnel ping",
	})
	if err != nil {
		switch tunnel.CodeOf(err) {
		case tunnel.Internal, tunnel.Denied: // the code for a module that an edge lacks; the code of agents
			err = fmt.Errorf("%w (%w)", ErrOld, err)
		}
		return Trip{}, err
	}
	defer c.Close()
	trip := Trip{Open: time.Since(began)}
	if until, ok := ctx.Deadline(); ok {
		c.SetDeadline(until)
	}
	began = time.Now()
	var back [payload]byte
	if _, err = c.Write(make([]byte, payload)); err == nil {
		_, err = io.ReadFull(c, back[:])
	}
	if err != nil {
		return trip, fmt.Errorf("echo from node %s: %w", node, err)
	}
	trip.Echo = time.Since(began)
	return trip, nil
}

// Target measures how long it takes to open a conn to target, host:port, through a node. The edge dials the target if
// its allow list permits the target, and sends nothing there.
func Target(ctx context.Context, dialer tunnel.Dialer, node tunnel.NodeName, target string) (Trip, error) {
	began := time.Now()
	c, err := dialer.Dial(ctx, tunnel.Request{
		Node: node, Category: "tcp", Network: "tcp", Addr: target, Caller: "tunnel ping",
	})
	if err != nil {
		return Trip{}, err
	}
	trip := Trip{Open: time.Since(began)}
	return trip, c.Close()
}
