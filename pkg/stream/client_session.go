package stream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"

	"tunnel/pkg/conn"
	pb "tunnel/pkg/stream/tunnelv1"
	"tunnel/pkg/tunnel"
)

// edgeSession is the edge's end of a session.
type edgeSession struct {
	session
	client       pb.StreamClient
	certificates pb.CertificatesClient   // on the same connection
	abandon      context.CancelCauseFunc // ends the control stream

	owner          *Client
	ctx            context.Context // of the control stream
	remote         string          // the remote address of the session's connection
	remoteInstance string          // of the replica at the other end; "" if the cloud has only one

	// Guarded by session.mu.
	beats       []time.Time           // send times of the heartbeats without an echo, the oldest first
	opening     int                   // number of data connections that are being opened
	misses      int                   // failed attempts in a row to open a data connection
	noMoreUntil time.Time             // until then the edge opens no data connection
	early       [64]string            // ring buffer: topics of the last cancels that found no open
	nextEarly   int                   // index in early of the next topic
	by          map[string]*edgeLease // leases by topic of opens by data connection, until the cloud has all bytes
}

var _ end = (*edgeSession)(nil)

// serveUntil serves the session until the session ends. When ctx is done, the session drains: the
// edge sends drain, and conns may continue until sctx is done. Then the edge closes its side of
// the stream. The cloud closes its side when it has received every message.
func (s *edgeSession) serveUntil(ctx, sctx context.Context) error {
	stop := context.AfterFunc(ctx, func() {
		s.mu.Lock()
		s.leaving = true
		s.mu.Unlock()
		s.drain(sctx)
		close(s.leave)
		select {
		case <-s.done:
		case <-time.After(leaveTimeout):
		case <-sctx.Done():
		}
		s.Close(errStopping)
	})
	s.wg.Go(s.guarded(s.beat))
	s.start(sctx)
	<-s.done
	err := s.reason()
	if !stop() && errors.Is(err, io.EOF) {
		err = errStopping // the cloud closed its side after the edge
	}
	s.abandon(err)
	return err
}

// errCloudStops ends a session that is idle after the cloud has sent drain.
var errCloudStops = errors.New("the cloud is stopping")

// errStopping ends the sessions of an edge that stops.
var errStopping = errors.New("this edge is stopping")

// beat sends heartbeats until the session ends: every heartbeatInterval, and when nothing was
// received for heartbeatSilence. It does not wait for the echo: over a slow link the echo may take
// longer than the cloud waits for the next heartbeat.
//
// If a heartbeat has no echo after stuckAfter, beat checks once more, then ends the session.
// Every heartbeatInterval beat drops lost data connections, and idle ones on a narrow link.
func (s *edgeSession) beat() {
	stuck := false
	tend := time.Now() // when the next regular heartbeat and check of data connections are due
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-timer.C:
		case <-s.done:
			return
		}
		now := time.Now()
		s.mu.Lock()
		if len(s.beats) > 0 && now.Sub(s.beats[0]) >= stuckAfter {
			s.mu.Unlock()
			if stuck {
				s.Close(fmt.Errorf("the cloud has not answered a heartbeat for %s", stuckAfter))
				return
			}
			stuck = true // checks once more after doubtTime, as listen does
			timer.Reset(doubtTime)
			continue
		}
		stuck = false
		due := !tend.After(now)
		silent := s.silenceLocked()
		beats := due || silent >= heartbeatSilence
		if beats {
			s.beats = append(s.beats, now)
		}
		s.mu.Unlock()
		if due {
			tend = now.Add(heartbeatInterval)
			s.dropLost()
			if s.isNarrow() {
				s.dropUnused()
			}
		}
		if beats {
			s.post(message(typeHeartbeat, "", &pb.Heartbeat{Sent: now.UnixNano(), RoundTrip: s.pub.RTT.Load()}))
		}
		next := heartbeatSilence - silent
		if next <= 0 {
			next = heartbeatSilence
		}
		timer.Reset(min(next, tend.Sub(now)))
	}
}

