package stream

import (
	"context"
	"crypto/tls"
	"fmt"

	"google.golang.org/protobuf/proto"

	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// Replicas knows which other replicas of the cloud exist, and which nodes they hold. The server asks it;
// pkg/peers implements it. The server itself has only the sessions that other replicas open with this
// replica.
type Replicas interface {
	// ID is the id of this replica, a UUID.
	ID() string
	// Authenticate returns nil if the peer of a TLS connection is another replica.
	Authenticate(tls.ConnectionState) error
	// Counters counts the conns that the other replicas serve for this one.
	Counters() *tunnel.Counters
	// Attach makes s the session of the replica with this id. It returns the session that s
	// replaced, or nil; the server closes it. addrs are the addresses at which clients reach the
	// replica, unchecked.
	Attach(id string, addrs []string, s *tunnel.Session) (replaced *tunnel.Session)
	// Detach removes s and reports whether s was attached.
	Detach(s *tunnel.Session) bool
	// Joined returns the ids of the replicas whose sessions are attached.
	Joined() []string
	// Staying returns the ids of those replicas of Joined that are not about to stop. Only these replicas take edges.
	Staying() []string
	// Learn takes a message about nodes that has come by s, the session of another replica. An
	// error ends s. If a node has joined at the other replica, and later than at this one, Learn
	// ends the node's session with this replica ([ErrJoinedElsewhere]). Learn reports whether the message
	// changes what Staying returns.
	Learn(s *tunnel.Session, news *pb.Nodes) (changed bool, err error)
	// Leave tells the other replicas that this replica is about to stop.
	Leave()
	// NodesMoved waits until other replicas hold every node of this replica, or ctx is done. It
	// returns how many nodes this replica alone holds.
	NodesMoved(ctx context.Context) int
}

// NodesMessage makes the message by which a replica tells another one about its nodes.
func NodesMessage(news *pb.Nodes) *tunnel.Message { return message(typeNodes, "", news) }

// replicaRoutes are the messages that another replica may send after it has joined this replica. They are
// the messages of an edge except new credentials, and the list of the nodes that the other replica holds.
type replicaRoutes struct{ server *Server }

// Name implements tunnel.Module.
func (replicaRoutes) Name() string { return category }

// Run implements tunnel.Module.
func (replicaRoutes) Run(context.Context) error { return nil }

// Routes implements tunnel.Routed.
func (s replicaRoutes) Routes() map[string]tunnel.Handler {
	return map[string]tunnel.Handler{
		typeHeartbeat: handler((*cloudSession).heartbeat),
		typeRefused:   handler((*cloudSession).refused),
		typeCancel:    handler((*cloudSession).cancelConn),
		typeDrain:     handler((*cloudSession).edgeLeaves),
		typeEnds:      handler((*cloudSession).connEnds),
		typeNodes:     handler(s.server.learn),
	}
}

// learn handles another replica's message about its nodes.
func (s *Server) learn(from *cloudSession, m *tunnel.Message) error {
	var news pb.Nodes
	if err := proto.Unmarshal(m.Data, &news); err != nil {
		return fmt.Errorf("nodes: %w", err)
	}
	changed, err := s.cfg.Replicas.Learn(from.pub, &news)
	if changed {
		s.announce()
	}
	return err
}

// replicas returns a message that tells an edge which replicas take edges. An edge with ClientConfig.All dials until
// it has a session with each of them.
func (s *Server) replicas() *tunnel.Message {
	all := s.cfg.Replicas.Staying()
	if !tunnel.IsClosed(s.leaving) {
		all = append([]string{s.cfg.Replicas.ID()}, all...)
	}
	return message(typeReplicas, "", &pb.Replicas{Instances: all[:min(len(all), maxReplicas)]})
}

// welcome tells a newly attached edge which replicas take edges, unless this replica is configured
// without others.
func (s *Server) welcome(cs *cloudSession) {
	if s.cfg.Replicas == nil {
		return
	}
	s.telling.Lock()
	defer s.telling.Unlock()
	cs.post(s.replicas())
}

// announce tells all edges of this replica which replicas take edges.
func (s *Server) announce() {
	s.telling.Lock()
	defer s.telling.Unlock()
	m := s.replicas()
	for _, pub := range s.dir.Sessions() {
		pub.Send(m) //nolint:errcheck // it fails only when the session has ended
	}
}
