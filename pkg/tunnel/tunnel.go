// Package tunnel defines the types that all other packages share:
//
//   - [Message]: one message on a node's control stream
//   - [Module]: one part of the process; a [Routed] module owns one category of messages
//   - [Incoming]: a received message, with its session and the way to answer it
//   - [Router]: finds the handler of a message
//   - [Session]: one live control stream
//   - [Directory]: the live sessions, by node
//   - [Dialer]: front doors use it to get a connection to a target behind a node
//
// How one forwarded connection uses them:
//
//	front door ── Dialer.Dial(Request{Node: "edge1", Category: "tcp", Addr: "127.0.0.1:22"})
//	                └─ Directory: edge1 → Session ── Session.Dial ──▶ (transport)
//	edge router ◀── Incoming{Category: "tcp", Type: "open"} ◀───────── (transport)
//	  └─ the edge's tcp module: Incoming.Serve(dial) ── dials, or refuses with a Code
//
// The package knows no module and no transport: gRPC is in pkg/stream. Another transport can be added
// by implementing [Link], [Dialer] and [Way]. The package keeps no package-level state. It neither
// listens nor dials.
package tunnel

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"

	"golang.org/x/sync/errgroup"
)

// NodeName is the Kubernetes name of an edge node: an RFC 1123 subdomain. Values
// come from [ParseNodeName], so code may write a NodeName into a hosts file, a log
// line or a metric without another check.
type NodeName string

// maxNodeName is the longest DNS name, in bytes (RFC 1035 section 2.3.4).
const maxNodeName = 253

// ParseNodeName returns s as a node name. It follows Kubernetes'
// validation.IsDNS1123Subdomain (apimachinery/pkg/util/validation): lower-case
// letters, digits, '-' and '.', each label starting and ending with a letter or
// digit, 253 bytes at most.
func ParseNodeName(s string) (NodeName, error) {
	if s == "" {
		return "", errors.New("node name is empty")
	}
	if len(s) > maxNodeName {
		return "", fmt.Errorf("node name is %d bytes long; %d are allowed", len(s), maxNodeName)
	}
	for label := range strings.SplitSeq(s, ".") {
		if !isLabel(label) {
			return "", fmt.Errorf("node name %q is not an RFC 1123 subdomain: use lower-case letters, digits, '-' and '.'", s)
		}
	}
	return NodeName(s), nil
}

// isLabel reports whether s can be one label of a node name.
func isLabel(s string) bool {
	if s == "" || s[0] == '-' || s[len(s)-1] == '-' {
		return false
	}
	for i := range len(s) {
		switch c := s[i]; {
		case 'a' <= c && c <= 'z', '0' <= c && c <= '9', c == '-':
		default:
			return false
		}
	}
	return true
}

// Message is one message on a control stream. It never carries forwarded bytes.
type Message struct {
	Category string // the name of the module that handles it
	Type     string // says what the message asks for; selects the handler in the module
	Topic    string // a UUID, the same in an open, its answer and its conn
	Data     []byte // a protobuf message; its schema depends on Type
	Addr     string // the target of an open, host:port
}

// Types of message that more than one module knows.
const (
	// TypeOpen asks the receiver to dial Message.Addr. The cloud sends it to edges, and a replica
	// to another replica that has joined it. An edge never sends it.
	TypeOpen = "open"
)

// Module is one part of the process, such as a front door or the DNS responder. A module that handles
// messages of sessions also implements [Routed].
type Module interface {
	// Name is the module's name. If the module is Routed, Name is the category that it owns.
	Name() string
	// Run listens and serves until ctx is done, then drains and returns nil. If the
	// module cannot do its work, Run returns an error, and the process stops.
	Run(ctx context.Context) error
}

// Request describes one dial that a front door asks for.
type Request struct {
	Node     NodeName // empty: any connected node, chosen at random
	Among    Selector // if Node is empty: the nodes to choose from
	Category string   // the edge module that dials
	Network  string   // "tcp"; "tls": the edge's https module speaks TLS to the target; or NetworkUDP
	Addr     string   // host:port; the edge resolves the name
	Caller   string   // the caller's address or name, for policy and for logs
	Relayed  bool     // another replica has relayed this request; it must not be relayed again
	NoWait   bool     // refuse instead of waiting for a limit (see Queue): the caller can try another node
	// ByPods says that any pod can cause the conn, and leave it idle. Like conns of Services, such conns get at most half
	// of a node's conns.
	ByPods bool
	// Chosen, if not nil, gets the name of the node that was asked last.
	Chosen *NodeName
	Trace  *TraceContext // context of the span that the dial belongs to; nil: not traced
}

// Chose stores the node of r in r.Chosen. Sessions call it.
func (r *Request) Chose() {
	if r.Chosen != nil {
		*r.Chosen = r.Node
	}
}

// MaxAddr is the longest Request.Addr that a Queue takes, in bytes. A DNS name and a port need 259; the target of an
// edge that calls a Service needs more.
const MaxAddr = 1024

// NetworkUDP is the network of a request for a conn that carries datagrams, as frames of pkg/udp.
const NetworkUDP = "udp"

// Dialer opens conns. Every front door needs one.
type Dialer interface {
	// Dial opens a conn to r.Addr through r.Node. The conn behaves like TCP: it
	// has CloseWrite, CloseRead and Reset beside net.Conn's methods (see [Splice]).
	// If the other side or the tunnel refuses, the error is a *[Refusal].
	// The caller owns the conn. ctx bounds the dialling only.
	Dial(ctx context.Context, r Request) (net.Conn, error)
}

// Nodes lists the nodes that can be reached now.
type Nodes interface {
	// Holds reports whether the node has a live session.
	Holds(NodeName) bool
	// Connected returns the names of all nodes that have a live session, sorted.
	Connected() []NodeName
}

// Run runs all modules until ctx is done or one module returns. It then stops the
// other modules and returns after all of them have returned.
func Run(ctx context.Context, mods ...Module) error {
	g, gctx := errgroup.WithContext(ctx)
	for _, m := range mods {
		g.Go(func() error {
			err := m.Run(gctx)
			if err != nil {
				return fmt.Errorf("%s: %w", m.Name(), err)
			}
			if gctx.Err() == nil {
				return fmt.Errorf("%s: module stopped unexpectedly", m.Name())
			}
			return nil
		})
	}
	return g.Wait()
}
