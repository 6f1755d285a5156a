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

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/conn"
	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// cloudSession is the server's end of a session with a node or with another replica.
type cloudSession struct {
	session
	transport *transport // the connection that the control stream came on
	role      role       // what the peer is: a node or another replica

	// Proofs, see server_proof.go.
	authenticate func(auth.Credential) (*proof, *refusedJoin) // the grant lives as long as the session
	ignored      func(*refusedJoin)                           // counts and logs a new credential that is not accepted
	proof        atomic.Pointer[proof]
	proven       chan struct{}  // standOn sends after it sets proof; capacity 1, so standOn never waits
	checking     atomic.Bool    // a goroutine checks a credential
	signing      atomic.Bool    // a certificate is being issued
	credentials  tunnel.Limiter // how many credentials the session may have checked
	signatures   tunnel.Limiter // how many certificates the session may have issued

	connections int          // most data connections that the edge opens
	tickets     *dataTickets // the server's
	// The constants of the same names, except in tests.
	spareWait, handOverTime time.Duration

	quota *quota // the node's quota; nil: no limits
	share *share // for a session with another replica; nil: no limits

	denials tunnel.Limiter // limits how often ReachSink is told of a target that the node may not reach

	// See server_succeed.go.
	predecessor atomic.Pointer[cloudSession] // older session whose conns continue, see lastAlive; nil: none
	succession  atomic.Pointer[time.Timer]   // ends the predecessor; nil: no timer does

	// Guarded by session.mu.
	stopping       bool          // the edge has said that it is about to stop
	requested      int           // unanswered requests for data connections
	lastRequest    time.Time     // when the cloud last requested a data connection
	noRequestUntil time.Time     // before this time the cloud requests no data connection, since the edge has refused one
	spares         []*dataConn   // idle data connections; the most recently used is last
	spared         tunnel.Change // a data connection has become idle
	calls          int           // streams of SessionServices; see addCall
	shortConns     recently      // conns that ended recently and lasted less than short
}

var (
	_ end           = (*cloudSession)(nil)
	_ tunnel.Dialer = (*cloudSession)(nil)
)

// invalid implements end: it tells the peer that the message was not valid.
func (s *cloudSession) invalid(err error) error {
	return status.Error(codes.InvalidArgument, err.Error())
}

// pending is an open request that waits for the edge's answer. The first party to settle it decides
// the result. The parties are the edge's refusal, the edge's Connect, the end of the session, and
// Dial when its context is done.
type pending struct {
	settled atomic.Bool // true: one party has settled the request
	result  chan opened // the settler sends exactly once; capacity 1, so that the send never waits

	claim claim // what the conn counts for; set once
}

// opened is the result of an open request: either a conn or a refusal. Both are nil if a panic has ended the request.
type opened struct {
	conn    *conn.Conn      // nil: refused
	refusal *tunnel.Refusal // nil: not refused
}

// settle sends o if the request is not settled yet. It reports whether it did.
func (p *pending) settle(o opened) bool {
	if p.settled.Swap(true) {
		return false
	}
	p.result <- o
	return true
}

// Abort implements topic. It settles the request because the session has ended.
func (p *pending) Abort() {
	p.settle(opened{refusal: tunnel.Refusef(tunnel.Gone, "the session of the node has ended")})
}

// Dial implements tunnel.Dialer. It asks the edge to dial, and waits for the conn.
func (s *cloudSession) Dial(ctx context.Context, r tunnel.Request) (net.Conn, error) {
	r.Chose()
	span := s.tracer.Child(tunnel.SpanOpen, r.Trace)
	if span != nil {
		r.Trace = &span.TraceContext
	}
	c, refusal := s.dial(ctx, r)
	if span != nil {
		span.End(s.eventOf(r, refusal))
	}
	if refusal != nil {
		if r.NoWait && refusal.Code == tunnel.Overloaded {
			return nil, refusal // not counted, because the caller may still try another node, or wait
		}
		s.counters.Refuse(refusal.Code)
		if refusal.Code == tunnel.Denied {
			s.role.denied(s, r, refusal)
		}
		return nil, refusal
	}
	s.counters.ConnsOpened.Add(1)
	return c, nil
}

