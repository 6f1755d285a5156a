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
	}, targetKey, o.target, dataKey, dataYes); err != nil {
		return err
	}
	header, err := stream.Header()
	if len(header.Get(dataKey)) > 0 {
		err = errHandedOver
	}
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

// errHandedOver says that the conn of a Reach comes by a data connection.
var errHandedOver = errors.New("the conn comes by a data connection")

// callReach is reach without the limit of unanswered calls. The conn comes by the stream of the call or by a data
// connection, as the cloud likes.
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
	defer stop()
	e := s.expect(topic, target, cancel)
	defer s.expectNoMore(topic)
	type opened struct {
		c   *conn.Conn
		err error
	}
	byStream, returned := make(chan opened), make(chan struct{})
	defer close(returned)
	// A conn by a data connection may come before the cloud's answer, and then the caller need not wait for it.
	go s.guarded(func() {
		var c *conn.Conn
		defer func() { // deferred, because openConn may panic
			if c == nil {
				over()
			}
		}()
		way := &reachStream{streamConn{s: s, topic: topic}, target}
		c, err := s.openConn(sctx, conn.Addr(target), way, true, over)
		select {
		case byStream <- opened{c, err}:
		case <-returned:
			if c != nil {
				c.Abort()
			}
		}
	})()
	for {
		select {
		case c := <-e.conn:
			return s.unlessGone(ctx, c, target)
		case o := <-byStream:
			switch {
			case errors.Is(o.err, errHandedOver): // the conn is on its way to e
				byStream = nil
				continue
			case o.err != nil:
				return nil, s.refusalOf(ctx, o.err, target)
			}
			stop()
			s.replace(topic, o.c)
			if sctx.Err() != nil { // ctx ended, or the target sent a reset, before replace
				o.c.Abort()
			}
			return s.unlessGone(ctx, o.c, target)
		case <-ctx.Done():
			cancel() // stop may keep AfterFunc from doing so
			return nil, s.refusalOf(ctx, ctx.Err(), target)
		case <-s.done:
			return nil, s.refusalOf(ctx, errEnded, target)
		}
	}
}

// unlessGone returns c if the caller still waits. If ctx is done, it resets c and returns the reason.
func (s *edgeSession) unlessGone(ctx context.Context, c *conn.Conn, target string) (*conn.Conn, *tunnel.Refusal) {
	if ctx.Err() != nil {
		c.Abort()
		return nil, s.refusalOf(ctx, ctx.Err(), target)
	}
	return c, nil
}

// expected is a call of Reach whose conn may come by a data connection.
type expected struct {
	target string
	conn   chan *conn.Conn // capacity 1: at most one conn is sent, while session.mu is held
	cancel func()          // ends the call
}

// expect notes a call of Reach.
func (s *edgeSession) expect(topic, target string, cancel func()) *expected {
	e := &expected{target, make(chan *conn.Conn, 1), cancel}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.expects == nil {
		s.expects = make(map[string]*expected)
	}
	s.expects[topic] = e
	return e
}

// expectNoMore undoes expect. It resets a conn that nobody has taken.
func (s *edgeSession) expectNoMore(topic string) {
	s.mu.Lock()
	e := s.expects[topic]
	delete(s.expects, topic)
	s.mu.Unlock()
	if e == nil {
		return
	}
	select {
	case c := <-e.conn:
		c.Abort()
	default:
	}
}

// serveReached hands over the conn of a Reach, whose topic is the address of the open m. It returns when the conn has
// ended.
func (s *edgeSession) serveReached(m *tunnel.Message, way openWay) error {
	return s.serveBy(m, way, s.registerSecond, func(ctx context.Context) {
		s.mu.Lock()
		e := s.expects[m.Addr]
		s.mu.Unlock()
		if e == nil {
			way.refuse(&pb.Refused{Code: pb.Code(tunnel.Gone), Text: "the caller has gone"}) // it is counted already
			return
		}
		gone := make(chan struct{})
		c, err := s.openConn(ctx, conn.Addr(e.target), way, true, func() { close(gone) })
		if err != nil {
			return // the data connection has failed
		}
		stop := c.Watch(ctx)
		defer stop()
		s.replace(m.Topic, c) // for connEnds
		s.mu.Lock()
		waits := s.expects[m.Addr] == e && len(e.conn) == 0
		if waits {
			e.conn <- c
		}
		s.mu.Unlock()
		if !waits {
			c.Abort()
		}
		<-gone
		e.cancel() // for a cloud that has not ended the call
	})
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
