package stream

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/google/uuid"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// role is what a peer of the server is: a node, or another replica of the cloud. roleOf chooses the
// role once, before the proof is checked. The methods hold all code that differs between the roles.
type role interface {
	// prove checks the proof that the peer shows when it joins.
	prove(ctx context.Context, t *transport) (*proof, *refusedJoin)
	// again returns an error if the peer and this replica have a session already.
	again(hello *pb.Hello) error
	// equip sets the log, the router, the counters and the limits of a new session.
	equip(cs *cloudSession)
	// attach makes a session known to the code that dials through it, and logs the session.
	attach(cs *cloudSession, hello *pb.Hello)
	// leave tells the peer of a live session that this replica is about to stop.
	leave(cs *cloudSession)
	// detach undoes attach. A second call has no effect.
	detach(cs *cloudSession)
	// address completes the open for r. The open to a replica names the node and the module, for
	// which the session alone is not enough.
	address(m *tunnel.Message, open *pb.Open, r tunnel.Request)
	// denied logs that the peer has denied the dial of r.
	denied(cs *cloudSession, r tunnel.Request, refusal *tunnel.Refusal)
}

// roleOf returns what a joining peer claims to be. A peer that sends the id of a replica claims to
// be a replica.
func (s *Server) roleOf(ctx context.Context) role {
	if v := metadata.ValueFromIncomingContext(ctx, replicaKey); len(v) == 1 && v[0] != "" {
		return asReplica{s, v[0]}
	}
	return asNode{s}
}

// asNode is the role of an edge.
type asNode struct{ server *Server }

func (r asNode) prove(ctx context.Context, t *transport) (*proof, *refusedJoin) {
	return r.server.authenticateNode(ctx, t)
}

func (r asNode) again(hello *pb.Hello) error { return r.server.hasSession(hello) }

func (r asNode) equip(cs *cloudSession) {
	cs.log = r.server.log.With("node", cs.pub.Node, "session", cs.pub.ID)
	cs.router, cs.counters, cs.maxConns = r.server.router, r.server.cfg.Counters, int64(r.server.cfg.Limits.Conns)
	cs.quota = r.server.quotas.take(cs.pub.Node)
	cs.budget = cs.quota.messages
}

func (r asNode) attach(cs *cloudSession, hello *pb.Hello) {
	r.server.cfg.Counters.Sessions.Add(1)
	cs.log.Info("session started",
		"remote", cs.pub.Remote, "by", text(cs.proof.Load().grant.By), "software", text(hello.GetSoftware()))
	r.server.cfg.Audit.Record(tunnel.Event{
		Kind: tunnel.EventJoin, Result: tunnel.ResultOK, Node: cs.pub.Node, Remote: cs.pub.Remote, Session: cs.pub.ID,
		By: text(cs.proof.Load().grant.By),
	})
	if old := r.server.dir.Attach(cs.pub); old != nil {
		if older, ok := old.Link.(*cloudSession); ok && cs.succeeds(older, hello) {
			cs.follow(older)
		} else {
			r.server.cfg.Counters.Replaced.Add(1)
			cs.log.Warn("this session replaces an older one of the same node", "replaced", old.ID, "remote", old.Remote)
			old.Close(errReplaced)
		}
	}
	r.server.welcome(cs)
	// If Leave or Move has run, it has not told this session to move, because the session was not live yet.
	if tunnel.IsClosed(r.server.leaving) || r.server.moving.Load() {
		r.leave(cs)
	}
}

func (asNode) leave(cs *cloudSession) { cs.tellDrain(true, tunnel.GracePeriod) }

func (r asNode) detach(cs *cloudSession) {
	if r.server.dir.Detach(cs.pub) {
		r.server.fallBack(cs)
	}
}

func (asNode) address(*tunnel.Message, *pb.Open, tunnel.Request) {} // a session with a node has just one node

func (r asNode) denied(cs *cloudSession, req tunnel.Request, refusal *tunnel.Refusal) {
	if skipped, ok := r.server.denials.Allow(); ok {
		cs.log.Warn("the edge has denied a dial",
			"target", req.Addr, "caller", text(req.Caller), "err", refusal, "skipped", skipped)
	}
}

// asReplica is the role of another replica of this cloud. The server's configuration may name no
// other replicas: then prove refuses the peer.
type asReplica struct {
	server *Server
	id     string // the id of the other replica, as it claims
}

// prove checks the certificate of the connection.
func (r asReplica) prove(_ context.Context, t *transport) (*proof, *refusedJoin) {
	others := r.server.cfg.Replicas
	if others == nil {
		err := errors.New("it says that it is a replica, and there is no [mode.cloud.stream.peers] here")
		return nil, &refusedJoin{told: uniform(), err: err}
	}
	if err := others.Authenticate(t.State); err != nil {
		return nil, &refusedJoin{told: uniform(), err: fmt.Errorf("it says that it is a replica: %w", err)}
	}
	// uuid.Parse also accepts forms that String does not return. In one form, any two bytes may stand in
	// place of the braces.
	if u, err := uuid.Parse(r.id); err != nil || u.String() != r.id {
		return nil, &refusedJoin{told: status.Error(codes.InvalidArgument, "the id of a replica must be a UUID")}
	}
	return &proof{release: func() {}}, nil
}

func (r asReplica) again(hello *pb.Hello) error {
	if r.id == r.server.cfg.Replicas.ID() {
		return withReason(codes.AlreadyExists, reasonSelf, ErrSelf.Error())
	}
	return r.server.hasSession(hello)
}

// equip sets no quota: the replica that holds the node counts the opens.
func (r asReplica) equip(cs *cloudSession) {
	cs.log = r.server.log.With("replica", r.id, "session", cs.pub.ID)
	cs.router, cs.counters = r.server.replicaRouter, r.server.cfg.Replicas.Counters()
	cs.maxConns = int64(r.server.cfg.Limits.relayed())
	cs.share = &share{max: r.server.cfg.Limits.relayed()}
}

func (r asReplica) attach(cs *cloudSession, hello *pb.Hello) {
	cs.log.Info("another replica has joined", "remote", cs.pub.Remote, "software", text(hello.GetSoftware()))
	old := r.server.cfg.Replicas.Attach(r.id, hello.GetReplica().GetAddrs(), cs.pub)
	r.server.announce()
	if old != nil {
		old.Close(status.Error(codes.Aborted, "replaced by a newer session of this replica"))
	}
}

func (asReplica) leave(*cloudSession) {} // Replicas.Leave tells the other replicas

func (r asReplica) detach(cs *cloudSession) {
	if r.server.cfg.Replicas.Detach(cs.pub) {
		r.server.announce()
	}
}

// address makes the open a relayed open: it names the node, and the module of the node's edge.
func (asReplica) address(m *tunnel.Message, open *pb.Open, r tunnel.Request) {
	m.Category, open.Node, open.Category = categoryRelay, string(r.Node), r.Category
}

func (asReplica) denied(*cloudSession, tunnel.Request, *tunnel.Refusal) {} // the replica that holds the node logs it

// hasSession returns an error if the peer says that its process has a session with this replica.
func (s *Server) hasSession(hello *pb.Hello) error {
	if s.cfg.Replicas != nil && slices.Contains(hello.GetHave(), s.cfg.Replicas.ID()) {
		return status.Error(codes.AlreadyExists, "this replica has a session of this process already")
	}
	return nil
}
