package stream

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"tunnel.example/tunnel/pkg/conn"
	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// openWay is how one open came to the client's end of a session, and how the client answers it. The client
// is an edge, or a replica that has joined another replica. A controlOpen came by the control stream, a
// dataOpen by a data connection. The conn uses the same way as the open.
type openWay interface {
	// registered is called after serveOpen has added the open to the topics of the session, or has
	// failed to add it.
	registered()
	// run calls serve, in its own goroutine or in a new one. serve serves the open until its conn has ended.
	run(serve func())
	connWay
	// refuse tells the cloud why there is no conn.
	refuse(refused *pb.Refused)
	// ended is called when serve has returned: the open was refused or has failed, or its conn has
	// ended.
	ended()
}

// connWay is the way of one conn at the client's end of a session.
type connWay interface {
	// accept tells the cloud that the target of an open was reached, or asks the cloud to reach one.
	accept(ctx context.Context) error
	// conn makes this end of the conn. It is called once, after accept.
	conn(cfg conn.Config) *conn.Conn
	// reset resets the conn.
	reset()
	// tellEnds is conn.Config.TellEnds.
	tellEnds(left time.Duration)
}

// streamConn is the way of a conn that is a stream on the session's own connection.
type streamConn struct {
	s      *edgeSession
	topic  string
	stream conn.Stream        // open sets it
	cancel context.CancelFunc // resets stream
}

// open opens the stream with call. The stream's metadata is the topic and pairs, which alternate keys and values.
func (o *streamConn) open(
	ctx context.Context, call func(ctx context.Context) (conn.Stream, error), pairs ...string,
) error {
	ctx, cancel := context.WithCancel(metadata.AppendToOutgoingContext(ctx, append(pairs, topicKey, o.topic)...))
	stream, err := call(ctx)
	if err != nil {
		if status.Code(err) == codes.Unavailable {
			// grpc-go opens at most 805 million streams on an HTTP/2 connection, and then has no
			// ids for new streams. The existing streams continue. A new session has a new
			// connection, and so new ids.
			o.s.Close(fmt.Errorf("the session's connection accepts no more streams: %w", err))
		}
		cancel()
		return err
	}
	o.stream, o.cancel = stream, cancel
	return nil
}

func (o *streamConn) conn(cfg conn.Config) *conn.Conn {
	return conn.OverStream(o.stream, &o.s.own.turns, cfg)
}

func (o *streamConn) reset() { o.cancel() }

func (o *streamConn) tellEnds(left time.Duration) { o.s.tellEnds(o.topic, left) }

// controlOpen is an open that came by the control stream. Its conn is a Connect stream.
type controlOpen struct{ streamConn }

// ServeOpen implements tunnel.Way for the opens of the control stream: it serves the open in a new
// goroutine, for which the session waits.
func (s *edgeSession) ServeOpen(in *tunnel.Incoming, dial tunnel.DialFunc) error {
	return s.serveOpen(in.Message, &controlOpen{streamConn{s: s, topic: in.Topic}}, dial)
}

func (o *controlOpen) registered() {}

func (o *controlOpen) run(serve func()) { go serve() }

func (o *controlOpen) accept(ctx context.Context) error {
	return o.open(ctx, func(ctx context.Context) (conn.Stream, error) { return o.s.client.Connect(ctx) })
}

func (o *controlOpen) refuse(r *pb.Refused) { o.s.post(message(typeRefused, o.topic, r)) }

func (o *controlOpen) ended() { o.s.remove(o.topic) }

// dataOpen is an open that came by a data connection. Its conn uses the lease of that connection.
type dataOpen struct {
	conn.Lease
	s     *edgeSession
	data  *dataConn
	topic string

	// Owned by the goroutine that serves the data connection.
	confirmed  func() // removes the previous conn's topic, since this open confirms the end of that conn
	endAwaited bool   // the conn has ended here, and the cloud has not confirmed that it has all bytes
}

// ServeOpen implements tunnel.Way: the goroutine that reads the data connection serves the open.
func (o *dataOpen) ServeOpen(in *tunnel.Incoming, dial tunnel.DialFunc) error {
	return o.s.serveOpen(in.Message, o, dial)
}

// registered removes the topic of the previous conn, after the new open has become a topic. If it removed
// the topic before, a draining session could end in between, because it would have no topic for a moment.
func (o *dataOpen) registered() { o.confirmed() }

// run calls serve in the goroutine that reads the data connection. That goroutine has nothing else to
// do until the conn ends.
func (o *dataOpen) run(serve func()) { serve() }

func (o *dataOpen) accept(context.Context) error { return o.Accept() }

func (o *dataOpen) conn(cfg conn.Config) *conn.Conn {
	c := conn.OverLease(&o.Lease, cfg)
	o.data.waitLong()
	o.data.carries.Store(c)
	o.s.counters.ConnsOverData.Add(1)
	return c
}

