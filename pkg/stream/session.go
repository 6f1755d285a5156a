package stream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"tunnel.example/tunnel/pkg/conn"
	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// session is the part of a session that both ends share: the two loops of the control stream, and the
// bookkeeping of the session's end. cloudSession and edgeSession embed it.
type session struct {
	// Set once.
	pub      *tunnel.Session // the session as the directory and the handlers see it
	log      *slog.Logger
	router   *tunnel.Router // the handlers of received messages
	counters *tunnel.Counters
	tracer   *tunnel.Tracer // nil: off
	blocks   *conn.Blocks
	stream   controlStream               // the control stream
	own      *carrier                    // the session's own connection
	pacer    pacer                       // slows down the data connections
	maxConns int64                       // most topics at once
	ordered  bool                        // the peer has capabilityAbort
	budget   *bucket                     // limits the messages that the peer sends; nil: no limit
	way      tunnel.Way                  // serves the opens on the control stream; nil at the server's end: it gets none
	unknown  func(*tunnel.Message) error // called with each message on the control stream that has no handler
	hangUp   func() error                // closes our side of the control stream; nil: the cloud cannot close its side

	toldDrain atomic.Bool // the peer was told that this side is about to stop

	outbox outbox         // sendLoop writes its messages
	leave  chan struct{}  // serveUntil closes it; sendLoop then sends the rest of the outbox and calls hangUp
	done   chan struct{}  // Close closes it when the session ends; err is then set
	wg     sync.WaitGroup // conns and goroutines; add counts a conn only before the session has ended

	mu       sync.Mutex             // guards the following
	err      error                  // why the session has ended; nil while it lives
	leaving  bool                   // the edge takes no new conns: it was drained, or is about to stop
	topics   map[string]topic       // open requests and conns, by name; nil when the session has ended
	lastGone chan struct{}          // closed when the last topic goes; nil unless a caller of idle waits
	data     map[*dataConn]struct{} // data connections; nil when the session has ended
	silent   *time.Timer            // calls watchSilence
	doubted  bool                   // watchSilence has found the peer silent, and will look once more
}

// topic is an open request that waits for its answer, or a conn.
type topic interface {
	// Abort ends the topic, because the session has ended or the peer has cancelled the conn.
	Abort()
}

// controlStream has the methods that client and server streams share.
type controlStream interface {
	Send(*pb.StreamMsg) error
	Recv() (*pb.StreamMsg, error)
}

// errEnded is the reason of a session that was closed without one.
var errEnded = errors.New("the session has ended")

// init makes the channels and the map. Each end calls it once it has set own.
func (s *session) init() {
	s.outbox.init()
	s.leave = make(chan struct{})
	s.done = make(chan struct{})
	s.topics = make(map[string]topic)
	s.pacer.own, s.pacer.guard = s.own, s.guarded
}

// Done implements tunnel.Link.
func (s *session) Done() <-chan struct{} { return s.done }

// Close implements tunnel.Link. It ends the session and aborts its conns. Only the first call has
// an effect.
func (s *session) Close(reason error) {
	if reason == nil {
		reason = errEnded
	}
	s.mu.Lock()
	if s.err != nil {
		s.mu.Unlock()
		return
	}
	s.err = reason
	close(s.done)
	topics, data := s.topics, s.data
	s.topics, s.data = nil, nil
	if s.silent != nil {
		s.silent.Stop()
	}
	s.mu.Unlock()
	for _, t := range topics {
		t.Abort()
	}
	for d := range data {
		d.abort()
		s.counters.DataLive.Add(-1)
	}
}

// reason returns why the session has ended. It returns nil while the session lives.
func (s *session) reason() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// add registers a topic as register does, but fails if the edge takes no new conns.
func (s *session) add(name string, t topic) *tunnel.Refusal {
	s.mu.Lock()
	defer s.mu.Unlock()
	if refusal := s.closedLocked(); refusal != nil {
		return refusal
	}
	return s.registerLocked(name, t)
}

// register registers a topic. It fails when the session has ended, or when the session has maxConns topics.
func (s *session) register(name string, t topic) *tunnel.Refusal {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.registerLocked(name, t)
}

// registerSecond registers a second topic of a conn, which has a place among the maxConns topics already.
func (s *session) registerSecond(name string, t topic) *tunnel.Refusal {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.registerBelowLocked(name, t, math.MaxInt64)
}

// registerLocked is register for a caller that holds mu.
func (s *session) registerLocked(name string, t topic) *tunnel.Refusal {
	return s.registerBelowLocked(name, t, s.maxConns)
}

