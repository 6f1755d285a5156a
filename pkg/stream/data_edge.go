package stream

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"tunnel/pkg/conn"
	pb "tunnel/pkg/stream/tunnelv1"
	"tunnel/pkg/tunnel"
)

// DefaultConnections is how many connections a session of an edge should have at most.
const DefaultConnections = 16

const (
	// attachTries is how often an edge tries to reach the replica that has asked for a data
	// connection. A load balancer may lead to other replicas.
	attachTries = 4
	// attachJitter is the longest wait before the edge tries again.
	attachJitter = 500 * time.Millisecond
	// attachMisses is after how many failed requests of the cloud the edge pauses. attachPause is
	// how long the edge then opens no data connection.
	attachMisses = 3
	attachPause  = time.Minute
)

// moreConnections opens a data connection, at the cloud's request.
func (s *edgeSession) moreConnections(m *tunnel.Message) error {
	s.mu.Lock()
	// The cloud keeps to the edge's limit. The edge allows twice as many, since a data connection
	// that has ended at the cloud may still be ending here.
	most := 2 * (s.owner.cfg.Connections - 1)
	more := s.err == nil && !s.leaving && !s.isNarrow() && len(s.data)+s.opening < most && !time.Now().Before(s.noMoreUntil)
	if more {
		s.opening++
	}
	s.mu.Unlock()
	if more {
		s.wg.Go(func() {
			if err := s.guard(func() error { return s.serveData(m.Topic) }); err != nil {
				s.Close(err)
			}
		})
	}
	return nil
}

// serveData opens a data connection and serves it until it ends. It logs failures and returns
// nil. Only a panic becomes an error at the caller, and ends the session.
func (s *edgeSession) serveData(ticket string) error {
	d, err := s.openData(ticket)
	s.mu.Lock()
	s.opening--
	pause := false
	switch now := time.Now(); {
	case err == nil:
		s.misses = 0
	case s.err == nil && now.After(s.noMoreUntil):
		if s.misses++; s.misses == attachMisses {
			pause = true
			s.misses, s.noMoreUntil = 0, now.Add(attachPause)
		}
	}
	s.mu.Unlock()
	if err != nil {
		level := slog.LevelDebug
		if pause {
			level = slog.LevelInfo
		}
		s.log.Log(s.ctx, level, "no data connection: conns go by the session's own, which is slower", "err", err)
		return nil
	}
	defer s.drop(d)
	s.counters.DataOpened.Add(1)
	err = s.serveConns(d)
	s.log.Debug("data connection ended", "err", err)
	return nil
}

// openData opens a data connection to the replica of the session.
func (s *edgeSession) openData(ticket string) (d *dataConn, err error) {
	ctx, cancel := context.WithTimeout(s.ctx, joinTimeout)
	defer cancel()
	for range attachTries {
		if d, err = s.tryData(ctx, ticket); err == nil || ctx.Err() != nil {
			break
		}
		// All edges behind one address share one source. Their joins must not wait for these
		// retries.
		select {
		case <-time.After(rand.N(attachJitter)): //nolint:gosec // jitter
		case <-ctx.Done():
		}
	}
	if err != nil {
		return nil, err
	}
	if !s.hold(d) {
		d.abort()
		return nil, errEnded
	}
	return d, nil
}

// tryData makes one attempt of openData.
func (s *edgeSession) tryData(ctx context.Context, ticket string) (*dataConn, error) {
	conf, _, err := s.owner.tlsConfig()
	if err != nil {
		return nil, err
	}
	conf.NextProtos = []string{dataProtocol}
	conf.DynamicRecordSizingDisabled = true
	raw, err := dialCloud(ctx, s.owner.cfg.Dial, s.remote)
	if err != nil {
		return nil, err
	}
	carrier, _ := carry(raw, never)
	carrier.alone()
	raw = carrier
	stop := context.AfterFunc(ctx, func() { raw.Close() })
	defer stop()
	c := tls.Client(raw, conf)
	if err = c.HandshakeContext(ctx); err != nil {
		raw.Close()
		return nil, err
	}
	d := newDataConn(c, raw, s.blocks)
	err = d.Send(conn.FrameAttach, []byte(ticket))
	var typ byte
	if err == nil {
		typ, _, err = d.Receive(0)
	}
	if err == nil && (typ != conn.FrameAttach || !stop()) {
		err = errors.New("the cloud's answer makes no sense, or comes late")
	}
	if err != nil {
		d.abort()
		return nil, fmt.Errorf("is there something between edge and cloud that leads connections to several replicas? %w", err)
	}
	return d, nil
}

// never is a round trip so long that no link counts as far.
const never = time.Hour