// dial is Dial without counters and logs. It waits for room in the quota of the node.
func (s *cloudSession) dial(ctx context.Context, r tunnel.Request) (c *conn.Conn, refusal *tunnel.Refusal) {
	// A caller may have chosen the address. An address that cannot be encoded, or that the edge
	// rejects, would end the whole session.
	if len(r.Addr) > maxAddr || !utf8.ValidString(r.Addr) {
		return nil, tunnel.Refusef(tunnel.Unreachable, "%q is not an address", text(r.Addr))
	}
	s.mu.Lock()
	refusal = s.closedLocked()
	s.mu.Unlock()
	if refusal != nil {
		return nil, refusal
	}
	counts := claimOf(r)
	if refusal = s.share.enter(counts); refusal != nil {
		s.counters.Limited(tunnel.LimitConns)
		return nil, refusal
	}
	if refusal = s.quota.enter(ctx, s.done, r); refusal != nil {
		s.share.over(counts)
		return nil, refusal
	}
	s.quota.allowAnswer()
	defer func() { // deferred, because open may panic
		s.quota.dialled(r.Addr, c != nil || refusal != nil && refusal.Answered())
		if c == nil { // otherwise connOver calls over
			s.over(counts)
		}
	}()
	return s.open(ctx, r)
}

// open sends an open request and waits for the conn. It uses an idle data connection if there is
// one, and otherwise the control stream.
func (s *cloudSession) open(ctx context.Context, r tunnel.Request) (*conn.Conn, *tunnel.Refusal) {
	m := &tunnel.Message{Category: r.Category, Type: tunnel.TypeOpen, Topic: uuid.NewString(), Addr: r.Addr}
	open := &pb.Open{
		Network: r.Network, Caller: text(r.Caller), Relayed: r.Relayed, NoWait: r.NoWait, Traceparent: r.Trace.Traceparent(),
		ByPods: r.ByPods,
	}
	s.role.address(m, open, r)
	m.Data = encode(open)
	if d := s.spareFor(ctx, r); d != nil {
		c, refusal, lost := s.dialOver(ctx, d, r, m, true)
		if !lost {
			return c, refusal
		}
		m.Topic = uuid.NewString()
	}
	return s.dialByControl(ctx, r, m)
}

// dialByControl sends an open request on the control stream. The conn then comes on the session's
// own connection.
func (s *cloudSession) dialByControl(
	ctx context.Context, r tunnel.Request, m *tunnel.Message,
) (*conn.Conn, *tunnel.Refusal) {
	name := m.Topic
	p := &pending{result: make(chan opened, 1), claim: claimOf(r)}
	if refusal := s.add(name, p); refusal != nil {
		return nil, refusal
	}
	// If the session ends now, Close settles p.
	s.post(m)
	s.requestMore()
	var o opened
	defer func() {
		if o.refusal != nil || o.conn == nil && p.settle(opened{}) { // the second condition holds only after a panic
			s.remove(name)
		}
	}()
	select {
	case o = <-p.result:
	case <-ctx.Done():
		p.settle(opened{refusal: s.gaveUp(ctx, r)})
		o = <-p.result
		if o.conn != nil { // the conn came at the last moment
			return o.conn, nil
		}
		s.post(message(typeCancel, name, nil))
	}
	return o.conn, o.refusal
}

// ErrJoinedElsewhere ends the session of a node if another process has joined as the node at another
// replica, and later.
var ErrJoinedElsewhere = status.Error(codes.Aborted, "replaced by a newer session of this node with another replica")

