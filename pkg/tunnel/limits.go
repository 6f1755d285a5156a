package tunnel

import "fmt"

// Limit identifies one bound on the resources that a stranger, a caller, or the other side
// of a session may use. docs/limits.md lists the limits.
type Limit uint8

// The limits, roughly in the order in which a peer reaches them.
const (
	LimitJoining             Limit = iota // connections at the gRPC port or the agent port without a session
	LimitJoiningPerAddress                // the connections that LimitJoining counts, of one source
	LimitJoinTimeout                      // how long a connection at the gRPC port or the agent port may have no session
	LimitJoins                            // joins of a node in a second
	LimitMetadata                         // bytes of metadata of a gRPC stream
	LimitMessage                          // bytes of a gRPC message
	LimitMessages                         // control messages that an edge sends in a second
	LimitStreams                          // gRPC streams that one connection opens
	LimitFrames                           // HTTP/2 frames without data that an edge sends in a second
	LimitOutbox                           // control messages that the other side does not read
	LimitConns                            // conns of a node at once
	LimitOpens                            // opens of a node in a second
	LimitDials                            // opens of a node that have not been answered
	LimitStrangers                        // connections of unidentified callers at an https port or at tls:// of egress
	LimitStrangersPerAddress              // the connections that LimitStrangers counts, of one source
	LimitHandshakeTimeout                 // how long a connection may take to identify itself
	LimitConnsPerAddress                  // connections of one source that are passed through to one node
	LimitHeaders                          // bytes of the header of an HTTP request
	LimitHealth                           // connections to the health port
	LimitDNS                              // connections to the DNS port
	LimitLookups                          // DNS queries that wait for an upstream
	LimitAgentStreams                     // streams of a node that has joined as a konnectivity agent
	LimitUnread                           // unread bytes of a conn on a konnectivity stream
	LimitFlows                            // flows of a UDP port, or of an edge, at once
	LimitFlowsPerAddress                  // flows of a UDP port at once, of one source
	LimitProxyHeader                      // connections of balancers that wait for their PROXY header, and for how long
	LimitMirror                           // connections of callers of twins, see pkg/services/mirror
	LimitMirrorPerAddress                 // the connections that LimitMirror counts, of one address
	numLimits                             // the number of limits
)

//nolint:gochecknoglobals // a constant table
var limitNames = [numLimits]string{
	LimitJoining:             "joining",
	LimitJoiningPerAddress:   "joiningperaddress",
	LimitJoinTimeout:         "jointimeout",
	LimitJoins:               "joins",
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
	LimitFlows:               "flows",
	LimitFlowsPerAddress:     "flowsperaddress",
	LimitProxyHeader:         "proxyheader",
	LimitMirror:              "mirror",
	LimitMirrorPerAddress:    "mirrorperaddress",
}

// Limits lists every limit.
func Limits() []Limit {
	all := make([]Limit, numLimits)
	for i := range all {
		all[i] = Limit(i) //nolint:gosec // two dozen
	}
	return all
}

// String returns the name of the limit: the value of a metric's label, and the key in the
// configuration if the limit has one.
func (l Limit) String() string {
	if l < numLimits {
		return limitNames[l]
	}
	return fmt.Sprintf("limit-%d", uint8(l))
}

// Limited counts that a limit was reached.
func (c *Counters) Limited(l Limit) {
	if l < numLimits {
		c.limited[l].Add(1)
	}
}

// LimitedBy returns how often a limit was reached.
func (c *Counters) LimitedBy(l Limit) uint64 {
	if l >= numLimits {
		return 0
	}
	return c.limited[l].Load()
}
