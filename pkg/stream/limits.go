package stream

import (
	"cmp"
	"fmt"
	"sync"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/pkg/conn"
	"tunnel.example/tunnel/pkg/tunnel"
)

// Limits bound what edges may cost a cloud, and what callers may cost a node. A zero field means
// the default, which fits 1,000 nodes on two processors. docs/limits.md says what happens at each
// limit.
type Limits struct {
	Joining           int           // accepted connections without a session at once, see listen.Strangers
	JoiningPerAddress int           // connections without a session from one source; the server closes further ones
	JoinTimeout       time.Duration // longest time of one connection from TCP accept to session
	Metadata          int           // bytes of metadata of a stream
	Conns             int           // conns of a node at once
	Opens             int           // opens of a node per second; a burst may have twice as many
	Dials             int           // unanswered opens of a node; see tunnel.Queue for the share of one target
}

// DefaultLimits returns the values of zero fields.
func DefaultLimits() Limits {
	return Limits{
		Joining: 1024,
		// All edges behind one NAT or load balancer are one source, so the limit is not smaller.
		// When all of them connect at once, the server closes the connections above the limit.
		// Those edges try again with jitter, and a join takes only milliseconds.
		JoiningPerAddress: 128,
		JoinTimeout:       joinTimeout,
		Metadata:          16 << 10,
		Conns:             DefaultMaxConns,
		Opens:             5000,
		Dials:             DefaultMaxConns / 2, // targets that do not answer leave the other half of the conns free
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

// joiningBytes is how many bytes an edge may send before it has a session. They cover two handshake
// messages of TLS, of which one may hold certificates, the metadata of a stream, and one message.
// gRPC's windows would let a stranger send megabytes.
func (l Limits) joiningBytes() int { return 32<<10 + 2*l.Metadata + conn.MaxMessage }

// relayed is how many conns another replica may request at once.
func (l Limits) relayed() int { return 4 * l.Conns }

// In each second, an edge may send ownMessages control messages, ownStreams streams, and ownFrames
// HTTP/2 frames without data. These numbers cover heartbeats, the control stream, and messages that a
// newer edge may send. Each open from the cloud allows openMessages, openStreams and openFrames more.
// They cover an answer, a cancel, the refusal of a data connection, a stream, and a reserve.
// These limits end the session of an edge that opens and resets streams (CVE-2023-44487). Until the
// session ends, grpc-go runs at most as many handlers as there may be streams.
const (
	ownMessages, openMessages = 1000, 4
	ownStreams, openStreams   = 1000, 2
	ownFrames, openFrames     = 8000, 4 // HTTP/2 frames without data; a gigabyte takes some 4,000 window updates
)

// A node may join twice a second, and thirty times at once. Each join writes to the log and the audit, and all replicas
// and front doors look at the nodes again.
const ownJoins, burstJoins = 2, 30

// EdgeLimits bound what a cloud may make an edge do. A zero field means the default.
type EdgeLimits struct {
	Conns int // conns at once, conns that are being dialled included
	Dials int // targets that are being dialled at once
}

// DefaultEdgeLimits returns the values of zero fields. A cloud of one replica with default limits
// asks for half as many conns and dials as these defaults allow.
func DefaultEdgeLimits() EdgeLimits {
	return EdgeLimits{Conns: 2 * DefaultMaxConns, Dials: DefaultMaxConns}
}

func (l EdgeLimits) orDefault() EdgeLimits {
	d := DefaultEdgeLimits()
	return EdgeLimits{Conns: cmp.Or(l.Conns, d.Conns), Dials: cmp.Or(l.Dials, d.Dials)}
}

// maxReaching is how many calls of Reach on a session an edge may have that are unanswered, or were refused within the
// last burst. So the edge stays below ownStreams: only for a call that it lets in, the cloud allows another stream.
const maxReaching = ownStreams

// maxUnanswered is how many calls of Reach the cloud works on for a node at once, on all sessions of the node together.
// Each has a goroutine, also for a moment after its connection has ended, so an edge that joins again and again could
// otherwise have ever more. An edge that restarts has two sessions with maxReaching calls each.
const maxUnanswered = 2 * maxReaching

// bucket limits how often an event may happen: at a steady rate with bursts, plus once for each grant
// of the method allow.
type bucket struct {
	steady *rate.Limiter // set once
	most   float64       // upper bound of granted; set before the first use

	mu      sync.Mutex // guards the following
	granted float64    // grants of the method allow that no event has used yet; fractions add up
}

// burst is how long an unused bucket saves up its rate: a full bucket allows the events of two
// seconds at once.
const burst = 2 * time.Second

// newBucket returns a full bucket that refills by perSecond each second.
func newBucket(perSecond int) *bucket {
	full := perSecond * int(burst/time.Second)
	return &bucket{steady: rate.NewLimiter(rate.Limit(perSecond), full), most: float64(full)}
}

// take reports whether the event may happen now, and counts it if so.
func (b *bucket) take() bool { return b.wait() == 0 }

// wait counts one event and returns 0, or counts none and returns the time until the next event is
// allowed.
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

// allow grants n further events, at any time. Unused grants never exceed most.
func (b *bucket) allow(n float64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.granted = min(b.most, b.granted+n)
}

// limitError ends the session of an edge that exceeds a limit.
type limitError struct {
	limit tunnel.Limit // the exceeded limit
	text  string
}

func limitErrorf(l tunnel.Limit, format string, args ...any) error {
	return &limitError{l, fmt.Sprintf(format, args...)}
}

// Error names the limit.
func (e *limitError) Error() string { return "limit " + e.limit.String() + ": " + e.text }

// GRPCStatus returns the status that the edge gets.
func (e *limitError) GRPCStatus() *status.Status {
	return status.New(codes.ResourceExhausted, e.Error())
}
