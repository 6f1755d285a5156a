package tunnel

import "time"

// EventKind says what an [Event] is about.
type EventKind string

// The kinds of events. A conn has one event, at its end.
const (
	EventJoin        EventKind = "join"         // a node has joined, or was refused
	EventLeave       EventKind = "leave"        // the session of a node has ended
	EventIssue       EventKind = "issue"        // a node has got its first certificate
	EventRenew       EventKind = "renew"        // a node has got another certificate
	EventToken       EventKind = "token"        // the token file has a new token of a node
	EventTokenGone   EventKind = "token-gone"   // a token of a node is gone from the token file
	EventRevoke      EventKind = "revoke"       // the token file revokes a node
	EventRevokeGone  EventKind = "revoke-gone"  // a line that revokes a node is gone from the token file
	EventTokenCreate EventKind = "token-create" // an operator has run tunnel token create
	EventTokenRevoke EventKind = "token-revoke" // an operator has run tunnel token revoke
	EventReload      EventKind = "reload"       // the cloud has read its configuration again, or forwards have changed
	EventExec        EventKind = "exec"         // a terminated request to run a command in a pod
	EventAttach      EventKind = "attach"       // a terminated request to attach to a container
	EventPortForward EventKind = "port-forward" // a terminated request to reach a port of a pod
	EventRequest     EventKind = "request"      // any other terminated request; only the tap shows this kind
	EventHTTPS       EventKind = "https"        // a connection that was passed through; its content is not known
	EventTCP         EventKind = "tcp"          // a conn of a TCP port
	EventUDP         EventKind = "udp"          // a flow of a UDP port
	EventEgress      EventKind = "egress"       // a conn of the egress front door
	EventServices    EventKind = "services"     // a conn to an endpoint of a Service, for which an edge has asked
)

// ResultOK is the result of an event or a dial that succeeded. Any other result is the name of a [Code].
const ResultOK = "ok"

// Event is one line of the audit: who did what to which node, and what became of it. It never holds a
// secret, nor a byte of a conn. An empty field is left out of the line.
type Event struct {
	Time   time.Time `json:"time"`
	Kind   EventKind `json:"event"`
	Result string    `json:"result"`           // [ResultOK], or the name of a Code
	Node   NodeName  `json:"node,omitempty"`   // the node that joined, or that was reached
	Nodes  string    `json:"nodes,omitempty"`  // if a token is for several nodes: the pattern of their names
	Caller string    `json:"caller,omitempty"` // common name of the caller's certificate; its address; "unix"; "node NAME"
	Remote string    `json:"remote,omitempty"` // address of the peer
	Door   string    `json:"frontend,omitempty"`
	Target string    `json:"target,omitempty"` // host:port that the edge dials
	Method string    `json:"method,omitempty"`
	// Path is the path of a request, without its query, which may hold secrets. For an endpoint of a Service, it is
	// the endpoint's path. For a caller of egress, it is the host:port of the Service that the caller asked for.
	Path   string `json:"path,omitempty"`
	Status int    `json:"status,omitempty"`
	// Sent went to the target and Received came from it, both in bytes of payload.
	Sent     int64   `json:"sent_bytes,omitempty"`
	Received int64   `json:"received_bytes,omitempty"`
	Seconds  float64 `json:"duration_seconds,omitempty"` // how long the conn or the session lasted
	Session  string  `json:"session,omitempty"`
	By       string  `json:"by,omitempty"` // the credential of a node, or the user of a command
	Token    string  `json:"token,omitempty"`
	Changes  string  `json:"changes,omitempty"` // the changes of a reload, as tunnel reload prints them
	Err      string  `json:"err,omitempty"`
	// Skipped is how many events of this kind were left out since the last one. Only events that strangers can cause
	// are limited, and may have Skipped.
	Skipped int `json:"skipped,omitempty"`
}

// Trail takes the events of the audit. A nil Trail means that the audit is off: code checks for nil before it
// prepares an event, so that an audit that is off costs nothing. Any goroutine may call a Trail.
type Trail func(Event)

// Record hands e to the trail, if there is one.
func (t Trail) Record(e Event) {
	if t != nil {
		t(e)
	}
}

// ResultOf returns the result for the error of a dial; nil is [ResultOK].
func ResultOf(err error) string {
	if err == nil {
		return ResultOK
	}
	return CodeOf(err).String()
}

// TextOf returns the text of err for an event; "" for nil.
func TextOf(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
