package tunnel

import (
	"context"
	"net"
	"sync/atomic"
	"time"
)

// Session is one live control stream between a node and a replica, on either side.
// Its node was proven by a credential at join and never changes.
type Session struct {
	// Set once.
	ID     string    // unique among all sessions of all replicas
	Node   NodeName  // proven at join
	Remote string    // the peer's address, as the transport saw it
	Since  time.Time // when the session was established
	Reach  string    // what the edge says it reaches (pkg/konnectivity); nobody has looked at it
	Link             // the transport

	// Written by the transport, read by anyone.
	Conns atomic.Int64 // conns open now, those being dialled included
	RTT   atomic.Int64 // nanoseconds the last heartbeat took, 0 before the first
	// Leaving says that the peer is about to go, but serves while nobody else can.
	Leaving atomic.Bool
}

// Link is what a transport does for a session.
type Link interface {
	// Send queues m for the peer and returns at once, with an error when the session
	// has ended.
	Send(m *Message) error
	// Dial asks the edge to dial r.Addr and returns the conn (cloud only).
	Dial(ctx context.Context, r Request) (net.Conn, error)
	// Serve answers the open request m in a goroutine of the session: dial's conn
	// is spliced to the caller's, or its error becomes a refusal (edge only).
	// It returns at once where others wait for the caller, so a handler may call it.
	Serve(m *Message, dial DialFunc) error
	// Close ends the session and resets its conns. Its peer sees reason.
	Close(reason error)
	// Done is closed when the session has ended.
	Done() <-chan struct{}
}

// DialFunc dials the target of a request on the edge. ctx is done when the caller
// has gone or the session has ended.
type DialFunc func(ctx context.Context, r Request) (net.Conn, error)
