package stream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"tunnel/pkg/auth"
	"tunnel/pkg/conn"
	pb "tunnel/pkg/stream/tunnelv1"
	"tunnel/pkg/tunnel"
)

// cloudSession is the cloud's end of a session.
type cloudSession struct {
	session
	transport *transport
	instance  string   // of the edge
	all       bool     // the edge keeps a session with every replica
	peers     *Peers   // the session is another replica's; nil: a node's
	replica   *replica // the other replica; set when the session is attached

	// Of a node's session; see server_proof.go.
	authenticate func(auth.Credential) (*proof, *refusedJoin) // for as long as the session lives
	proof        atomic.Pointer[proof]
	proven       chan struct{}  // says that proof is another one; capacity 1, so that nobody waits to send
	checking     atomic.Bool    // a credential is being looked at
	signing      atomic.Bool    // a certificate is being made
	credentials  tunnel.Limiter // how many are looked at
	signatures   tunnel.Limiter // how many are made

	connections int    // how many data connections the edge opens at most
	asked       *asked // the server's

	quota   *quota          // of the node; nil: the session is another replica's, and its opens count where the node is held
	denials *tunnel.Limiter // of warnings, the server's

	// Guarded by session.mu.
	asking     int         // data connections that the edge has been asked for
	lastAsk    time.Time   // when it was asked last
	spares     []*dataConn // those that wait for a conn, the one last used last
	shortConns recently    // that have ended
}

var _ tunnel.Link = (*cloudSession)(nil)

// pending is an open request that waits for the edge's answer. Whoever settles it
// first decides: the edge's refusal, its Connect, the session's end, or Dial itself
// when its context is done.
type pending struct {
	settled atomic.Bool
	result  chan opened // the settler sends; capacity 1, so it never waits
}

type opened struct {
	conn    *conn.Conn
	refusal *tunnel.Refusal
}

func (p *pending) settle(o opened) bool {
	if p.settled.Swap(true) {
		return false
	}
	p.result <- o
	return true
}

func (p *pending) Abort() {
	p.settle(opened{refusal: tunnel.Refusef(tunnel.Gone, "the session of the node has ended")})
}

// Dial implements tunnel.Link: it asks the edge to dial and waits for the conn.
func (s *cloudSession) Dial(ctx context.Context, r tunnel.Request) (net.Conn, error) {
	c, refusal := s.dial(ctx, r)
	if refusal != nil {
		if r.NoWait && refusal.Code == tunnel.Overloaded {
			return nil, refusal // not the last word
		}
		s.counters.Refuse(refusal.Code)
		if refusal.Code == tunnel.Denied && s.peers == nil { // else the replica that holds the node logs the denial
			if skipped, ok := s.denials.Allow(); ok {
				s.log.Warn("the edge has denied a dial", "target", r.Addr, "caller", text(r.Caller), "err", refusal, "skipped", skipped)
			}
		}
		return nil, refusal
	}
	s.counters.ConnsOpened.Add(1)
	return c, nil
}

func (s *cloudSession) dial(ctx context.Context, r tunnel.Request) (c *conn.Conn, refusal *tunnel.Refusal) {
	// A caller may have chosen the address, and a message that cannot be sent, or that
	// the edge does not accept, would cost the whole session.
	if len(r.Addr) > maxAddr || !utf8.ValidString(r.Addr) {
		return nil, tunnel.Refusef(tunnel.Unreachable, "%q is not an address", text(r.Addr))
	}
	if s.quota == nil {
		return s.open(ctx, r)
	}
	s.mu.Lock()
	refusal = s.closedLocked()
	s.mu.Unlock()
	if refusal == nil {
		refusal = s.quota.enter(ctx, s.done, r)
	}
	if refusal != nil {
		return nil, refusal
	}
	defer func() { // also when open panics
		s.quota.queue.Dialled(r.Addr, c != nil || refusal != nil && refusal.Answered())
		if c == nil { // else connOver does it
			s.quota.queue.Over()
		}
	}()
	return s.open(ctx, r)
}

