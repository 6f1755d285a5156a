package stream

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"time"

	"google.golang.org/protobuf/proto"

	"tunnel.example/tunnel/pkg/conn"
	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// DefaultConnections is how many connections a session of an edge should have at most.
const DefaultConnections = 16

const (
	// attachTries is how often an edge tries to reach the replica that has asked for a data
	// connection. A load balancer may lead a try to another replica.
	attachTries = 4
	// attachJitter is the longest wait before the edge tries again.
	attachJitter = 500 * time.Millisecond
	// attachMisses is how many failures in a row, to open a data connection that the cloud asked
	// for, make the edge pause. attachPause is how long the edge then opens no data connection.
	attachMisses = 3
	attachPause  = time.Minute
)

// moreConnections opens a data connection, at the cloud's request. If the edge may not open one, it answers with
// a refusal. A cloud of an older release ignores the refusal, because none of its opens has this topic.
func (s *edgeSession) moreConnections(m *tunnel.Message) error {
	ticket := m.Topic
	s.mu.Lock()
	refused := s.noMoreLocked()
	if refused == nil {
		s.opening++
	}
	s.mu.Unlock()
	if refused != nil {
		s.post(message(typeRefused, ticket, refused))
		return nil
	}
	s.wg.Go(func() {
		if err := s.guard(func() error { return s.serveData(ticket) }); err != nil {
			s.Close(err)
		}
	})
	return nil
}

// noMoreLocked returns the refusal of a data connection, or nil if the edge may open one now. The code
// Overloaded tells the cloud to ask again soon. The caller holds mu.
func (s *edgeSession) noMoreLocked() *pb.Refused {
	// The cloud keeps to the edge's limit of data connections. The edge allows twice as many, since
	// a data connection that has ended at the cloud may still be ending at the edge.
	most := 2 * (s.owner.cfg.Connections - 1)
	switch {
	case s.err != nil, s.leaving:
		return &pb.Refused{Code: pb.Code_CODE_DRAINING, Text: "the edge is about to disconnect"}
	case s.isNarrow():
		return &pb.Refused{Code: pb.Code_CODE_INTERNAL, Text: "the link is narrow"}
	case time.Now().Before(s.noMoreUntil):
		return &pb.Refused{Code: pb.Code_CODE_INTERNAL, Text: "the edge could not open the last data connections"}
	case len(s.data)+s.opening >= most:
		return &pb.Refused{
			Code: pb.Code_CODE_OVERLOADED, Text: fmt.Sprintf("the edge has %d data connections", len(s.data)+s.opening),
		}
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
		s.log.Log(s.ctx, level, "no data connection: conns use the session's own connection, which is slower", "err", err)
		s.post(message(typeRefused, ticket, &pb.Refused{
			Code: pb.Code_CODE_INTERNAL, Text: "the edge could not open the data connection",
		}))
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
		// At the cloud, each try takes a stranger's place of this source for a moment. Other edges behind
		// the same address share these places, and their joins must not wait for these retries.
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
	conf.NextProtos = []string{DataProtocol}
	conf.DynamicRecordSizingDisabled = true
	raw, err := s.again(ctx)
	if err != nil {
		return nil, err
	}
	carrier, _ := carry(raw, never, s.owner.cfg.Congestion)
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
		err = errors.New("the cloud's answer is malformed or late")
	}
	if err != nil {
		d.abort()
		return nil, fmt.Errorf(
			"does a load balancer between edge and cloud spread connections over several replicas? %w", err)
	}
	return d, nil
}

// never is a round trip so long that no link counts as far.
const never = time.Hour

// errNarrow ends a data connection whose conn has ended, since the link has turned out to be narrow: packets of the
// next conn would be lost again and again beside the full queue of the session's own connection.
var errNarrow = errors.New("the link is narrow")

// serveConns serves the conns of a data connection, one after the other.
func (s *edgeSession) serveConns(d *dataConn) error {
	var ended *dataOpen // the open whose conn has ended here; the cloud has not confirmed the end
	confirmed := func() {
		if ended != nil {
			s.remove(ended.topic)
			d.carries.Store(nil)
			ended = nil
		}
	}
	defer confirmed()
	for {
		typ, data, err := d.Receive(conn.MaxControlFrame)
		if err != nil {
			return err
		}
		if ended != nil && conn.IsEnd(typ, data) {
			confirmed()
			s.setInUse(d, false)
			if s.isNarrow() {
				return errNarrow
			}
			continue
		}
		var in pb.StreamMsg
		if typ != conn.FrameOpen {
			return fmt.Errorf("a frame of type %#x outside of a conn", typ)
		}
		if err = proto.Unmarshal(data, &in); err != nil {
			return fmt.Errorf("open: %w", err)
		}
		m := messageOf(&in)
		if m.Type != tunnel.TypeOpen {
			return fmt.Errorf("a message %s/%s on a data connection", text(m.Category), text(m.Type))
		}
		if !s.setInUse(d, true) {
			return errors.New("an open came by a data connection that is being closed")
		}
		o := &dataOpen{s: s, data: d, topic: m.Topic, confirmed: confirmed}
		d.LendAtEdge(&o.Lease)
		if m.Category == category {
			err = s.serveReached(m, o)
		} else {
			var known bool
			if known, err = s.handle(s.ctx, m, o); !known {
				s.refuseUnknown(m, o)
			}
		}
		confirmed()
		over := false // a conn has ended at both ends
		if o.endAwaited {
			ended = o // d carries the conn until then: the kernel may hold its last bytes for a reader that stalls
		} else {
			over = d.carries.Swap(nil) != nil
			s.setInUse(d, false)
		}
		if err != nil {
			return err
		}
		if err := o.ReturnAtEdge(); err != nil {
			return err
		}
		if over && s.isNarrow() { // after a refusal, the end could overtake it
			return errNarrow
		}
	}
}

// setInUse notes whether a data connection serves an open. It returns false if the session no longer
// has the data connection: dropUnused or the end of the session has closed it.
func (s *edgeSession) setInUse(d *dataConn, is bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	d.inUse = is
	_, held := s.data[d]
	return held
}

// dropUnused closes the idle data connections. A data connection is in use until the cloud has
// confirmed the end of the conn. Before that the kernel may hold the last bytes of a download. If
// an open is in flight to an idle data connection, the cloud sends it again on the control
// stream.
func (s *edgeSession) dropUnused() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for d := range s.data {
		if !d.inUse {
			s.dropLocked(d)
			d.abort()
		}
	}
}
