package tunnel

import (
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
	Dialer Dialer    // asks the edge to dial; nil at the edge, which cannot ask the cloud

	// Instance is the id of the peer's process, unchecked; an agent has none, and neither has a cloud
	// that is a single replica. Set once.
	Instance string

	// Set once, at the cloud only.
	All   bool // the edge keeps a session with every replica
	Agent bool // the peer is a konnectivity agent, not an edge

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
	// Close ends the session and resets its conns. It tells the peer why: reason.
	Close(reason error)
	// Done is closed when the session has ended.
	Done() <-chan struct{}
}
