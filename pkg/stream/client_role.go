package stream

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/pkg/auth"
	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// ReplicaConfig makes a [Client] join another replica as a replica of the same cloud. The TLS
// certificate of the Client proves that it is a replica. Over the session, the other replica asks for
// conns to the nodes that the joining replica holds.
type ReplicaConfig struct {
	ID    string   // id of the joining replica, a UUID
	Addrs []string // addresses at which clients reach the joining replica
	// Have returns the ids of the other replicas with which the joining replica already has a
	// session at another address. This client opens no second session with them.
	Have func() []string
	// Serve dials for an open of the other replica. The request names a node that the joining
	// replica holds, or held a moment ago.
	Serve tunnel.DialFunc
	// Ends is when the joining replica, which is about to stop, resets the conns that it relays.
	Ends *tunnel.GraceEnd
	// Started is called for each new session. s.Instance is the id of the replica at the other end.
	// A goroutine of the session then calls run, which must return when s is done. An error refuses
	// the session.
	Started func(s *tunnel.Session) (run func(), err error)
	Hint    func(error) error // adds to an error what a person can do about it
}

var (
	// ErrSelf is the error of a session of a replica with itself.
	ErrSelf = errors.New("this address is our own")
	// ErrTwice is the error of a second session with the same replica.
	ErrTwice = errors.New("this replica has already been joined at another of its addresses")
)

// joiner is what a client joins as: a node, or a replica of the cloud. joinerOf chooses once. The
// methods hold all code that differs between the two.
type joiner interface {
	fmt.Stringer                   // the text that follows "joining as " in errors
	logs() (key string, value any) // distinguishes this client in the log
	limits() EdgeLimits            // for all sessions of the client together
	// modules serve messages in addition to those of NewClient.
	modules() []tunnel.Module
	// credential returns the credentials for the join, and the SHA-256 of the token if a token
	// proves the peer. h holds the certificate.
	credential(h *handshake) (credentials.PerRPCCredentials, [sha256.Size]byte, error)
	// hello adds to the client's hello what only this kind of joiner sends.
	hello(*pb.Hello)
	// started is called for each new session. An error refuses the session.
	started(*edgeSession) error
	// addressed completes the request r of a received open. For a relayed open it sets the node and
	// the module that the open names.
	addressed(r *tunnel.Request, open *pb.Open) error
	// span returns the name of the span of an open that this end serves.
	span() tunnel.SpanName
	// ends is the time at which this process resets the conns that it relays; Splice tells it to the callers' side. An
	// edge returns nil: its message Drain tells the time for all conns at once.
	ends() *tunnel.GraceEnd
	// denied logs that a dial that the cloud asked for is denied.
	denied(s *edgeSession, topic string, r tunnel.Request, err error)
	// explain adds to an error what a person can do about it. h may be nil.
	explain(err error, h *handshake) error
}

// joinerOf returns what a client with this configuration joins as.
func joinerOf(c *Client) joiner {
	if c.cfg.Replica != nil {
		return replicaJoiner{c, c.cfg.Replica}
	}
	return nodeJoiner{c}
}

// nodeJoiner joins as a node, proven by a token or by the certificate of the connection.
type nodeJoiner struct{ client *Client }

func (j nodeJoiner) String() string { return fmt.Sprintf("node %s", j.client.cfg.Node) }

func (j nodeJoiner) logs() (key string, value any) { return "node", j.client.cfg.Node }

func (j nodeJoiner) limits() EdgeLimits { return j.client.cfg.Limits.orDefault() }

func (nodeJoiner) modules() []tunnel.Module { return nil }

func (j nodeJoiner) credential(h *handshake) (credentials.PerRPCCredentials, [sha256.Size]byte, error) {
	none := [sha256.Size]byte{}
	if j.client.cfg.Token == nil {
		if h.leaf == nil {
			return nil, none, errNoCertificate
		}
		return nodeClaim(j.client.cfg.Node), none, nil
	}
	token, err := auth.TokenOf(j.client.cfg.Token)
	if err != nil {
		return nil, none, err
	}
	return accessToken(auth.EncodeToken(string(j.client.cfg.Node), token)), sha256.Sum256([]byte(token)), nil
}

func (j nodeJoiner) hello(m *pb.Hello) { m.Have = j.client.have() }

