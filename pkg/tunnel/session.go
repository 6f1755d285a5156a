package tunnel

import (
	"context"
	"net"
	"sync/atomic"
	"time"
)

// Session is one live control stream between a node and a replica, as either side has it.
// A credential proved the node at join; the node never changes.
type Session struct {
	// Set once.
	ID     string    // unique among all sessions of all replicas
	Node   NodeName  // proven at join
	Remote string    // the peer's address, as the transport sees it
	Since  time.Time // when the session was established
	Reach  string    // the addresses that the edge says it reaches, unchecked; pkg/konnectivity parses it
	Link             // the transport

	// Written by the transport, read by any goroutine.
	Conns atomic.Int64 // conns that are open now or being dialled
	RTT   atomic.Int64 // round trip of the last heartbeat in nanoseconds; 0 before the first one
	// Leaving: the peer is about to stop. Where any node may serve, this one is tried last.
	Leaving atomic.Bool
}

// Link is the transport of one session.
type Link interface {
	// Send queues m for the peer and returns at once. It returns an error if the
	// session has ended.
	Send(m *Message) error
	// Dial asks the edge to dial r.Addr and returns the conn (cloud only).
	Dial(ctx context.Context, r Request) (net.Conn, error)
	// Serve answers the open request m in a goroutine of the session (edge only). It
	// splices the conn that dial returns to the caller's conn, or sends the error of
	// dial as a refusal. A handler may call it: Serve returns at once, unless m came by
	// a connection of its own, whose goroutine then does the work.
	Serve(m *Message, dial DialFunc) error
	// Close ends the session and resets its conns. It tells the peer why: reason.
	Close(reason error)
	// Done is closed when the session has ended.
	Done() <-chan struct{}
}

// DialFunc dials the target of a request from the edge. ctx is done when the caller
// has left or the session has ended.
type DialFunc func(ctx context.Context, r Request) (net.Conn, error)