// registerBelowLocked is registerLocked with another limit than maxConns.
func (s *session) registerBelowLocked(name string, t topic, most int64) *tunnel.Refusal {
	switch {
	case s.err != nil:
		return s.endedRefusal()
	case int64(len(s.topics)) >= most:
		s.counters.Limited(tunnel.LimitConns)
		return tunnel.Refusef(tunnel.Overloaded, "limit conns: %s has %d conns", s.peer(), s.maxConns)
	case s.topics[name] != nil:
		return tunnel.Refusef(tunnel.Internal, "topic %s is in use", name)
	}
	s.topics[name] = t
	s.pub.Conns.Add(1)
	s.wg.Add(1)
	return nil
}

// endedRefusal says that the session has ended.
func (s *session) endedRefusal() *tunnel.Refusal {
	return tunnel.Refusef(tunnel.Gone, "the session of %s has ended", s.peer())
}

// peer names the other end in refusals.
func (s *session) peer() string {
	if s.pub.Node == "" {
		return "another replica"
	}
	return "node " + string(s.pub.Node)
}

// closedLocked says why the edge takes no new conns. nil means that it takes them. The caller holds mu.
func (s *session) closedLocked() *tunnel.Refusal {
	switch {
	case s.err != nil:
		return s.endedRefusal()
	case s.leaving:
		return tunnel.Refusef(tunnel.Draining, "%s is about to disconnect", s.peer())
	}
	return nil
}

// lookup returns the topic with this name, or nil.
func (s *session) lookup(name string) topic {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.topics[name]
}

// replace makes t the topic of a name that was added. If the session has ended, replace aborts t.
func (s *session) replace(name string, t topic) {
	s.mu.Lock()
	ended := s.err != nil
	if !ended {
		s.topics[name] = t
	}
	s.mu.Unlock()
	if ended {
		t.Abort()
	}
}

// remove undoes add.
func (s *session) remove(name string) {
	s.mu.Lock()
	delete(s.topics, name)
	if s.pub.Conns.Add(-1) == 0 && s.lastGone != nil {
		close(s.lastGone)
		s.lastGone = nil
	}
	s.mu.Unlock()
	s.wg.Done()
}

// Send implements tunnel.Link. A full outbox ends the session. The limit allows a few messages for
// each conn, so a full outbox means that the peer does not read its control stream.
func (s *session) Send(m *tunnel.Message) error {
	if err := s.reason(); err != nil {
		return err
	}
	if s.outbox.put(m, outboxSize+outboxPerConn*int(s.maxConns)) {
		return nil
	}
	s.counters.Limited(tunnel.LimitOutbox)
	s.Close(limitErrorf(tunnel.LimitOutbox, "the other side does not read its control stream"))
	return s.reason()
}

// post sends m. It ignores the error: after the end of the session, no peer needs m.
func (s *session) post(m *tunnel.Message) {
	s.Send(m) //nolint:errcheck // Send fails only when the session has ended
}

// message makes a message of category stream.
func message(typ, topic string, data proto.Message) *tunnel.Message {
	m := &tunnel.Message{Category: category, Type: typ, Topic: topic}
	if data != nil {
		m.Data = encode(data)
	}
	return m
}

// encode returns the wire form of m. Protobuf refuses strings that are not UTF-8, and a string may
// come from a peer. encode replaces invalid bytes with "?".
func encode(m proto.Message) []byte {
	b, err := proto.Marshal(m)
	if err != nil {
		m = proto.Clone(m)
		clean(m.ProtoReflect())
		b, _ = proto.Marshal(m) // valid strings leave no other cause of failure in our messages
	}
	return b
}

// clean makes every string of m valid UTF-8. Our messages have no maps.
func clean(m protoreflect.Message) {
	valid := func(v protoreflect.Value) protoreflect.Value {
		return protoreflect.ValueOfString(strings.ToValidUTF8(v.String(), "?"))
	}
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case f.IsList():
			for i := range v.List().Len() {
				switch f.Kind() {
				case protoreflect.StringKind:
					v.List().Set(i, valid(v.List().Get(i)))
				case protoreflect.MessageKind:
					clean(v.List().Get(i).Message())
				}
			}
		case f.Kind() == protoreflect.StringKind:
			m.Set(f, valid(v))
		case f.Kind() == protoreflect.MessageKind:
			clean(v.Message())
		}
		return true
	})
}

