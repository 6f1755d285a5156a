package tunnel

import (
	"sync/atomic"
	"time"
)

// Session is one live control stream, between a node and a replica or between two replicas. Each side
// has its own Session for the stream. A credential proved the node at join; the node never changes.
type Session struct {
	// Set once.
	ID     string    // unique among all sessions of all replicas
	Node   NodeName  // proven at join; "" between two replicas
	Remote string    // the peer's address, as the transport sees it
	Since  time.Time // when the session was established
	Reach  string    // the addresses that the edge says it reaches, unchecked; pkg/konnectivity parses it
	Link             // the transport
	Dialer Dialer    // asks the peer to dial; nil at the side that joined, which cannot ask for dials

	// Instance is the id of the peer's process, unchecked. An agent has none, nor has a cloud that
	// is configured without other replicas. Set once.
	Instance string

	// Set once, at the cloud only.
	All   bool // the edge keeps a session with every replica
	Agent bool // the peer is a konnectivity agent, not an edge

	// Written by the transport, read by any goroutine.
	Conns atomic.Int64 // conns that are open now or being dialled
	RTT   atomic.Int64 // round trip of the last heartbeat in nanoseconds; 0 before the first one
	// Leaving: the peer, a konnectivity agent, is about to stop. A dial to any node tries it last.
	// Sessions of edges do not set Leaving: they refuse dials by themselves.
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