// open sends an open, and waits for its conn.
func (s *cloudSession) open(ctx context.Context, r tunnel.Request) (*conn.Conn, *tunnel.Refusal) {
	m := &tunnel.Message{Category: r.Category, Type: tunnel.TypeOpen, Topic: uuid.NewString(), Addr: r.Addr}
	open := &pb.Open{Network: r.Network, Caller: text(r.Caller), Relayed: r.Relayed, NoWait: r.NoWait}
	if s.peers != nil {
		m.Category, open.Node, open.Category = categoryRelay, string(r.Node), r.Category
	}
	m.Data = encode(open)
	if d := s.takeSpare(); d != nil {
		c, refusal, lost := s.dialOver(ctx, d, r, m)
		if !lost {
			return c, refusal
		}
		m.Topic = uuid.NewString()
	}
	return s.dialByControl(ctx, r, m)
}

// dialByControl sends an open on the control stream, and waits for its conn to come on the
// session's own connection.
func (s *cloudSession) dialByControl(ctx context.Context, r tunnel.Request, m *tunnel.Message) (*conn.Conn, *tunnel.Refusal) {
	name := m.Topic
	p := &pending{result: make(chan opened, 1)}
	if refusal := s.add(name, p); refusal != nil {
		return nil, refusal
	}
	// Were the session to end now, it would settle p.
	s.post(m)
	s.askForMore()
	var o opened
	defer func() {
		if o.refusal != nil || o.conn == nil && p.settle(opened{}) { // the latter after a panic
			s.remove(name)
		}
	}()
	select {
	case o = <-p.result:
	case <-ctx.Done():
		p.settle(opened{refusal: s.gaveUp(ctx, r)})
		o = <-p.result
		if o.conn != nil { // it came just now
			return o.conn, nil
		}
		s.post(message(typeCancel, name, nil))
	}
	return o.conn, o.refusal
}

// noteTooLong counts a message that ended the session because it was too long.
func (s *cloudSession) noteTooLong(err error) {
	_, ours := errors.AsType[*limitError](err)
	if !ours && status.Code(err) == codes.ResourceExhausted { // gRPC's own
		s.counters.Limited(tunnel.LimitMessage)
	}
}

// gaveUp says why Dial did not wait for the edge's answer.
func (s *cloudSession) gaveUp(ctx context.Context, r tunnel.Request) *tunnel.Refusal {
	switch {
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return tunnel.Refusef(tunnel.Timeout, "node %s did not answer in time whether %s can be reached", r.Node, r.Addr)
	case ctx.Err() != nil:
		return tunnel.Refusef(tunnel.Gone, "the caller has gone")
	}
	return tunnel.Refusef(tunnel.Gone, "the session of node %s has ended", r.Node)
}

// misdirected ends the session of an edge that says what only a cloud may. Nothing would
// come of it, but no edge of any version does so. All else that is not known may be
// from a newer edge.
func misdirected(m *tunnel.Message) error {
	if m.Type == tunnel.TypeOpen || m.Category == category && slices.Contains([]string{typeHello, typeReplicas, typeConnection}, m.Type) {
		return status.Errorf(codes.PermissionDenied, "%s/%s is not for an edge to say", text(m.Category), m.Type)
	}
	return nil
}

// Serve implements tunnel.Link. Nobody may ask the cloud to dial.
func (s *cloudSession) Serve(*tunnel.Message, tunnel.DialFunc) error {
	return errors.New("the cloud does not dial for an edge")
}

// connect is the body of a Connect call.
func (s *cloudSession) connect(stream pb.Stream_ConnectServer) error {
	ctx := stream.Context()
	topics := metadata.ValueFromIncomingContext(ctx, topicKey)
	if len(topics) != 1 {
		return status.Error(codes.InvalidArgument, "a Connect needs one topic in its metadata")
	}
	name := topics[0]
	p, ok := s.lookup(name).(*pending)
	if !ok {
		return errGone
	}
	since := time.Now()
	var c *conn.Conn
	c = conn.OverStream(stream, &s.own.turns, conn.Config{
		Ordered: s.ordered, Blocks: s.blocks, Counters: s.counters, Log: s.log,
		Local: "cloud", Remote: conn.Addr(s.pub.Node),
		Ended: func(err error) {
			if err != nil && c.MustCancel() {
				// The status waits behind data that a stalled edge does not read; this does not.
				s.post(message(typeCancel, name, nil))
			}
		},
		Gone: func() { s.connOver(name, since) },
	})
	if !s.promote(name, p, c) {
		return errGone
	}
	stop := c.Watch(ctx)
	defer stop()
	<-c.Done()
	if c.Err() != nil {
		return status.Error(codes.Aborted, "reset")
	}
	return nil
}

