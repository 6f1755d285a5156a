package stream

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"tunnel/pkg/conn"
	pb "tunnel/pkg/stream/tunnelv1"
	"tunnel/pkg/tunnel"
)

// session is what both ends of a session share: the control stream's two loops and
// the bookkeeping of its end. Each end embeds it in its own link.
type session struct {
	// Set once.
	pub      *tunnel.Session
	log      *slog.Logger
	router   *tunnel.Router
	counters *tunnel.Counters
	blocks   *conn.Blocks
	stream   controlStream
	own      *carrier // the session's own connection
	pacer    pacer    // of the data connections
	maxConns int64
	ordered  bool                        // the peer has capabilityAbort
	budget   *bucket                     // of messages that the peer sends; nil: it may send as many as it likes
	unknown  func(*tunnel.Message) error // also told of messages without a handler
	hangUp   func() error                // closes our side of the control stream; nil: the cloud cannot

	toldDrain atomic.Bool

	outbox outbox         // to sendLoop
	leave  chan struct{}  // to sendLoop: hang up when the outbox is empty; closed by serveUntil
	done   chan struct{}  // closed when the session has ended; then err is set
	wg     sync.WaitGroup // conns and goroutines; added to only while not ended

	mu       sync.Mutex // guards the following
	err      error
	leaving  bool             // the edge is about to stop: nothing new is opened
	topics   map[string]topic // what lives inside the session; nil when it has ended
	lastGone chan struct{}    // closed when the last topic goes; nil unless somebody waits
	data     map[*dataConn]struct{}
	silent   *time.Timer // calls listen
	doubted  bool        // listen has found that nothing comes
}

// topic is what a topic stands for: an open request that waits for its answer, or a
// conn.
type topic interface {
	// Abort ends it, because its session has ended or the peer has cancelled it.
	Abort()
}

// controlStream is the part that client and server streams have in common.
type controlStream interface {
	Send(*pb.StreamMsg) error
	Recv() (*pb.StreamMsg, error)
}

var errEnded = errors.New("the session has ended")

func (s *session) init() {
	s.outbox.init()
	s.leave = make(chan struct{})
	s.done = make(chan struct{})
	s.topics = make(map[string]topic)
	s.pacer.own, s.pacer.guard = s.own, s.guarded
}

// Done implements tunnel.Link.
func (s *session) Done() <-chan struct{} { return s.done }

// Close implements tunnel.Link: it ends the session and aborts its conns.
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

// reason returns why the session has ended, nil while it lives.
func (s *session) reason() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// add registers a topic. It fails when the session has ended or is about to, or when
// it has as many conns as it may.
func (s *session) add(name string, t topic) *tunnel.Refusal {
	s.mu.Lock()
	defer s.mu.Unlock()
	if refusal := s.closedLocked(); refusal != nil {
		return refusal
	}
	switch {
	case int64(len(s.topics)) >= s.maxConns:
		s.counters.Limited(tunnel.LimitConns)
		return tunnel.Refusef(tunnel.Overloaded, "limit conns: node %s has %d conns", s.pub.Node, s.maxConns)
	case s.topics[name] != nil:
		return tunnel.Refusef(tunnel.Internal, "topic %s is in use", name)
	}
	s.topics[name] = t
	s.pub.Conns.Add(1)
	s.wg.Add(1)
	return nil
}

// closedLocked says why the session opens nothing; nil: it does. The caller holds mu.
func (s *session) closedLocked() *tunnel.Refusal {
	switch {
	case s.err != nil:
		return tunnel.Refusef(tunnel.Gone, "the session of node %s has ended", s.pub.Node)
	case s.leaving:
		return tunnel.Refusef(tunnel.Draining, "node %s is about to disconnect", s.pub.Node)
	}
	return nil
}