func (o *dataOpen) reset() {
	o.Revoke()
	o.s.post(message(typeCancel, o.topic, nil)) // for a cloud that does not read the conn
	o.data.abort()
}

func (o *dataOpen) tellEnds(left time.Duration) { o.s.tellEnds(o.topic, left) }

func (o *dataOpen) refuse(r *pb.Refused) {
	o.data.Send(conn.FrameRefused, encode(r)) //nolint:errcheck // the reader of the data connection gets the error
}

func (o *dataOpen) ended() {
	if o.EndAwaited() {
		o.endAwaited = true // serveConns removes the topic later
		return
	}
	o.s.remove(o.topic)
}

// serving is the topic of an open request that the edge serves, from the open message to the end of
// the conn.
type serving struct{ cancel context.CancelFunc }

// Abort implements topic: it cancels the dial or the conn.
func (s *serving) Abort() { s.cancel() }

// serveOpen serves an open by way: it dials a target, and relays bytes.
func (s *edgeSession) serveOpen(m *tunnel.Message, way openWay, dial tunnel.DialFunc) error {
	r, err := s.requestOf(m)
	if err != nil {
		return fmt.Errorf("open: %w", err)
	}
	return s.serveBy(m, way, s.add, func(ctx context.Context) { s.serve(ctx, m.Topic, r, way, dial) })
}

// serveBy calls register, which makes the open m a topic of the session, and then serve. If register refuses the open,
// serveBy tells the cloud so, and does not call serve. The context of serve is done when the topic is aborted.
func (s *edgeSession) serveBy(
	m *tunnel.Message, way openWay, register func(string, topic) *tunnel.Refusal, serve func(ctx context.Context),
) error {
	if len(m.Topic) > maxTopic {
		return errTopic
	}
	ctx, cancel := context.WithCancel(tunnel.WithGraceEnd(context.Background(), s.owner.as.ends()))
	refusal := register(m.Topic, &serving{cancel})
	if refusal == nil && s.cancelledEarly(m.Topic) {
		cancel()
	}
	way.registered()
	if refusal != nil {
		cancel()
		s.refuse(way, refusal)
		return nil
	}
	way.run(func() {
		defer way.ended()
		defer cancel()
		s.guarded(func() { serve(ctx) })()
	})
	return nil
}

var errTopic = fmt.Errorf("a topic has more than %d bytes", maxTopic)

// maxNetwork bounds the name of a network in an open, such as "tcp", in bytes.
const maxNetwork = 16

// requestOf returns the request of an open.
func (s *edgeSession) requestOf(m *tunnel.Message) (tunnel.Request, error) {
	var open pb.Open
	if err := proto.Unmarshal(m.Data, &open); err != nil {
		return tunnel.Request{}, err
	}
	if len(open.GetNetwork()) > maxNetwork {
		return tunnel.Request{}, fmt.Errorf("a network has more than %d bytes", maxNetwork)
	}
	r := tunnel.Request{
		Node: s.pub.Node, Category: m.Category, Network: open.GetNetwork(),
		Addr: m.Addr, Caller: text(open.GetCaller()), Relayed: open.GetRelayed(), NoWait: open.GetNoWait(),
		ByPods: open.GetByPods(),
		Trace:  tunnel.ParseTraceContext(open.GetTraceparent(), ""),
	}
	err := s.owner.as.addressed(&r, &open)
	return r, err
}

// serve dials the target and relays bytes between the target and the conn.
func (s *edgeSession) serve(
	ctx context.Context, name string, r tunnel.Request, way openWay, dial tunnel.DialFunc,
) {
	started := time.Now()
	span := s.tracer.Child(s.owner.as.span(), r.Trace)
	if span != nil {
		r.Trace = &span.TraceContext // for the open of a relayed dial
	}
	target, late, err := s.dialTarget(ctx, r, dial)
	if err != nil {
		err = whyRefused(ctx, r, late, err)
	}
	s.endSpan(span, r, err) // before the cloud gets the answer, so that the span ends before its parent
	if err != nil {
		s.refuseDial(name, r, way, err)
		return
	}
	defer s.owner.Over()
	gone := make(chan struct{})
	c, err := s.openConn(ctx, conn.Addr(r.Caller), way, false, func() { close(gone) })
	if err != nil {
		s.log.Debug("cannot open the conn", "topic", name, "target", r.Addr, "err", err)
		tunnel.Reset(target)
		s.refuse(way, s.cannotOpen(err))
		return
	}
	stop := c.Watch(ctx)
	defer stop()
	s.counters.ConnsOpened.Add(1)
	received, sent, err := tunnel.Splice(ctx, c, target)
	<-gone
	s.logEnded(name, r.Addr, received+sent, started, err)
}

// logEnded is a function of its own, because in serve its arguments would take hundreds of bytes of stack
// for as long as the conn lives.
func (s *edgeSession) logEnded(name, target string, bytes int64, started time.Time, err error) {
	s.log.Debug("conn ended", "topic", name, "target", target, "bytes", bytes,
		"err", err, "dur", time.Since(started).Round(time.Microsecond))
}