// promote makes an open request a conn. It fails when the request was settled
// meanwhile. The topic changes hands first: the conn may be over as soon as Dial has it.
func (s *cloudSession) promote(name string, p *pending, c *conn.Conn) bool {
	s.mu.Lock()
	if s.err != nil || s.topics[name] != topic(p) || p.settled.Swap(true) {
		s.mu.Unlock()
		return false
	}
	s.topics[name] = c
	s.mu.Unlock()
	p.result <- opened{conn: c}
	return true
}

// connOver notes that nothing is left of a conn.
func (s *cloudSession) connOver(name string, since time.Time) {
	if time.Since(since) < short {
		s.mu.Lock()
		s.shortConns.add()
		s.mu.Unlock()
	}
	s.remove(name)
	if s.quota != nil {
		s.quota.queue.Over()
	}
}

// short is how long a conn lasts that comes and goes.
const short = 250 * time.Millisecond

// errGone answers a Connect that nobody waits for any more, which is normal when a
// caller has gone while the edge dialled.
var errGone = status.Error(codes.NotFound, "gone: nobody waits for this conn")

// heartbeat sends an edge's heartbeat back.
func (s *cloudSession) heartbeat(m *tunnel.Message) error {
	var h pb.Heartbeat
	// What is not known is not sent back: the outbox must stay small.
	if err := (proto.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(m.Data, &h); err != nil {
		return fmt.Errorf("heartbeat: %w", err)
	}
	s.pub.RTT.Store(max(0, h.GetRoundTrip()))
	s.post(message(typeHeartbeat, "", &h))
	s.dropIdleAndLost()
	return nil
}

// cancelConn takes an edge's word that a conn which it carries by a data connection was
// reset: nobody may be reading there.
func (s *cloudSession) cancelConn(m *tunnel.Message) error {
	if c, ok := s.lookup(m.Topic).(*conn.Conn); ok {
		c.EndedByPeer()
	}
	return nil
}

// refused passes an edge's refusal to the Dial that waits for it.
func (s *cloudSession) refused(m *tunnel.Message) error {
	refusal, err := refusalOf(m.Data)
	if err != nil {
		return err
	}
	p, ok := s.lookup(m.Topic).(*pending)
	if !ok {
		return nil // Dial did not wait for it
	}
	p.settle(opened{refusal: refusal})
	return nil
}

// edgeLeaves notes that the edge is about to stop: its conns go on, new ones are
// refused.
func (s *cloudSession) edgeLeaves(m *tunnel.Message) error {
	var d pb.Drain
	if err := proto.Unmarshal(m.Data, &d); err != nil {
		return fmt.Errorf("drain: %w", err)
	}
	s.mu.Lock()
	s.leaving = true
	s.mu.Unlock()
	s.log.Info("edge is about to stop", "dur", time.Duration(d.GetGraceSeconds())*time.Second)
	return nil
}

// logEnd writes that the session has ended. When the edge has said that it leaves, how
// its connection then ended is no news.
func (s *cloudSession) logEnd(err error) {
	s.mu.Lock()
	leaving := s.leaving
	s.mu.Unlock()
	lived := time.Since(s.pub.Since).Round(time.Millisecond)
	if leaving && hungUp(err) {
		s.log.Info("session ended: the edge has stopped", "dur", lived)
		return
	}
	s.log.Info("session ended", "err", err, "dur", lived)
}

// hungUp reports whether a session ended by the edge's hanging up, and not by a
// decision here.
func hungUp(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, errLost) || errors.Is(err, context.Canceled) ||
		status.Code(err) == codes.Canceled ||
		status.Code(err) == codes.Unavailable && !errors.Is(err, errCloudStopping)
}