// sendLoop writes the outbox to the control stream until the session ends.
func (s *session) sendLoop() error {
	for {
		select {
		case <-s.outbox.wake:
			if err := s.flush(); err != nil {
				return err
			}
		case <-s.leave:
			if err := s.flush(); err != nil {
				return err
			}
			return s.hangUp()
		case <-s.done:
			return nil
		}
	}
}

// flush writes every message of the outbox. When gRPC has ended the stream, a write fails without the
// reason, and receiveLoop gets the reason. So flush gives receiveLoop a second to end the session.
func (s *session) flush() error {
	for _, m := range s.outbox.take() {
		if err := s.write(m); err != nil {
			select {
			case <-s.done:
			case <-time.After(time.Second):
			}
			return err
		}
	}
	return nil
}

func (s *session) write(m *tunnel.Message) error { return s.stream.Send(s.onWire(m)) }

// onWire returns m in its protobuf form, with the session's node.
func (s *session) onWire(m *tunnel.Message) *pb.StreamMsg {
	return &pb.StreamMsg{
		Node: string(s.pub.Node), Category: m.Category, Type: m.Type,
		Topic: m.Topic, Data: m.Data, Addr: m.Addr,
	}
}

// receiveLoop gives every message to its handler until the stream ends. A message above the budget
// ends the session.
func (s *session) receiveLoop(ctx context.Context) error {
	for {
		in, err := s.stream.Recv()
		if err != nil {
			return err
		}
		if s.budget != nil && !s.budget.take() {
			s.counters.Limited(tunnel.LimitMessages)
			return limitErrorf(tunnel.LimitMessages,
				"more than %d control messages in a second, and %d for each open", ownMessages, openMessages)
		}
		m := messageOf(in)
		known, err := s.handle(ctx, m, s.way)
		if !known {
			err = s.unknown(m)
		}
		if err != nil {
			return err
		}
	}
}

// handle gives a message to its handler. way is the way that the message came, if it may be an open.
// A message without a handler is counted.
func (s *session) handle(ctx context.Context, m *tunnel.Message, way tunnel.Way) (known bool, err error) {
	known, err = s.router.Handle(ctx, &tunnel.Incoming{Message: m, From: s.pub, Way: way})
	if !known {
		s.counters.UnknownMessages.Add(1)
		s.log.Debug("unknown message", "category", text(m.Category), "type", text(m.Type))
	}
	return known, err
}

// end is one end of a session: a cloudSession or an edgeSession.
type end interface {
	tunnel.Link
	// invalid returns the error that ends the session after a message that is not valid.
	invalid(err error) error
}

// handler makes a Handler from a method of S, the type of one end. The Handler may only be used for
// sessions whose end is an S.
func handler[S end](method func(S, *tunnel.Message) error) tunnel.Handler {
	return func(_ context.Context, in *tunnel.Incoming) error {
		s := in.From.Link.(S) //nolint:forcetypeassert // every session that uses this router has an S as its end
		if err := method(s, in.Message); err != nil {
			return s.invalid(err)
		}
		return nil
	}
}

// invalid implements end.
func (s *session) invalid(err error) error { return err }

// messageOf returns a received message as a tunnel.Message.
func messageOf(in *pb.StreamMsg) *tunnel.Message {
	return &tunnel.Message{
		Category: in.GetCategory(), Type: in.GetType(), Topic: in.GetTopic(),
		Data: in.GetData(), Addr: in.GetAddr(),
	}
}

// guard calls f. A panic ends this session, and no other.
func (s *session) guard(f func() error) error {
	return tunnel.Guard(s.log, s.counters, "the session ends", f)
}

// guarded returns f under a guard. A panic ends this session, and no other.
func (s *session) guarded(f func()) func() {
	return func() {
		if err := s.guard(func() error { f(); return nil }); err != nil {
			s.Close(err)
		}
	}
}

// start starts the two loops. They end with the session. On the cloud, a blocked Recv or Send may
// return only after the handler has returned. wg waits for both loops.
func (s *session) start(ctx context.Context) {
	s.mu.Lock()
	if s.err == nil {
		s.silent = time.AfterFunc(lostAfter-doubtTime, s.watchSilence)
	}
	s.mu.Unlock()
	for _, loop := range []func() error{
		s.sendLoop,
		func() error { return s.receiveLoop(ctx) },
	} {
		s.wg.Go(func() {
			if err := s.guard(loop); err != nil {
				s.Close(err)
			}
		})
	}
}

