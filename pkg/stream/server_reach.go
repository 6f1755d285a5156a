package stream

import (
	"context"
	"errors"
	"net"

	"github.com/google/uuid"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/pkg/conn"
	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// ReachFunc connects to a target that the edge of a session asks for, see [ServerConfig].
type ReachFunc func(ctx context.Context, request *ReachRequest) (net.Conn, error)

// ReachRequest is the request of an edge for one conn.
type ReachRequest struct {
	From   *tunnel.Session
	Target string
	Trace  *tunnel.TraceContext // of the conn's span; nil: the conn is not traced

	// A ReachFunc sets these for ServerConfig.ReachSink, as soon as it knows them.
	Node tunnel.NodeName // the node that dials the target; empty: the cloud
	Addr string          // host:port that the node or the cloud dials
}

// event describes the conn. The event's path is the target that the edge asks for.
func (r *ReachRequest) event() tunnel.Event {
	return tunnel.Event{
		Kind: tunnel.EventServices, Node: r.Node, Caller: "node " + string(r.From.Node), Remote: r.From.Remote,
		Target: r.Addr, Path: r.Target,
	}
}

// Reach implements the call by which an edge asks for one conn. The conn is the stream of the call, or comes by a data
// connection. If it is the stream, Reach returns when the conn has ended.
func (s *Server) Reach(stream pb.Stream_ReachServer) error {
	cs, err := s.sessionOf(stream.Context())
	switch {
	case err != nil:
		return err
	case s.cfg.Reach == nil || !cs.isNode():
		return status.Error(codes.Unimplemented, "this cloud connects edges to nothing: it has no [mode.cloud.services]")
	case s.draining.Load():
		return refusalStatus(tunnel.Refusef(tunnel.Draining, "the cloud is about to stop"))
	}
	return cs.reach(stream, &s.cfg, s.splices)
}

// isNode reports whether the peer is a node, and not another replica.
func (s *cloudSession) isNode() bool { return s.pub.Node != "" }

// reach is the body of a Reach call. The conn ends when splices is done.
func (s *cloudSession) reach(stream pb.Stream_ReachServer, cfg *ServerConfig, splices context.Context) error {
	topic, target, err := reachOf(stream.Context())
	if err != nil {
		return err
	}
	visit := cfg.ReachSink.Arrived(&s.counters.Doors[tunnel.DoorServices])
	request := &ReachRequest{From: s.pub, Target: target, Trace: visit.Trace()}
	to, refusal := s.dialReach(stream.Context(), topic, request, cfg.Reach)
	if refusal != nil {
		s.tellRefused(&visit, request, refusal)
		s.log.Debug("target refused", "topic", topic, "target", target, "err", refusal)
		s.counters.Refuse(refusal.Code)
		return refusalStatus(refusal)
	}
	s.counters.ConnsOpened.Add(1)
	relay := func(c *conn.Conn, gone <-chan struct{}) {
		received, sent, err := tunnel.Splice(splices, c, to)
		<-gone
		s.log.Debug("conn ended", "topic", topic, "target", target, "bytes", received+sent, "err", err)
		visit.Ended(received, sent, err, request.event) // for the audit, sent bytes go to the target
	}
	if c := s.handOver(stream.Context(), topic); c != nil {
		visit.Opened(request.event)
		s.wg.Go(s.guarded(func() { relay(c, c.Done()) }))
		s.remove(topic)                                     // c has a topic, and makes room for another conn when it ends
		stream.SendHeader(metadata.Pairs(dataKey, dataYes)) //nolint:errcheck // the edge has the conn already
		return nil
	}
	visit.Opened(request.event)
	gone := make(chan struct{})
	c := s.newConn(stream, topic, false, func() { close(gone) })
	s.replace(topic, c)
	stream.SendHeader(nil) //nolint:errcheck // the conn gets the error
	// The handler must not wait for the splice: when the conn is aborted, only the end of the stream frees a sender.
	go func() {
		defer s.quota.over(true)
		defer s.remove(topic)
		s.guarded(func() { relay(c, gone) })()
	}()
	return waitForEnd(stream.Context(), c)
}

// tellRefused tells ReachSink that a conn is refused. An edge can cause any number of refusals with the code Denied, so
// only some of these become events. The counters count all of them.
func (s *cloudSession) tellRefused(visit *tunnel.Visit, request *ReachRequest, refusal *tunnel.Refusal) {
	skipped := 0
	if refusal.Code == tunnel.Denied {
		var ok bool
		skipped, ok = s.denials.Allow()
		visit.Quiet, visit.Told = !ok, !ok
	}
	visit.Refused(refusal, func() tunnel.Event {
		e := request.event()
		e.Skipped = skipped
		return e
	})
}

// dialReach dials the target of a Reach, when the quota of the node has room. If it returns a conn, the caller must
// remove the topic and call quota.over when the conn has ended.
func (s *cloudSession) dialReach(
	ctx context.Context, topic string, request *ReachRequest, dial ReachFunc,
) (to net.Conn, refusal *tunnel.Refusal) {
	defer s.quota.unanswered.Add(-1)
	if s.quota.unanswered.Add(1) > maxUnanswered {
		return nil, tunnel.Refusef(tunnel.Overloaded, "%s asks for more than %d conns at once", s.pub.Node, maxUnanswered)
	}
	given, target := ctx, request.Target
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	caller := "node " + string(s.pub.Node) // a source of its own in the queue: no caller of a front door has this name
	r := tunnel.Request{Node: s.pub.Node, Category: categoryServices, Addr: target, Caller: caller}
	if refusal = s.quota.enter(ctx, s.done, r); refusal != nil {
		return nil, refusal
	}
	s.quota.allowReach()
	defer func() { // deferred, because dial may panic
		s.quota.dialled(target, to != nil || refusal != nil && refusal.Answered())
		if to == nil {
			s.quota.over(true)
		}
	}()
	if refusal = s.register(topic, &serving{cancel}); refusal != nil {
		return nil, refusal
	}
	defer func() {
		if to == nil {
			s.remove(topic)
		}
	}()
	to, err := dial(ctx, request)
	if err == nil {
		return to, nil
	}
	to = nil
	refusal, decided := errors.AsType[*tunnel.Refusal](err)
	switch {
	case decided:
	case given.Err() != nil, s.reason() != nil:
		refusal = tunnel.Refusef(tunnel.Gone, "the caller has gone")
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		refusal = tunnel.Refusef(tunnel.Timeout, "%s did not answer the cloud within %s", text(target), dialTimeout)
	default:
		refusal = tunnel.Refusef(tunnel.Internal, "the cloud cannot connect to %s", text(target))
		refusal.Detail = err.Error()
	}
	return nil, refusal
}

// reachOf returns the topic and the target in the metadata of a Reach.
func reachOf(ctx context.Context) (topic, target string, err error) {
	topics, targets := metadata.ValueFromIncomingContext(ctx, topicKey), metadata.ValueFromIncomingContext(ctx, targetKey)
	if len(topics) != 1 || len(targets) != 1 {
		return "", "", status.Error(codes.InvalidArgument, "a Reach needs one topic and one target in its metadata")
	}
	topic, target = topics[0], targets[0]
	if u, err := uuid.Parse(topic); err != nil || u.String() != topic {
		return "", "", status.Error(codes.InvalidArgument, "the topic of a Reach must be a UUID")
	}
	if !isTarget(target) {
		return "", "", status.Errorf(codes.InvalidArgument,
			"the target of a Reach must have 1 to %d printable ASCII characters", maxTarget)
	}
	return topic, target, nil
}

// isTarget reports whether a Reach may have this target. gRPC allows only such characters in metadata.
func isTarget(target string) bool {
	for i := range len(target) {
		if target[i] < ' ' || target[i] > '~' {
			return false
		}
	}
	return target != "" && len(target) <= maxTarget
}

// refusalStatus returns the status that ends a refused Reach.
func refusalStatus(r *tunnel.Refusal) error {
	return withFacts(codes.FailedPrecondition, reasonRefused, text(r.Text), map[string]string{codeFact: r.Code.String()})
}