// edgeLease is the edge's lease of a data connection, for one open that came by the data
// connection and for the conn of that open.
type edgeLease struct {
	conn.Lease
	data *dataConn

	// Owned by the goroutine that serves the data connection.
	topic      string
	settle     func() // releases the previous topic, which is no longer needed
	endAwaited bool   // the conn has ended here, and the cloud has not confirmed that it has all of it
}

// serveConns serves the conns of a data connection, one after the other.
func (s *edgeSession) serveConns(d *dataConn) error {
	var ended *edgeLease // the lease whose end the cloud has not confirmed yet
	said := func() {
		if ended != nil {
			s.left(ended)
			s.remove(ended.topic)
			ended = nil
		}
	}
	defer said()
	for {
		typ, data, err := d.Receive(conn.MaxControlFrame)
		if err != nil {
			return err
		}
		if ended != nil && conn.IsEnd(typ, data) {
			said()
			continue
		}
		var in pb.StreamMsg
		if typ != conn.FrameOpen {
			return fmt.Errorf("a frame of type %#x where there is no conn", typ)
		}
		if err = proto.Unmarshal(data, &in); err != nil {
			return fmt.Errorf("open: %w", err)
		}
		m := messageOf(&in)
		if m.Type != tunnel.TypeOpen {
			return fmt.Errorf("%s/%s came by a data connection", text(m.Category), text(m.Type))
		}
		by := &edgeLease{data: d, topic: m.Topic, settle: said}
		d.LendAtEdge(&by.Lease)
		if !s.came(m.Topic, by) {
			return fmt.Errorf("topic %s is in use, or the connection is not", text(m.Topic))
		}
		known, err := s.handle(s.ctx, m, s)
		if !known {
			err = s.nobody(m)
		}
		said()
		d.carries.Store(nil)
		if by.endAwaited {
			ended = by
		} else {
			s.left(by)
		}
		if err != nil {
			return err
		}
		if err := by.ReturnAtEdge(); err != nil {
			return err
		}
	}
}

// came records by which data connection an open came. It returns false if the topic is in use or
// the session no longer has the data connection.
func (s *edgeSession) came(topic string, by *edgeLease) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.by == nil {
		s.by = make(map[string]*edgeLease)
	}
	if _, held := s.data[by.data]; !held || s.by[topic] != nil {
		return false
	}
	s.by[topic] = by
	return true
}

// left undoes came.
func (s *edgeSession) left(by *edgeLease) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.by, by.topic)
}

// dropUnused closes the idle data connections. A data connection is in use until the cloud has
// confirmed the end of the conn. Before that the kernel may hold the last bytes of a download. If
// an open is in flight to an idle data connection, the cloud sends it again on the control
// stream.
func (s *edgeSession) dropUnused() {
	s.mu.Lock()
	defer s.mu.Unlock()
	busy := make(map[*dataConn]bool)
	for _, by := range s.by {
		busy[by.data] = true
	}
	for d := range s.data {
		if !busy[d] {
			s.dropLocked(d)
			d.abort()
		}
	}
}

// leaseOf returns the lease of the data connection by which an open came. It returns nil if the
// open came by the control stream.
func (s *edgeSession) leaseOf(topic string) *edgeLease {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.by[topic]
}

// wayBack is how the edge answers an open whose target it has reached. The conn is made from it.
type wayBack struct {
	stream conn.Stream // nil: the conn uses a data connection
	lease  *edgeLease  // nil: the conn uses a stream
	reset  func()      // resets the conn
}

// conn makes the edge's end of the conn.
func (w wayBack) conn(s *edgeSession, cfg conn.Config) *conn.Conn {
	if w.lease == nil {
		return conn.OverStream(w.stream, &s.own.turns, cfg)
	}
	c := conn.OverLease(&w.lease.Lease, cfg)
	w.lease.data.carries.Store(c)
	s.counters.ConnsOverData.Add(1)
	return c
}

// answer tells the cloud that the target of an open is there.
func (s *edgeSession) answer(ctx context.Context, name string) (wayBack, error) {
	by := s.leaseOf(name)
	if by == nil {
		sctx, end := context.WithCancel(ctx)
		stream, err := s.client.Connect(metadata.AppendToOutgoingContext(sctx, topicKey, name))
		if err != nil {
			if status.Code(err) == codes.Unavailable {
				// After 805 million streams an HTTP/2 connection has no ids for new streams. Its
				// existing streams go on. A new session has new ids.
				s.Close(fmt.Errorf("the session's connection takes no more streams: %w", err))
			}
			end()
			return wayBack{}, err
		}
		return wayBack{stream: stream, reset: end}, nil
	}
	if err := by.Accept(); err != nil {
		return wayBack{}, err
	}
	return wayBack{lease: by, reset: func() {
		by.Revoke()
		s.post(message(typeCancel, name, nil)) // for a cloud that does not read the conn
		by.data.abort()
	}}, nil
}