func (nodeJoiner) started(*edgeSession) error { return nil }

func (nodeJoiner) addressed(*tunnel.Request, *pb.Open) error { return nil } // every open is for the client's own node

func (nodeJoiner) span() tunnel.SpanName { return tunnel.SpanDial }

func (nodeJoiner) ends() *tunnel.GraceEnd { return nil }

func (j nodeJoiner) denied(s *edgeSession, topic string, r tunnel.Request, err error) {
	if skipped, ok := j.client.denials.Allow(); ok {
		s.log.Warn("a dial that the cloud asked for is denied",
			"topic", topic, "target", r.Addr, "caller", r.Caller, "err", err, "skipped", skipped)
	}
}

func (j nodeJoiner) explain(err error, h *handshake) error {
	if j.client.cfg.Token == nil && h != nil && status.Code(err) == codes.Unauthenticated {
		return &Hinted{err, h.hint(err)}
	}
	return explain(err)
}

// maxConnsHere is how many conns one other replica may have through this replica at once.
const maxConnsHere = 16 * DefaultMaxConns

// replicaJoiner joins another replica as a replica.
type replicaJoiner struct {
	client *Client
	as     *ReplicaConfig
}

func (replicaJoiner) String() string { return "a replica" }

func (j replicaJoiner) logs() (key string, value any) { return "address", j.client.cfg.Address }

// limits are wide, because the node's own session at this replica applies the node's limits.
func (replicaJoiner) limits() EdgeLimits { return EdgeLimits{Conns: maxConnsHere} }

func (j replicaJoiner) modules() []tunnel.Module { return []tunnel.Module{relay{j.as.Serve}} }

// credential sends the id of the joining replica. The certificate of the connection proves the
// replica.
func (j replicaJoiner) credential(*handshake) (credentials.PerRPCCredentials, [sha256.Size]byte, error) {
	return replicaID(j.as.ID), [sha256.Size]byte{}, nil
}

func (j replicaJoiner) hello(m *pb.Hello) {
	m.Replica, m.Have = &pb.Replica{Addrs: j.as.Addrs}, j.as.Have()
}

func (j replicaJoiner) started(s *edgeSession) error {
	run, err := j.as.Started(s.pub)
	if err == nil {
		s.wg.Go(s.guarded(run))
	}
	return err
}

// addressed reads what asReplica.address has written into the open: the node, and the module of the
// node's edge that dials.
func (replicaJoiner) addressed(r *tunnel.Request, open *pb.Open) (err error) {
	r.Node, err = tunnel.ParseNodeName(open.GetNode())
	r.Category, r.Relayed = open.GetCategory(), true
	return err
}

func (replicaJoiner) span() tunnel.SpanName { return tunnel.SpanRelay }

func (j replicaJoiner) ends() *tunnel.GraceEnd { return j.as.Ends }

func (replicaJoiner) denied(*edgeSession, string, tunnel.Request, error) {} // the edge logs its denials

func (j replicaJoiner) explain(err error, _ *handshake) error {
	switch {
	case err == nil:
		return nil
	case isSecond(err) && reasonOf(err) == reasonSelf:
		return ErrSelf
	case isSecond(err), status.Code(err) == codes.Aborted: // Aborted: replaced by a session at another address
		return ErrTwice
	}
	return j.as.Hint(err)
}

// replicaID is the id of the joining replica, as the credentials of a join.
type replicaID string

// GetRequestMetadata implements credentials.PerRPCCredentials.
func (id replicaID) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{replicaKey: string(id)}, nil
}

// RequireTransportSecurity implements credentials.PerRPCCredentials.
func (replicaID) RequireTransportSecurity() bool { return true }

// relay serves the opens of a replica that this replica has joined.
type relay struct{ dial tunnel.DialFunc }

// Name implements tunnel.Module.
func (relay) Name() string { return categoryRelay }

// Run implements tunnel.Module.
func (relay) Run(context.Context) error { return nil }

// Routes implements tunnel.Routed.
func (r relay) Routes() map[string]tunnel.Handler {
	return map[string]tunnel.Handler{
		tunnel.TypeOpen: func(_ context.Context, in *tunnel.Incoming) error { return in.Serve(r.dial) },
	}
}