// watchSilence ends the session when no byte has come from the peer on any connection for lostAfter, or
// multipathLost. Any received byte proves that the peer lives, however late an answer is. Pings make the
// peer send. watchSilence looks twice before it ends the session: after a pause of this process, bytes that
// came meanwhile have yet to be read. A peer whose kernel still acknowledges bytes does not count as silent.
// So from lostAfter on, watchSilence looks every quarter of doubtTime, to notice the end of acknowledgements.
func (s *session) watchSilence() {
	s.mu.Lock()
	silence, limit, lost := s.silenceLocked(), s.own.lost(), false
	switch {
	case s.err != nil:
	case silence < limit-doubtTime:
		s.doubted = false
		s.silent.Reset(limit - doubtTime - silence)
	case !s.doubted:
		s.doubted = true
		s.silent.Reset(doubtTime)
	case silence < limit || s.acknowledgesLocked():
		s.silent.Reset(doubtTime / 4)
	default:
		lost = true
	}
	s.mu.Unlock()
	if lost {
		s.Close(errSilent(limit))
	}
}

// silenceLocked returns for how long nothing has come on any connection. The caller holds mu.
func (s *session) silenceLocked() time.Duration {
	silence := s.own.silence()
	for d := range s.data {
		if c, ok := d.raw.(*carrier); ok {
			silence = min(silence, c.silence())
		}
	}
	return silence
}

// acknowledgesLocked reports whether bytes are on their way to the peer and the peer's kernel
// acknowledges them. A ping or heartbeat that the peer must answer may wait behind 15 s of such
// bytes, so the silence of such a peer proves nothing. gRPC's pings detect a peer that hangs. The
// caller holds mu.
func (s *session) acknowledgesLocked() bool {
	if s.own.acknowledges() {
		return true
	}
	for d := range s.data {
		if c, ok := d.raw.(*carrier); ok && c.acknowledges() {
			return true
		}
	}
	return false
}

// errSilent returns the error that ends a session because its peer has been silent for d.
func errSilent(d time.Duration) error { return fmt.Errorf("no byte from the other side for %s", d) }

// drain tells the peer, unless it was told before, that this side is about to stop. drain returns
// when the last conn has ended, the session has ended, or ctx is done.
func (s *session) drain(ctx context.Context, grace time.Duration) {
	s.tellDrain(false, grace)
	select {
	case <-s.idle():
	case <-s.done:
	case <-ctx.Done():
	}
}

// tellDrain tells the peer once that this side is about to stop. Conns may continue for grace. The message says a
// second at least, since 0 means that this side does not stop. elsewhere: other replicas continue.
func (s *session) tellDrain(elsewhere bool, grace time.Duration) {
	if !s.toldDrain.Swap(true) {
		seconds := uint32(max(grace.Round(time.Second), time.Second).Seconds()) //nolint:gosec // a grace period
		s.post(message(typeDrain, "", &pb.Drain{GraceSeconds: seconds, Elsewhere: elsewhere}))
	}
}

// tellEnds tells the peer, which has asked for a conn, that the conn is reset after left.
func (s *session) tellEnds(topic string, left time.Duration) {
	ms := uint32(max(left, 0).Milliseconds()) //nolint:gosec // a grace period
	s.post(message(typeEnds, topic, &pb.Ends{LeftMs: ms}))
}

// connEnds handles the peer's message that a conn, for which this side has asked, is about to be reset.
func (s *session) connEnds(m *tunnel.Message) error {
	var e pb.Ends
	if err := proto.Unmarshal(m.Data, &e); err != nil {
		return fmt.Errorf("ends: %w", err)
	}
	if c, ok := s.lookup(m.Topic).(*conn.Conn); ok && c.Ends() != nil {
		c.Ends().Begin(min(time.Duration(e.GetLeftMs())*time.Millisecond, tunnel.GracePeriod))
	}
	return nil
}

// idle returns a channel that is closed when no conn is left.
func (s *session) idle() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lastGone == nil {
		s.lastGone = make(chan struct{})
	}
	gone := s.lastGone
	if s.pub.Conns.Load() == 0 {
		close(s.lastGone)
		s.lastGone = nil
	}
	return gone
}

// text makes a string of the peer safe for messages, logs and an operator's terminal. It replaces unprintable
// characters by question marks, and cuts the string off after 512 bytes.
func text(s string) string {
	const longest = 512 // bytes, about a sentence
	if len(s) > longest {
		s = strings.Clone(s[:longest]) // else the whole text would stay in memory
	}
	return tunnel.Printable(s)
}
