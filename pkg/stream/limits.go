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
	Dials             int           // opens of a node that it has not answered; see tunnel.Queue for the share of a target
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
		Opens:             5000,
		Dials:             DefaultMaxConns / 2, // targets that do not answer leave the other conns alone
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

// What an edge may send by itself in a second: heartbeats, its control stream, and whatever
// a newer edge may have to say. Each open that the cloud sends allows it some more: an answer
// and a cancel, or a stream, and once more as much for the unforeseen. An edge that opens and
// resets streams (CVE-2023-44487) comes to its end here; before that grpc-go lets no more
// handlers run than there may be streams.
const (
	ownMessages, openMessages = 1000, 4
	ownStreams, openStreams   = 1000, 2
	ownFrames, openFrames     = 8000, 4 // HTTP/2 frames that carry nothing; a gigabyte takes some 4,000 window updates
)

// EdgeLimits bound what a cloud may have an edge do. A zero field is the default.
type EdgeLimits struct {
	Conns int // conns at once, those being dialled included
	Dials int // targets being dialled at once
}

// DefaultEdgeLimits returns what zero fields stand for: more than one cloud that keeps to
// its own limits asks for, and several replicas together.
func DefaultEdgeLimits() EdgeLimits {
	return EdgeLimits{Conns: 2 * DefaultMaxConns, Dials: DefaultMaxConns}
}

func (l EdgeLimits) orDefault() EdgeLimits {
	d := DefaultEdgeLimits()
	return EdgeLimits{Conns: cmp.Or(l.Conns, d.Conns), Dials: cmp.Or(l.Dials, d.Dials)}
}

// bucket lets something happen rate times a second, burst times at once, and as often as
// allow was called besides.
type bucket struct {
	rate, burst float64 // set once
	most        float64 // of what allow adds; set once

	mu      sync.Mutex // guards the following
	left    float64    // at last
	last    time.Time
	allowed float64 // what is left of what allow has added
}

// burst is what a bucket holds of its rate.
const burst = 2 * time.Second

// newBucket returns a full bucket.
func newBucket(rate int) *bucket {
	most := float64(rate) * burst.Seconds()
	return &bucket{rate: float64(rate), burst: most, left: most, last: time.Now()}
}

// take reports whether it may happen once more.
func (b *bucket) take() bool { return b.wait() == 0 }

// wait takes one and returns 0, or returns how long it takes until there is one.
func (b *bucket) wait() time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	now := time.Now()
	b.left = min(b.burst, b.left+b.rate*now.Sub(b.last).Seconds())
	b.last = now
	switch {
	case b.allowed >= 1:
		b.allowed--
	case b.left >= 1:
		b.left--
	default:
		return max(1, time.Duration((1-b.left)/b.rate*float64(time.Second)))
	}
	return 0
}

// allow lets it happen n times more, whenever that is.
func (b *bucket) allow(n float64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.allowed = min(b.most, b.allowed+n)
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
