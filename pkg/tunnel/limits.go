package tunnel

import "fmt"

// Limit names a bound on what somebody else may cost this process: a stranger, a caller,
// or the other side of a session. docs/limits.md lists them.
type Limit uint8

// The limits, in the order in which somebody meets them.
const (
	LimitJoining             Limit = iota // connections at the gRPC port without a session
	LimitJoiningPerAddress                // those of one source
	LimitJoinTimeout                      // how long one may go without
	LimitMetadata                         // bytes of metadata of a gRPC stream
	LimitMessage                          // bytes of a gRPC message
	LimitMessages                         // control messages that an edge sends in a second
	LimitStreams                          // gRPC streams that one connection opens in a second
	LimitFrames                           // HTTP/2 frames without data that an edge sends in a second
	LimitOutbox                           // control messages that the other side does not read
	LimitConns                            // conns of a node at once
	LimitOpens                            // opens of a node in a second
	LimitDials                            // opens of a node that have not been answered
	LimitStrangers                        // connections at an https port that have not said who they are
	LimitStrangersPerAddress              // those of one source
	LimitHandshakeTimeout                 // how long one may take to say it
	LimitConnsPerAddress                  // connections of one source that are passed through to one node
	LimitHeaders                          // bytes of the header of an HTTP request
	LimitHealth                           // connections of one source to the health port
	LimitDNS                              // connections to the DNS port
	LimitLookups                          // DNS queries that wait for an upstream
	LimitAgentStreams                     // streams of a node that has joined as a konnectivity agent
	LimitUnread                           // bytes of a conn of a konnectivity stream that nobody reads
	limits                                // how many there are
)

//nolint:gochecknoglobals // a constant table
var limitNames = [limits]string{
	LimitJoining:             "joining",
	LimitJoiningPerAddress:   "joiningperaddress",
	LimitJoinTimeout:         "jointimeout",
	LimitMetadata:            "metadata",
	LimitMessage:             "message",
	LimitMessages:            "messages",
	LimitStreams:             "streams",
	LimitFrames:              "frames",
	LimitOutbox:              "outbox",
	LimitConns:               "conns",
	LimitOpens:               "opens",
	LimitDials:               "dials",
	LimitStrangers:           "strangers",
	LimitStrangersPerAddress: "strangersperaddress",
	LimitHandshakeTimeout:    "handshaketimeout",
	LimitConnsPerAddress:     "connsperaddress",
	LimitHeaders:             "headers",
	LimitHealth:              "health",
	LimitDNS:                 "dns",
	LimitLookups:             "lookups",
	LimitAgentStreams:        "agentstreams",
	LimitUnread:              "unread",
}

// Limits lists every limit.
func Limits() []Limit {
	all := make([]Limit, limits)
	for i := range all {
		all[i] = Limit(i) //nolint:gosec // two dozen
	}
	return all
}

// String returns the limit as metrics show it, and the configuration where it has a key.
func (l Limit) String() string {
	if l < limits {
		return limitNames[l]
	}
	return fmt.Sprintf("limit-%d", uint8(l))
}

// Limited counts that a limit was reached.
func (c *Counters) Limited(l Limit) {
	if l < limits {
		c.limited[l].Add(1)
	}
}

// LimitedBy returns how often a limit was reached.
func (c *Counters) LimitedBy(l Limit) uint64 {
	if l >= limits {
		return 0
	}
	return c.limited[l].Load()
}
