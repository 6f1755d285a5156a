package conf

import "time"

// Limits bound what strangers, edges and callers may cost a replica, [mode.cloud.limits]. A stranger
// is a peer that has not proven its identity yet. A field that is 0 means the default, which belongs to
// the package that enforces the limit. docs/limits.md lists all of them.
type Limits struct {
	// Connections to grpcport. An address is an IPv4 address or an IPv6 /64.
	// At a limit the replica closes a connection: see docs/limits.md for which one.
	Joining           int           // connections without a session, at once
	JoiningPerAddress int           // connections without a session from one address, at once
	JoinTimeout       time.Duration // from TCP accept to the session
	Metadata          int           // bytes of metadata of a gRPC stream

	// Limits of opens to one node. At a limit, most further opens wait: see docs/limits.md.
	Conns int // conns at once
	Opens int // opens per second, with bursts of twice as many
	Dials int // opens that the node has not answered yet, at once

	// Connections to the https ports, and to each tls:// listener of egress.
	Strangers           int           // connections of strangers at once
	StrangersPerAddress int           // connections of strangers from one address, at once
	HandshakeTimeout    time.Duration // for each step: the ClientHello, the handshake, a request header
	ConnsPerAddress     int           // passed-through connections of one address to one node
	Headers             int           // bytes of the header of a request or a response

	// Flows of each UDP port. A further flow takes the place of another: see docs/limits.md.
	Flows           int // flows at once
	FlowsPerAddress int // flows from one address, at once

	DNS     int // TCP connections to the DNS port at once
	Lookups int // DNS queries at once that wait for an upstream
	Health  int // connections to logport at once
}

// EdgeLimits bound what clouds may ask of an edge, [mode.edge.limits]. They count for the whole process,
// over the sessions with all replicas. A field that is 0 means the default.
type EdgeLimits struct {
	Conns  int // conns at once, open or being dialled
	Dials  int // targets being dialled at once
	Flows  int // flows of UDP at once
	Health int // connections to logport at once
}

const (
	// Prefixes of keys, as problems name them.
	limitsTable     = "mode.cloud.limits."
	edgeLimitsTable = "mode.edge.limits."
)

// The range of each limit. A smaller value would break normal use. A larger value would limit nothing.
const (
	maxCount     = 1 << 16   // for counts: the number of ports of an address
	maxPerSecond = 1_000_000 // for rates
	maxSeconds   = 300       // for timeouts
	minKiB       = 4         // for sizes: a ServiceAccount token has 2 KiB
	maxKiB       = 1024
)

// newLimits converts the keys of [mode.cloud.limits], and reports values out of range.
func newLimits(t *limitsKeys, r *report) Limits {
	l := limitsReader{limitsTable, r}
	return Limits{
		Joining:             l.number("joining", t.Joining, 1, maxCount),
		JoiningPerAddress:   l.number("joiningperaddress", t.JoiningPerAddress, 1, maxCount),
		JoinTimeout:         l.seconds("jointimeout", t.JoinTimeout),
		Metadata:            l.kib("metadata", t.Metadata),
		Conns:               l.number("conns", t.Conns, 1, maxCount),
		Opens:               l.number("opens", t.Opens, 1, maxPerSecond),
		Dials:               l.number("dials", t.Dials, 1, maxCount),
		Strangers:           l.number("strangers", t.Strangers, 1, maxCount),
		StrangersPerAddress: l.number("strangersperaddress", t.StrangersPerAddress, 1, maxCount),
		HandshakeTimeout:    l.seconds("handshaketimeout", t.HandshakeTimeout),
		ConnsPerAddress:     l.number("connsperaddress", t.ConnsPerAddress, 1, maxCount),
		Headers:             l.kib("headers", t.Headers),
		Flows:               l.number("flows", t.Flows, 1, maxCount),
		FlowsPerAddress:     l.number("flowsperaddress", t.FlowsPerAddress, 1, maxCount),
		DNS:                 l.number("dns", t.DNS, 1, maxCount),
		Lookups:             l.number("lookups", t.Lookups, 1, maxCount),
		Health:              l.number("health", t.Health, 1, maxCount),
	}
}

// newEdgeLimits converts the keys of [mode.edge.limits], and reports values out of range.
func newEdgeLimits(t *edgeLimitsKeys, r *report) EdgeLimits {
	l := limitsReader{edgeLimitsTable, r}
	return EdgeLimits{
		Conns:  l.number("conns", t.Conns, 1, maxCount),
		Dials:  l.number("dials", t.Dials, 1, maxCount),
		Flows:  l.number("flows", t.Flows, 1, maxCount),
		Health: l.number("health", t.Health, 1, maxCount),
	}
}

// limitsReader checks and converts the values of one table of limits. Each value is checked by itself.
type limitsReader struct {
	table string // prefix of its keys
	r     *report
}

// number returns n if n is in the range. 0, a missing key, means the default. For a value out of range
// it reports a problem and returns 0.
func (l limitsReader) number(key string, n, low, high int) int {
	// 0 is the value of a missing key.
	if n != 0 && (n < low || n > high) {
		l.r.add(l.table+key,
			"%d is not from %d to %d: write a number between them, or remove it for the default", n, low, high)
		return 0
	}
	return n
}

// seconds converts a timeout in seconds.
func (l limitsReader) seconds(key string, n int) time.Duration {
	return time.Duration(l.number(key, n, 1, maxSeconds)) * time.Second
}

// kib converts a size in KiB to bytes.
func (l limitsReader) kib(key string, n int) int {
	return l.number(key, n, minKiB, maxKiB) << 10
}
