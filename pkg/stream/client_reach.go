package stream

import (
	"context"
	"errors"
	"net"
	"slices"
	"time"

	"github.com/google/uuid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/pkg/conn"
	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// Calls waits for a live session, and returns its connection, for calls of a [SessionService]. A call on the
// connection ends when the session ends. So this loop keeps one call alive over changing sessions:
//
//	for {
//		cc, err := client.Calls(ctx)
//		if err != nil {
//			return // ctx is done
//		}
//		err = watch(ctx, cc) // Unimplemented: the cloud is too old, or does not serve the service
//		…                    // wait for a moment before the next attempt
//	}
//
// Calls does not return a session whose replica is about to stop: it waits for the next session. It prefers a replica
// that serves Services, since another replica may have another release or configuration.
func (c *Client) Calls(ctx context.Context) (grpc.ClientConnInterface, error) {
	for {
		c.mu.Lock()
		changed := c.changed.Next()
		stays, _ := c.liveLocked()
		c.mu.Unlock()
		if len(stays) > 0 {
			return servicesFirst(stays)[0].calls, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// liveLocked returns the live sessions, the newest first. The replicas of stays continue, the replicas of moves are
// about to stop. The caller holds mu.
func (c *Client) liveLocked() (stays, moves []*edgeSession) {
	for _, l := range slices.Backward(c.links) {
		switch {
		case tunnel.IsClosed(l.done):
		case l.moving, l.announced.Load():
			moves = append(moves, l.edgeSession)
		default:
			stays = append(stays, l.edgeSession)
		}
	}
	return stays, moves
}

// servicesFirst sorts sessions. Sessions whose replica serves Services come first.
func servicesFirst(all []*edgeSession) []*edgeSession {
	slices.SortStableFunc(all, func(a, b *edgeSession) int {
		switch {
		case a.pub.Services == b.pub.Services:
			return 0
		case a.pub.Services:
			return -1
		}
		return 1
	})
	return all
}

// Reach asks the cloud for a conn to a target, over the newest session whose replica serves Services. The cloud's
// ServerConfig.Reach decides what a target means; its text has at most 1,024 printable ASCII characters. The conn and
// the error are like those of a [tunnel.Dialer], and the conn ends with its session. ctx bounds the dialling only.
func (c *Client) Reach(ctx context.Context, target string) (net.Conn, error) {
	made, refusal := c.reach(ctx, target)
	if refusal != nil {
		c.cfg.Counters.Refuse(refusal.Code)
		return nil, refusal
	}
	c.cfg.Counters.ConnsOpened.Add(1)
	return made, nil
}

// reach is Reach without counters. If a session or its cloud is about to stop, reach tries the next session.
func (c *Client) reach(ctx context.Context, target string) (made *conn.Conn, refusal *tunnel.Refusal) {
	if !isTarget(target) {
		return nil, tunnel.Refusef(tunnel.Unreachable, "%q is not a target: it must have 1 to %d printable ASCII characters",
			text(target), maxTarget)
	}
	c.mu.Lock()
	stays, moves := c.liveLocked()
	c.mu.Unlock()
	refusal = tunnel.Refusef(tunnel.NoSuchNode, "node %s has no session with the cloud", c.cfg.Node)
	for _, s := range servicesFirst(append(stays, moves...)) {
		made, refusal = s.reach(ctx, target)
		again := refusal != nil && (refusal.Code == tunnel.Draining || refusal.Code == tunnel.Gone)
		if !again || ctx.Err() != nil {
			break
		}
	}
	return made, refusal
}

// reachStream is the way of a conn that this edge has asked for: a stream of the call Reach.
type reachStream struct {
	streamConn
	target string
}

// accept asks the cloud for the conn, and waits for the answer.
func (o *reachStream) accept(ctx context.Context) error {
	var stream pb.Stream_ReachClient
	if err := o.open(ctx, func(ctx context.Context) (_ conn.Stream, err error) {
		stream, err = o.s.client.Reach(ctx)
		return stream, err
	}, targetKey, o.target); err != nil {
		return err
	}
	header, err := stream.Header()
	if header == nil && err == nil { // the stream has ended, and RecvMsg returns its status
		if err = stream.RecvMsg(new(pb.Chunk)); err == nil {
			err = errors.New("the cloud sends bytes before its answer")
		}
	}
	if err != nil {
		o.cancel()
	}
	return err
}

// reach asks the cloud of the session for a conn. ctx bounds the dialling only.
func (s *edgeSession) reach(ctx context.Context, target string) (*conn.Conn, *tunnel.Refusal) {
	select {
	case s.reaching <- struct{}{}:
	case <-s.done:
		return nil, tunnel.Refusef(tunnel.Gone, "the session of node %s has ended", s.pub.Node)
	case <-ctx.Done():
		return nil, s.refusalOf(ctx, ctx.Err(), target)
	}
	c, refusal := s.callReach(ctx, target)
	leave := func() { <-s.reaching }
	if refusal != nil {
		time.AfterFunc(burst, leave)
	} else {
		leave()
	}
	return c, refusal
}

// callReach is reach without the limit of unanswered calls.
func (s *edgeSession) callReach(ctx context.Context, target string) (*conn.Conn, *tunnel.Refusal) {
	sctx, cancel := context.WithCancel(context.Background())
	topic := uuid.NewString()
	if refusal := s.add(topic, &serving{cancel}); refusal != nil {
		cancel()
		return nil, refusal
	}
	over := func() {
		cancel()
		s.remove(topic)
	}
	stop := context.AfterFunc(ctx, cancel)
	c, err := s.openConn(sctx, conn.Addr(target), &reachStream{streamConn{s: s, topic: topic}, target}, true, over)
	stop()
	if err != nil {
		over()
		return nil, s.refusalOf(ctx, err, target)
	}
	s.replace(topic, c)
	if sctx.Err() != nil { // ctx ended, or the target sent a reset, before replace
		c.Abort()
	}
	if ctx.Err() != nil {
		c.Abort()
		return nil, s.refusalOf(ctx, ctx.Err(), target)
	}
	return c, nil
}

// refusalOf returns why a Reach has failed with err.
func (s *edgeSession) refusalOf(ctx context.Context, err error, target string) *tunnel.Refusal {
	switch {
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return tunnel.Refusef(tunnel.Timeout, "the cloud did not answer in time whether %s can be reached", target)
	case ctx.Err() != nil:
		return tunnel.Refusef(tunnel.Gone, "the caller has gone")
	case s.reason() != nil:
		return tunnel.Refusef(tunnel.Gone, "the session of node %s has ended", s.pub.Node)
	}
	return refusalBy(err)
}

// refusalBy returns the refusal in the status of a Reach.
func refusalBy(err error) *tunnel.Refusal {
	if info := infoOf(err); info.GetReason() == string(reasonRefused) {
		name := info.GetMetadata()[codeFact]
		all := tunnel.Codes()
		code := tunnel.Internal // also stands for a code of a newer cloud that this edge does not know
		if i := slices.IndexFunc(all, func(c tunnel.Code) bool { return c.String() == name }); i >= 0 {
			code = all[i]
		}
		return &tunnel.Refusal{Code: code, Text: text(status.Convert(err).Message())}
	}
	switch status.Code(err) {
	case codes.Unimplemented:
		return tunnel.Refusef(tunnel.Internal, "the cloud is too old or has no [mode.cloud.services]")
	case codes.Unavailable, codes.Canceled:
		return tunnel.Refusef(tunnel.Gone, "the cloud has ended the call: %s", text(status.Convert(err).Message()))
	}
	return tunnel.Refusef(tunnel.Internal, "%s", text(status.Convert(err).Message()))
}
