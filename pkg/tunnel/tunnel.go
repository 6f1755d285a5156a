// Package tunnel holds the words that every other package speaks: a [Message]
// on a node's control stream, the [Module] that owns a category of messages, the
// [Router] that brings the two together, the [Session] a message came from, the
// [Directory] of live sessions, and the [Dialer] that front doors ask for a
// connection to something behind a node.
//
// One forwarded connection, seen from here:
//
//	front door ── Dialer.Dial(Request{Node: "edge1", Category: "tcp", Addr: "127.0.0.1:22"})
//	                └─ Directory: edge1 → Session ── Session.Dial ──▶ (transport)
//	edge router ◀── Message{Category: "tcp", Type: "open"} ◀────────── (transport)
//	  └─ the edge's tcp module: Session.Serve(m, dial) ── dials, or refuses with a Code
//
// The package knows no module and no transport: gRPC lives in pkg/stream, and
// another transport can stand beside it by implementing [Link]. It keeps no
// package-level state, and it neither listens nor dials by itself.
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
// come from [ParseNodeName], so that a NodeName can be put into a hosts file, a
// log line or a metric without being looked at again.
type NodeName string

// maxNodeName is the longest DNS name (RFC 1035 section 2.3.4).
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
	Category string // the module that handles it
	Type     string // what it asks of that module
	Topic    string // ties an open request, its answer and its conn together
	Data     []byte // a protobuf that belongs to Type
	Addr     string // the target of an open
}

// Types of message that more than one module knows.
const (
	// TypeOpen asks an edge to dial Message.Addr. Only the cloud sends it; no
	// module of the cloud has a route for it.
	TypeOpen = "open"
)

// Handler handles one message. It runs on the session's receive loop, so it must
// not dial, wait for the network, or wait to send: work that takes time goes to
// [Session.Serve] or to a goroutine that the session waits for. An error ends the
// session. The node is from.Node; a name inside the message is never believed.
type Handler func(ctx context.Context, from *Session, m *Message) error

// Module is one part of the process, owner of one category of messages.
type Module interface {
	// Name is the module's name and the category it owns.
	Name() string
	// Routes maps message types to handlers. It is read once, before traffic.
	Routes() map[string]Handler
	// Run listens and serves until ctx is done, then drains and returns nil. It
	// returns an error when the module cannot do its work; that stops the process.
	Run(ctx context.Context) error
}

// Request says what a front door wants dialled.
type Request struct {
	Node     NodeName // empty: any connected node, by chance
	Among    Selector // without Node: which nodes may be taken
	Category string   // the edge module that dials
	Network  string   // "tcp", or "tls" when the edge's https module is to speak TLS to the target
	Addr     string   // host:port, as the edge sees it
	Caller   string   // who asked, for policy and for the operator's eyes
	Relayed  bool     // it came from another replica, and goes no further
	NoWait   bool     // refuse it at once where it would wait for a limit (see Queue): the caller can ask another node
}

// Dialer is the one thing that every front door needs.
type Dialer interface {
	// Dial opens a conn to r.Addr through r.Node. The conn behaves like TCP: it
	// has CloseWrite, CloseRead and Reset beside net.Conn's methods (see [Splice]).
	// An error that the other side or the tunnel decided on is a *[Refusal].
	// The caller owns the conn, and ctx bounds the dialling only.
	Dial(ctx context.Context, r Request) (net.Conn, error)
}

// Nodes tells which nodes can be reached now.
type Nodes interface {
	// Holds reports whether a session of that node lives.
	Holds(NodeName) bool
	// Connected returns the names of all such nodes, sorted.
	Connected() []NodeName
}

// Run runs every module until ctx is done or one of them returns, then waits for
// all of them. A module that returns before ctx is done stops its siblings.
func Run(ctx context.Context, mods ...Module) error {
	g, gctx := errgroup.WithContext(ctx)
	for _, m := range mods {
		g.Go(func() error {
			err := m.Run(gctx)
			if err != nil {
				return fmt.Errorf("%s: %w", m.Name(), err)
			}
			if gctx.Err() == nil {
				return fmt.Errorf("%s: module ended by itself", m.Name())
			}
			return nil
		})
	}
	return g.Wait()
}