// cannotOpen is the refusal of an open whose target was reached.
func (s *edgeSession) cannotOpen(err error) error {
	return tunnel.Refusef(tunnel.Internal, "%s reached the target and cannot open the conn: %v", s.peer(), err)
}

// openConn makes this end of a conn over way. remote is the address at the other end. asked and gone are
// [conn.Config.Asked] and [conn.Config.Gone].
func (s *edgeSession) openConn(
	ctx context.Context, remote conn.Addr, way connWay, asked bool, gone func(),
) (*conn.Conn, error) {
	if err := way.accept(ctx); err != nil {
		return nil, err
	}
	cfg := conn.Config{
		IsEdge: true, Asked: asked, Ordered: s.ordered, Blocks: s.blocks, Counters: s.counters, Traffic: &s.pub.Traffic,
		Log: s.log, Local: conn.Addr(s.pub.Node), Remote: remote,
		Ended: func(err error) {
			if err != nil {
				way.reset()
			}
		},
		Gone: gone,
	}
	if asked {
		cfg.Ends = new(tunnel.GraceEnd)
	} else if s.owner.as.ends() != nil {
		cfg.TellEnds = way.tellEnds
	}
	return way.conn(cfg), nil
}

// whyRefused returns the error that the cloud gets for a dial that has failed with err. late says that dialTimeout
// has passed.
func whyRefused(ctx context.Context, r tunnel.Request, late bool, err error) error {
	_, decided := errors.AsType[*tunnel.Refusal](err)
	switch {
	case decided:
	case ctx.Err() != nil:
		return tunnel.Refusef(tunnel.Gone, "the caller has gone")
	case late:
		return tunnel.Refusef(tunnel.Timeout, "%s did not answer within %s", r.Addr, dialTimeout)
	}
	return err
}

// refuseDial logs why a dial has failed, and tells the cloud.
func (s *edgeSession) refuseDial(name string, r tunnel.Request, way openWay, err error) {
	s.log.Debug("target refused", "topic", name, "target", r.Addr, "err", err)
	if tunnel.CodeOf(err) == tunnel.Denied {
		s.owner.as.denied(s, name, r, err)
	}
	s.refuse(way, err)
}

// dialTarget waits for room within the limits of the edge, and dials. If it returns a target, the
// caller must call Client.Over. late reports that dialTimeout has passed.
func (s *edgeSession) dialTarget(
	ctx context.Context, r tunnel.Request, dial tunnel.DialFunc,
) (target net.Conn, late bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	if refusal := s.owner.Admit(ctx, r); refusal != nil {
		return nil, false, refusal
	}
	defer func() { // deferred, because dial may panic
		s.owner.Dialled(r, errors.Join(err, ctx.Err()))
		if target == nil {
			s.owner.Over()
		}
	}()
	target, err = dial(ctx, r)
	return target, errors.Is(ctx.Err(), context.DeadlineExceeded), err
}

// refuse sends the cloud the reason why an open led to no conn.
func (s *edgeSession) refuse(way openWay, err error) {
	code, words := tunnel.CodeOf(err), err.Error()
	if r, ok := errors.AsType[*tunnel.Refusal](err); ok {
		words = r.Text
	}
	s.counters.Refuse(code)
	way.refuse(&pb.Refused{Code: pb.Code(code), Text: text(words)})
}

// refuseUnknown refuses an open for a module that this edge does not have, so that the caller does
// not wait until its timeout.
func (s *edgeSession) refuseUnknown(m *tunnel.Message, way openWay) {
	s.refuse(way, tunnel.Refusef(tunnel.Internal, "%s runs no module %q", s.peer(), m.Category))
}

// nobody handles a message on the control stream that has no handler. It refuses an open, since this edge does not
// have its module, and ignores other messages.
func (s *edgeSession) nobody(m *tunnel.Message) error {
	if m.Type == tunnel.TypeOpen {
		s.refuseUnknown(m, &controlOpen{streamConn{s: s, topic: m.Topic}})
	}
	return nil
}

// cancelTopic aborts the open or conn of a topic, because the cloud's caller has gone. It remembers
// a topic that is not known yet, see cancelledEarly.
func (s *edgeSession) cancelTopic(m *tunnel.Message) error {
	if t := s.lookup(m.Topic); t != nil {
		t.Abort()
		return nil
	}
	if len(m.Topic) > maxTopic {
		return errTopic
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.early[s.nextEarly] = m.Topic
	s.nextEarly = (s.nextEarly + 1) % len(s.early)
	return nil
}

// cancelledEarly reports whether the cancel of an open arrived before the open. The open may come
// by a data connection, while the cancel comes by the control stream.
func (s *edgeSession) cancelledEarly(topic string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Contains(s.early[:], topic)
}