// heartbeat handles the echo of a heartbeat and stores the round trip. Echoes arrive in order, so
// the earlier heartbeats are answered, too.
func (s *edgeSession) heartbeat(m *tunnel.Message) error {
	var h pb.Heartbeat
	if err := proto.Unmarshal(m.Data, &h); err != nil {
		return fmt.Errorf("heartbeat: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	at := slices.IndexFunc(s.beats, func(sent time.Time) bool { return sent.UnixNano() == h.GetSent() })
	if at >= 0 {
		s.pub.RTT.Store(int64(time.Since(s.beats[at])))
		s.beats = slices.Delete(s.beats, 0, at+1)
	}
	return nil
}

// cloudLeaves handles the drain of a cloud that is about to stop. The edge ends the session when no
// conn is left, because only the edge knows when the targets have received every byte. Until then
// the edge serves further opens. If there are other replicas, the edge first waits for a session
// with another replica, and then for overlap.
func (s *edgeSession) cloudLeaves(m *tunnel.Message) error {
	var d pb.Drain
	if err := proto.Unmarshal(m.Data, &d); err != nil {
		return fmt.Errorf("drain: %w", err)
	}
	s.log.Info("cloud is about to stop", "dur", time.Duration(d.GetGraceSeconds())*time.Second)
	s.wg.Go(s.guarded(func() {
		if d.GetElsewhere() {
			s.owner.moves(s)
			select {
			case <-time.After(overlap):
			case <-s.done:
			}
		}
		gone := s.idle()
		select {
		case <-gone:
			s.Close(errCloudStops)
		case <-s.done:
		}
	}))
	return nil
}

// cloudReplicas handles the list of the cloud's replicas.
func (s *edgeSession) cloudReplicas(m *tunnel.Message) error {
	var r pb.Replicas
	if err := proto.Unmarshal(m.Data, &r); err != nil {
		return fmt.Errorf("replicas: %w", err)
	}
	if len(r.GetInstances()) > maxReplicas {
		return fmt.Errorf("replicas: %d of them; %d are allowed", len(r.GetInstances()), maxReplicas)
	}
	s.owner.know(r.GetInstances())
	return nil
}

// serving is an open request that the edge serves, from the open message to the end of the conn.
type serving struct{ cancel context.CancelFunc }

// Abort implements topic: it cancels the dial or the conn.
func (s *serving) Abort() { s.cancel() }

// cancelTopic aborts the open or conn of a topic, because the cloud's caller has gone. It remembers
// a topic that is not known yet, see cancelledEarly.
func (s *edgeSession) cancelTopic(m *tunnel.Message) error {
	if t := s.lookup(m.Topic); t != nil {
		t.Abort()
		return nil
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

// ServeOpen implements tunnel.Way: it serves the open in a goroutine of the session. If the open
// came by a data connection, the goroutine that reads that connection serves it.
func (s *edgeSession) ServeOpen(m *tunnel.Incoming, dial tunnel.DialFunc) error {
	var open pb.Open
	if err := proto.Unmarshal(m.Data, &open); err != nil {
		return fmt.Errorf("open: %w", err)
	}
	r := tunnel.Request{
		Node: s.pub.Node, Category: m.Category, Network: open.GetNetwork(),
		Addr: m.Addr, Caller: text(open.GetCaller()), Relayed: open.GetRelayed(), NoWait: open.GetNoWait(),
	}
	if m.Category == categoryRelay {
		node, err := tunnel.ParseNodeName(open.GetNode())
		if err != nil {
			return fmt.Errorf("open: %w", err)
		}
		r.Node, r.Category, r.Relayed = node, open.GetCategory(), true
	}
	ctx, cancel := context.WithCancel(context.Background())
	refusal := s.add(m.Topic, &serving{cancel})
	if refusal == nil && s.cancelledEarly(m.Topic) {
		cancel()
	}
	by := s.leaseOf(m.Topic)
	if by != nil {
		by.settle() // after add: a draining session ends when its last topic is removed
	}
	if refusal != nil {
		cancel()
		s.refuse(m.Topic, refusal)
		return nil
	}
	serve := func() {
		defer func() {
			if by != nil && by.EndAwaited() {
				by.endAwaited = true // serveConns removes the topic later
				return
			}
			s.remove(m.Topic)
		}()
		defer cancel()
		if err := s.guard(func() error { return s.serve(ctx, m.Topic, r, dial) }); err != nil {
			s.Close(err)
		}
	}
	if by != nil {
		serve() // the goroutine that reads the data connection is idle until the conn ends
	} else {
		go serve()
	}
	return nil
}

// nobody refuses an open request for a module that this edge does not have, so that the caller does
// not wait until its timeout. It ignores other unknown messages.
func (s *edgeSession) nobody(m *tunnel.Message) error {
	if m.Type == tunnel.TypeOpen {
		s.refuse(m.Topic, tunnel.Refusef(tunnel.Internal, "node %s runs no module %q", s.pub.Node, m.Category))
	}
	return nil
}

// serve dials the target and relays bytes between the target and the conn. It returns nil. Only a
// panic makes the guarded call return an error, and the error ends the session.
func (s *edgeSession) serve(ctx context.Context, name string, r tunnel.Request, dial tunnel.DialFunc) error {
	started := time.Now()
	target, late, err := s.dialTarget(ctx, r, dial)
	if err != nil {
		s.log.Debug("target refused", "topic", name, "target", r.Addr, "err", err)
		if s.owner.cfg.replica == nil && tunnel.CodeOf(err) == tunnel.Denied {
			if skipped, ok := s.owner.denials.Allow(); ok {
				s.log.Warn("a dial that the cloud asked for is denied", "topic", name, "target", r.Addr, "caller", r.Caller, "err", err, "skipped", skipped)
			}
		}
		if _, decided := errors.AsType[*tunnel.Refusal](err); !decided {
			switch {
			case ctx.Err() != nil:
				err = tunnel.Refusef(tunnel.Gone, "the caller has gone")
			case late:
				err = tunnel.Refusef(tunnel.Timeout, "%s did not answer within %s", r.Addr, dialTimeout)
			}
		}
		s.refuse(name, err)
		return nil
	}
	defer s.owner.Over()
	way, err := s.answer(ctx, name)
	if err != nil {
		s.log.Debug("cannot open the conn", "topic", name, "target", r.Addr, "err", err)
		tunnel.Reset(target)
		s.refuse(name, tunnel.Refusef(tunnel.Internal, "node %s reached the target and cannot open the conn: %v", s.pub.Node, err))
		return nil
	}
	gone := make(chan struct{})
	c := way.conn(s, conn.Config{
		IsEdge: true, Ordered: s.ordered, Blocks: s.blocks, Counters: s.counters, Log: s.log,
		Local: conn.Addr(s.pub.Node), Remote: conn.Addr(r.Caller),
		Ended: func(err error) {
			if err != nil {
				way.reset()
			}
		},
		Gone: func() { close(gone) },
	})
	stop := c.Watch(ctx)
	defer stop()
	s.counters.ConnsOpened.Add(1)
	received, sent, err := tunnel.Splice(ctx, c, target)
	<-gone
	s.log.Debug("conn ended", "topic", name, "target", r.Addr, "bytes", received+sent, "err", err, "dur", time.Since(started).Round(time.Microsecond))
	return nil
}

// dialTarget waits for room in the budget of the edge, and dials. If it returns a target, the
// caller must call Client.Over. late reports that dialTimeout has passed.
func (s *edgeSession) dialTarget(ctx context.Context, r tunnel.Request, dial tunnel.DialFunc) (target net.Conn, late bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	if refusal := s.owner.Admit(ctx, r); refusal != nil {
		return nil, false, refusal
	}
	defer func() { // runs also if dial panics
		s.owner.Dialled(r, errors.Join(err, ctx.Err()))
		if target == nil {
			s.owner.Over()
		}
	}()
	target, err = dial(ctx, r)
	return target, errors.Is(ctx.Err(), context.DeadlineExceeded), err
}

// refuse sends the cloud the reason why a request led to no conn.
func (s *edgeSession) refuse(name string, err error) {
	code, words := tunnel.CodeOf(err), err.Error()
	if r, ok := errors.AsType[*tunnel.Refusal](err); ok {
		words = r.Text
	}
	s.counters.Refuse(code)
	refused := &pb.Refused{Code: pb.Code(code), Text: text(words)}
	if by := s.leaseOf(name); by != nil {
		by.data.Send(conn.FrameRefused, encode(refused)) //nolint:errcheck // its reader gets the error
		return
	}
	s.post(message(typeRefused, name, refused))
}