// noteCause counts two causes of a session's end: another process has joined as the node elsewhere,
// or a message was too long. It warns of the first.
func (s *cloudSession) noteCause(err error) {
	if errors.Is(err, ErrJoinedElsewhere) {
		s.log.Warn("another process has joined as this node at another replica; this session ends. " +
			"If it happens again and again, two edges use one name")
		s.counters.Replaced.Add(1)
		return
	}
	_, ours := errors.AsType[*limitError](err)
	if !ours && status.Code(err) == codes.ResourceExhausted { // gRPC has rejected a message that is too long
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

// misdirected ends the session of an edge that sends a message that only the cloud may send. The
// message would have no effect, but no version of the edge sends it. Any other unknown message may
// come from a newer edge.
func misdirected(m *tunnel.Message) error {
	fromCloud := []string{typeHello, typeReplicas, typeConnection}
	if m.Type == tunnel.TypeOpen || m.Category == category && slices.Contains(fromCloud, m.Type) {
		return status.Errorf(codes.PermissionDenied, "an edge may not send %s/%s", text(m.Category), m.Type)
	}
	return nil
}

// connect is the body of a Connect call. It returns when the conn has ended.
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
	c := s.newConn(stream, name, true, func() { s.connOver(name, p.claim, since) })
	if !s.promote(name, p, c) {
		return errGone
	}
	return waitForEnd(ctx, c)
}

// newConn makes the cloud's end of a conn over a stream. asked and gone are [conn.Config.Asked] and [conn.Config.Gone].
func (s *cloudSession) newConn(stream conn.Stream, topic string, asked bool, gone func()) (c *conn.Conn) {
	c = conn.OverStream(stream, &s.own.turns, conn.Config{
		Asked: asked, Ordered: s.ordered, Blocks: s.blocks, Counters: s.counters, Traffic: &s.pub.Traffic, Log: s.log,
		Local: "cloud", Remote: conn.Addr(s.pub.Node), Ends: s.endsOf(asked),
		TellEnds: func(left time.Duration) { s.tellEnds(topic, left) },
		Ended: func(err error) {
			if err != nil && c.MustCancel() {
				// The status of the stream waits behind data that a stalled edge does not read. The
				// control stream does not wait.
				s.post(message(typeCancel, topic, nil))
			}
		},
		Gone: gone,
	})
	return c
}

// endsOf returns conn.Config.Ends. An edge that is about to stop sends one message for all conns of its session, so
// they share one GraceEnd. Another replica sends a message for each conn.
func (s *cloudSession) endsOf(asked bool) *tunnel.GraceEnd {
	switch {
	case !asked:
		return nil
	case s.isNode():
		return &s.pub.Ends
	}
	return new(tunnel.GraceEnd)
}

// waitForEnd waits until a conn has ended. It returns the status of its stream, whose context is ctx.
func waitForEnd(ctx context.Context, c *conn.Conn) error {
	select {
	case <-c.Done():
	case <-ctx.Done():
		c.EndedByPeer()
	}
	if c.Err() != nil {
		return status.Error(codes.Aborted, "reset")
	}
	return nil
}

// promote turns an open request into a conn. It fails if the request was already settled. promote
// sets the topic before it sends the conn, because the conn may end as soon as Dial has it.
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

// connOver removes a conn that is over and has no goroutine left. since is when the conn began.
func (s *cloudSession) connOver(name string, counts claim, since time.Time) {
	if time.Since(since) < short {
		s.mu.Lock()
		s.shortConns.add()
		s.mu.Unlock()
	}
	s.remove(name)
	s.over(counts)
}

// over makes room for another conn.
func (s *cloudSession) over(counts claim) {
	s.quota.over(counts.byPods)
	s.share.over(counts)
}

// short is the duration below which an ended conn counts in shortConns.
const short = 250 * time.Millisecond

// errGone answers a Connect that no Dial waits for any more. Such a Connect is normal: the caller may
// leave while the edge dials.
var errGone = status.Error(codes.NotFound, "gone: no dial waits for this conn")

// heartbeat sends the edge's heartbeat back, and closes idle and lost data connections.
func (s *cloudSession) heartbeat(m *tunnel.Message) error {
	var h pb.Heartbeat
	// Unknown fields are not sent back: the outbox must stay small.
	if err := (proto.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(m.Data, &h); err != nil {
		return fmt.Errorf("heartbeat: %w", err)
	}
	s.pub.RTT.Store(max(0, h.GetRoundTrip()))
	s.post(message(typeHeartbeat, "", &h))
	s.dropIdleAndLost()
	return nil
}

// cancelConn handles the edge's message that a conn on a data connection was reset. The cloud may
// not be reading that data connection, so the message comes on the control stream.
func (s *cloudSession) cancelConn(m *tunnel.Message) error {
	if c, ok := s.lookup(m.Topic).(*conn.Conn); ok {
		c.EndedByPeer()
	}
	return nil
}

// refused passes the edge's refusal to the dial that waits for it, or notes that the edge opens no data
// connection. The topic of the message is the topic of an open, or a ticket.
func (s *cloudSession) refused(m *tunnel.Message) error {
	refusal, err := refusalOf(m.Data)
	if err != nil {
		return err
	}
	if p, ok := s.lookup(m.Topic).(*pending); ok {
		p.settle(opened{refusal: refusal})
	} else if s.tickets.takeOf(s, m.Topic) {
		s.refusedData(refusal)
	}
	return nil // if no topic and no ticket matches: the dial no longer waits, or the ticket has expired
}

// edgeLeaves notes that the edge takes no new conns. Its conns continue, and the cloud refuses new dials to it. The
// edge may still ask for conns (Reach). If the message has no grace period, the edge was drained and does not stop.
// If it has one, the cloud ends idle conns shortly before the edge would reset them.
func (s *cloudSession) edgeLeaves(m *tunnel.Message) error {
	var d pb.Drain
	if err := proto.Unmarshal(m.Data, &d); err != nil {
		return fmt.Errorf("drain: %w", err)
	}
	grace := time.Duration(d.GetGraceSeconds()) * time.Second
	s.mu.Lock()
	drains, stops := !s.leaving && grace == 0, !s.stopping && grace > 0
	s.leaving = true
	s.stopping = s.stopping || grace > 0
	s.mu.Unlock()
	if stops && s.isNode() { // another replica tells it of each conn: see Splice
		s.pub.Ends.Begin(min(grace, tunnel.GracePeriod))
	}
	switch { // an edge may send any number of drains: each state is logged once
	case stops:
		s.log.Info("edge is about to stop", "dur", grace)
	case drains:
		s.log.Info("edge takes no new conns, as tunnel drain has asked it")
	}
	return nil
}

// logEnd logs that the session has ended. If the edge announced its stop, the log does not say how
// the connection ended.
func (s *cloudSession) logEnd(err error) {
	lived := time.Since(s.pub.Since).Round(time.Millisecond)
	switch {
	case s.hasStopped(err):
		s.log.Info("session ended: the edge has stopped", "dur", lived)
	case s.toldDrain.Load() && errors.Is(err, errLost):
		s.log.Info("session ended: the edge has moved", "dur", lived)
	case errors.Is(err, errCloudStopping):
		s.log.Info("session ended: the cloud is stopping", "dur", lived)
	case errors.Is(err, io.EOF):
		s.log.Info("session ended: the other side has ended it", "dur", lived)
	case errors.Is(err, context.Canceled), status.Code(err) == codes.Canceled:
		s.log.Info("session ended: the other side has closed the connection", "dur", lived)
	default:
		s.log.Info("session ended", "err", err, "dur", lived)
	}
}

// whyEnded says in words why the session ended with err, for operators.
func (s *cloudSession) whyEnded(err error) string {
	switch {
	case s.hasStopped(err):
		return "the edge has stopped"
	case errors.Is(err, io.EOF):
		return "the edge has closed the session"
	}
	return text(status.Convert(err).Message())
}

// hasStopped reports whether the session ended with err because the edge has stopped, after it had announced its stop.
func (s *cloudSession) hasStopped(err error) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stopping && hungUp(err)
}

// hasLeft reports whether the edge takes no new conns.
func (s *cloudSession) hasLeft() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.leaving
}

// isCleanEnd reports whether the edge itself has ended the session in the normal way.
func (s *cloudSession) isCleanEnd(err error) bool {
	return errors.Is(err, io.EOF) || s.hasStopped(err)
}

// hungUp reports whether the session ended because the edge closed the connection, and not by a
// decision of the cloud.
func hungUp(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, errLost) || errors.Is(err, context.Canceled) ||
		status.Code(err) == codes.Canceled ||
		status.Code(err) == codes.Unavailable && !errors.Is(err, errCloudStopping)
}
