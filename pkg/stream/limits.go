package stream

import (
	"cmp"
	"fmt"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"tunnel/pkg/tunnel"
)

// Limits bound what edges may cost a cloud, and what callers may cost a node. A zero
// field is the default, which fits 1,000 nodes on two processors. docs/limits.md says
// what happens at each.
type Limits struct {
	Joining           int           // accepted connections without a session at once, see listen.Strangers
	JoiningPerAddress int           // of them, of one source; further ones are closed
	JoinTimeout       time.Duration // how long one may take from TCP accept to session
	Metadata          int           // bytes of metadata of a stream
	Conns             int           // conns of a node at once
	Opens             int           // opens of a node in a second; twice as many at once
	Dials             int           // opens of a node that it has not answered
}

// DefaultLimits returns what zero fields stand for.
func DefaultLimits() Limits {
	return Limits{
		Joining: 1024,
		// It is not smaller because all edges behind one NAT or balancer are one source:
		// when they all come at once, those that are too many are hung up on and try again
		// with jitter, while a join takes milliseconds.
		JoiningPerAddress: 128,
		JoinTimeout:       joinTimeout,
		Metadata:          16 << 10,
		Conns:             DefaultMaxConns,
		Opens:             1000,
		Dials:             256,
	}
}

func (l Limits) orDefault() Limits {
	d := DefaultLimits()
	return Limits{
		Joining:           cmp.Or(l.Joining, d.Joining),
		JoiningPerAddress: cmp.Or(l.JoiningPerAddress, d.JoiningPerAddress),
		JoinTimeout:       cmp.Or(l.JoinTimeout, d.JoinTimeout),
		Metadata:          cmp.Or(l.Metadata, d.Metadata),
		Conns:             cmp.Or(l.Conns, d.Conns),
		Opens:             cmp.Or(l.Opens, d.Opens),
		Dials:             cmp.Or(l.Dials, d.Dials),
	}
}

// joiningBytes is how many bytes an edge may send before it has a session: two handshake
// messages of TLS, of which one may hold certificates, the metadata of a stream and one
// message. gRPC's windows would allow a stranger megabytes.
func (l Limits) joiningBytes() int { return 32<<10 + 2*l.Metadata + maxMessage }

// relayed is how many conns another replica may ask for at once.
func (l Limits) relayed() int { return 4 * l.Conns }

// messages is how many control messages an edge may send in a second: an answer to each
// open, a cancel of each conn, twice that for what we have not thought of, and heartbeats.
func (l Limits) messages() int { return 4*l.Opens + 1000 }

// streams is how many streams an edge may open in a second: a conn for each open, twice that for those that come late together, and the control stream. An
// edge that opens and resets streams (CVE-2023-44487) comes to its end here; before that
// grpc-go lets no more handlers run than there may be streams.
func (l Limits) streams() int { return 2*l.Opens + 1000 }

// EdgeLimits bound what a cloud may have an edge do. A zero field is the default.
type EdgeLimits struct {
	Conns int // conns at once, those being dialled included
	Dials int // targets being dialled at once
}

// DefaultEdgeLimits returns what zero fields stand for: more than one cloud that keeps to
// its own limits asks for, and several replicas together.
func DefaultEdgeLimits() EdgeLimits {
	return EdgeLimits{Conns: 4 * DefaultMaxConns, Dials: 1024}
}

func (l EdgeLimits) orDefault() EdgeLimits {
	d := DefaultEdgeLimits()
	return EdgeLimits{Conns: cmp.Or(l.Conns, d.Conns), Dials: cmp.Or(l.Dials, d.Dials)}
}

// bucket lets something happen rate times a second, and burst times at once.
type bucket struct {
	rate, burst float64 // set once

	mu   sync.Mutex // guards the following
	left float64    // at last
	last time.Time
}

// burst is what a bucket holds of its rate.
const burst = 2 * time.Second

// newBucket returns a full bucket.
func newBucket(rate int) *bucket {
	most := float64(rate) * burst.Seconds()
	return &bucket{rate: float64(rate), burst: most, left: most, last: time.Now()}
}

// take reports whether it may happen once more.
func (b *bucket) take() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	b.left = min(b.burst, b.left+b.rate*now.Sub(b.last).Seconds())
	b.last = now
	if b.left < 1 {
		return false
	}
	b.left--
	return true
}

// limitError ends the session of an edge that does more than it may.
type limitError struct {
	limit tunnel.Limit
	text  string
}

func limitErrorf(l tunnel.Limit, format string, args ...any) error {
	return &limitError{l, fmt.Sprintf(format, args...)}
}

// Error names the limit.
func (e *limitError) Error() string { return "limit " + e.limit.String() + ": " + e.text }

// GRPCStatus is what the edge is told.
func (e *limitError) GRPCStatus() *status.Status {
	return status.New(codes.ResourceExhausted, e.Error())
}
