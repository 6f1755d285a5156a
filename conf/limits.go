package conf

import "time"

// Limits bound what strangers, edges and callers may cost a replica, [mode.cloud.limits].
// A field that is 0 is the default of whoever keeps to it.
type Limits struct {
	// Who dials grpcport.
	Joining           int           // connections without a session at once
	JoiningPerAddress int           // of them, of one address
	JoinTimeout       time.Duration // how long one may go without
	Metadata          int           // bytes

	// What callers may ask of one node.
	Conns int // at once
	Opens int // in a second
	Dials int // not answered yet

	// Who calls the https ports.
	Strangers           int           // connections at once that have not said who they are
	StrangersPerAddress int           // of them, of one address
	HandshakeTimeout    time.Duration // how long one may take for each step of saying it
	ConnsPerAddress     int           // passed through to one node, of one address
	Headers             int           // bytes

	DNS     int // TCP connections to the DNS port at once
	Lookups int // DNS queries that wait for an upstream
	Health  int // connections to logport at once
}

// EdgeLimits bound what clouds may have an edge do, [mode.edge.limits].
type EdgeLimits struct {
	Conns  int // at once
	Dials  int // targets being dialled at once
	Health int // connections to logport at once
}

const (
	limitsTable     = "mode.cloud.limits."
	edgeLimitsTable = "mode.edge.limits."
)

// Bounds of the bounds: below them nothing works, above them nothing is bounded.
const (
	mostAtOnce    = 1 << 16 // as many ports as an address has
	mostPerSecond = 1_000_000
	mostSeconds   = 300
	leastKiB      = 4 // a ServiceAccount's token has 2 KiB
	mostKiB       = 1024
)

func newLimits(t *limitsKeys, r *report) Limits {
	l := limitsReader{limitsTable, r}
	return Limits{
		Joining:             l.number("joining", t.Joining, 1, mostAtOnce),
		JoiningPerAddress:   l.number("joiningperaddress", t.JoiningPerAddress, 1, mostAtOnce),
		JoinTimeout:         l.seconds("jointimeout", t.JoinTimeout),
		Metadata:            l.kib("metadata", t.Metadata),
		Conns:               l.number("conns", t.Conns, 1, mostAtOnce),
		Opens:               l.number("opens", t.Opens, 1, mostPerSecond),
		Dials:               l.number("dials", t.Dials, 1, mostAtOnce),
		Strangers:           l.number("strangers", t.Strangers, 1, mostAtOnce),
		StrangersPerAddress: l.number("strangersperaddress", t.StrangersPerAddress, 1, mostAtOnce),
		HandshakeTimeout:    l.seconds("handshaketimeout", t.HandshakeTimeout),
		ConnsPerAddress:     l.number("connsperaddress", t.ConnsPerAddress, 1, mostAtOnce),
		Headers:             l.kib("headers", t.Headers),
		DNS:                 l.number("dns", t.DNS, 1, mostAtOnce),
		Lookups:             l.number("lookups", t.Lookups, 1, mostAtOnce),
		Health:              l.number("health", t.Health, 1, mostAtOnce),
	}
}

func newEdgeLimits(t *edgeLimitsKeys, r *report) EdgeLimits {
	l := limitsReader{edgeLimitsTable, r}
	return EdgeLimits{
		Conns:  l.number("conns", t.Conns, 1, mostAtOnce),
		Dials:  l.number("dials", t.Dials, 1, mostAtOnce),
		Health: l.number("health", t.Health, 1, mostAtOnce),
	}
}

// limitsReader reads a table of limits. What is wrong with a value can be said of the
// value alone.
type limitsReader struct {
	table string
	r     *report
}

func (l limitsReader) number(key string, n, least, most int) int {
	if n != 0 && (n < least || n > most) {
		l.r.add(l.table+key, "%d is not from %d to %d: write a number between them, or remove it for the default", n, least, most)
		return 0
	}
	return n
}

func (l limitsReader) seconds(key string, n int) time.Duration {
	return time.Duration(l.number(key, n, 1, mostSeconds)) * time.Second
}

func (l limitsReader) kib(key string, n int) int {
	return l.number(key, n, leastKiB, mostKiB) << 10
}