// lookup returns what a topic stands for, or nil.
func (s *session) lookup(name string) topic {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.topics[name]
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

// Send implements tunnel.Link. When there is no room in the outbox the peer has not
// read for longer than all its conns can explain, each with a few messages: that ends
// the session.
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

// post sends m; when the session has ended nobody needs it.
func (s *session) post(m *tunnel.Message) {
	s.Send(m) //nolint:errcheck // it ends only with the session
}

// message makes a message of category stream.
func message(typ, topic string, data proto.Message) *tunnel.Message {
	m := &tunnel.Message{Category: category, Type: typ, Topic: topic}
	if data != nil {
		m.Data = encode(data)
	}
	return m
}

// encode returns the wire form of m. Protobuf refuses strings that are not UTF-8, and a
// string may be a peer's: encode replaces its invalid bytes with "?".
func encode(m proto.Message) []byte {
	b, err := proto.Marshal(m)
	if err != nil {
		m = proto.Clone(m)
		clean(m.ProtoReflect())
		b, _ = proto.Marshal(m) // nothing else in our messages can fail
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

// flush writes all that waits in the outbox.
func (s *session) flush() error {
	for _, m := range s.outbox.take() {
		if err := s.write(m); err != nil {
			return err
		}
	}
	return nil
}

func (s *session) write(m *tunnel.Message) error { return s.stream.Send(s.onWire(m)) }

func (s *session) onWire(m *tunnel.Message) *pb.StreamMsg {
	return &pb.StreamMsg{
		Node: string(s.pub.Node), Category: m.Category, Type: m.Type,
		Topic: m.Topic, Data: m.Data, Addr: m.Addr,
	}
}

// receiveLoop gives every message to its handler until the stream ends.
func (s *session) receiveLoop(ctx context.Context) error {
	for {
		in, err := s.stream.Recv()
		if err != nil {
			return err
		}
		if s.budget != nil && !s.budget.take() {
			s.counters.Limited(tunnel.LimitMessages)
			return limitErrorf(tunnel.LimitMessages, "more than %d control messages in a second, and %d for each open", ownMessages, openMessages)
		}
		if err := s.handle(ctx, messageOf(in)); err != nil {
			return err
		}
	}
}

// handle gives a message to its handler.
func (s *session) handle(ctx context.Context, m *tunnel.Message) error {
	known, err := s.router.Handle(ctx, s.pub, m)
	if err != nil || known {
		return err
	}
	s.counters.UnknownMessages.Add(1)
	s.log.Debug("unknown message", "module", text(m.Category), "type", text(m.Type))
	return s.unknown(m)
}

func messageOf(in *pb.StreamMsg) *tunnel.Message {
	return &tunnel.Message{
		Category: in.GetCategory(), Type: in.GetType(), Topic: in.GetTopic(),
		Data: in.GetData(), Addr: in.GetAddr(),
	}
}

// guard calls f. A panic ends this session and no other.
func (s *session) guard(f func() error) error {
	return guard(s.log, s.counters, "the session ends", f)
}

// guard is tunnel.Guard.
func guard(log *slog.Logger, counters *tunnel.Counters, what string, f func() error) error {
	return tunnel.Guard(log, counters, what, f)
}

// guarded returns f under a guard. A panic ends this session and no other.
func (s *session) guarded(f func()) func() {
	return func() {
		if err := s.guard(func() error { f(); return nil }); err != nil {
			s.Close(err)
		}
	}
}

// start starts the loops. They end with the session; on the cloud not before the handler
// has returned, which frees them (wg waits).
func (s *session) start(ctx context.Context) {
	s.mu.Lock()
	if s.err == nil {
		s.silent = time.AfterFunc(lostAfter-doubtTime, s.listen)
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

// listen ends the session when nothing has come from the peer for lostAfter, by any of its
// connections: what comes proves that the peer is there, however late an answer is. Pings have it
// send something. It looks twice: when this process was stopped for a while, what has come
// meanwhile is about to be read.
func (s *session) listen() {
	s.mu.Lock()
	silence, lost := s.silenceLocked(), false
	switch {
	case s.err != nil:
	case silence < lostAfter-doubtTime:
		s.doubted = false
		s.silent.Reset(lostAfter - doubtTime - silence)
	case !s.doubted || silence < lostAfter || s.acknowledgesLocked():
		s.doubted = true
		s.silent.Reset(doubtTime)
	default:
		lost = true
	}
	s.mu.Unlock()
	if lost {
		s.Close(errSilent)
	}
}

// silenceLocked returns for how long nothing has come. The caller holds mu.
func (s *session) silenceLocked() time.Duration {
	silence := s.own.silence()
	for d := range s.data {
		if c, ok := d.raw.(*carrier); ok {
			silence = min(silence, c.silence())
		}
	}
	return silence
}

// acknowledgesLocked reports whether bytes are on their way to the peer, and its kernel
// acknowledges them: what is to be answered may be behind 15 s of them. A peer that hangs is
// noticed by gRPC's pings. The caller holds mu.
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

var errSilent = fmt.Errorf("nothing has come from the other side for %s", lostAfter)

// drain tells the peer that this side is about to stop, unless it has been told, and
// returns when the last conn has ended, the session has, or ctx is done.
func (s *session) drain(ctx context.Context) {
	s.tellDrain(false)
	select {
	case <-s.idle():
	case <-s.done:
	case <-ctx.Done():
	}
}

// tellDrain tells the peer, once, that this side is about to stop; elsewhere says that
// other replicas go on.
func (s *session) tellDrain(elsewhere bool) {
	if !s.toldDrain.Swap(true) {
		s.post(message(typeDrain, "", &pb.Drain{GraceSeconds: uint32(tunnel.GracePeriod.Seconds()), Elsewhere: elsewhere}))
	}
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

// text makes a string fit for protobuf and for logs: valid UTF-8, of bounded length.
func text(s string) string {
	const longest = 512 // bytes; a sentence
	if len(s) > longest {
		s = s[:longest]
	}
	return strings.ToValidUTF8(s, "?")
}

// isClosed reports whether c is closed.
func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}
