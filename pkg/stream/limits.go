package stream

import (
	"cmp"
	"fmt"
	"sync"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"tunnel/pkg/conn"
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
func (l Limits) joiningBytes() int { return 32<<10 + 2*l.Metadata + conn.MaxMessage }

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

// bucket limits how often something may happen: at a steady rate with bursts, and as often again as
// allow has granted.
type bucket struct {
	steady *rate.Limiter
	most   float64 // bound of granted; set once

	mu      sync.Mutex // guards the following
	granted float64    // what allow has granted and nobody has used; fractions add up
}

// burst is how long a bucket that was not used saves up its rate.
const burst = 2 * time.Second

// newBucket returns a full bucket of so many a second.
func newBucket(perSecond int) *bucket {
	full := perSecond * int(burst/time.Second)
	return &bucket{steady: rate.NewLimiter(rate.Limit(perSecond), full), most: float64(full)}
}

// take reports whether it may happen once more.
func (b *bucket) take() bool { return b.wait() == 0 }

// wait takes one and returns 0, or takes none and returns how long it is until there is one.
func (b *bucket) wait() time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.granted >= 1 {
		b.granted--
		return 0
	}
	one := b.steady.Reserve()
	delay := one.Delay()
	if delay > 0 {
		one.Cancel()
	}
	return delay
}

// allow lets it happen n times more, at any time.
func (b *bucket) allow(n float64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.granted = min(b.most, b.granted+n)
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
