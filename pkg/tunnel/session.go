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

	// Services: the peer serves Services of the cluster. Set once.
	Services bool

	// Paths returns the paths of the session's own connection, if this connection uses Multipath TCP. There may be
	// several paths, or none for a while. If Paths or its result is nil, the connection uses plain TCP. Set once.
	Paths func() []Path

	// Set once, at the cloud only.
	All   bool // the edge keeps a session with every replica
	Agent bool // the peer is a konnectivity agent, not an edge
	// Renews: the edge renews its certificate when the cloud asks for it.
	Renews bool
	// Software is the version that the peer says it runs, unchecked; "" for a konnectivity agent.
	Software string

	// Written by the transport, read by any goroutine.
	Conns atomic.Int64 // conns that are open now or being dialled
	RTT   atomic.Int64 // round trip of the last heartbeat in nanoseconds; 0 before the first one
	// Leaving: the peer, a konnectivity agent, is about to stop. A dial to any node tries it last.
	// Sessions of edges do not set Leaving: they refuse dials by themselves.
	Leaving atomic.Bool
	Traffic Traffic
	// Ends is when the peer, an edge that is about to stop, resets the conns that are left.
	Ends GraceEnd
	// CertificateEnds is when the node's certificate ends, in seconds since 1970. It is 0 if another proof than a
	// certificate opened the session, and at the side that joined.
	CertificateEnds atomic.Int64
	// Certificate describes the node's certificate; nil if CertificateEnds is 0.
	Certificate atomic.Pointer[Certificate]
	// EndedBecause says in words why the session has ended; nil while it lives, and always nil for a konnectivity
	// agent. The transport stores the text before the session leaves the Directory.
	EndedBecause atomic.Pointer[string]
}

// Traffic counts the payload bytes of a session's conns, whoever opened them. A nil Traffic counts nothing.
// Bytes of a konnectivity agent are not counted.
type Traffic struct {
	sent, received atomic.Uint64
}

// Send counts n bytes that were sent to the peer.
func (t *Traffic) Send(n int) {
	if t != nil {
		t.sent.Add(uint64(n)) //nolint:gosec // a length
	}
}

// Receive counts n bytes that have come from the peer.
func (t *Traffic) Receive(n int) {
	if t != nil {
		t.received.Add(uint64(n)) //nolint:gosec // a length
	}
}

// Bytes returns how many bytes were sent and received.
func (t *Traffic) Bytes() (sent, received uint64) { return t.sent.Load(), t.received.Load() }

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
