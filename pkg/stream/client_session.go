package stream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// edgeSession is the client's end of a session: the end of an edge, or of a replica that has joined
// another replica.
type edgeSession struct {
	session
	client       pb.StreamClient
	calls        grpc.ClientConnInterface // the same connection; see Client.Calls
	reaching     chan struct{}            // has an element for each call that counts in maxReaching
	certificates pb.CertificatesClient    // on the same connection
	abandon      context.CancelCauseFunc  // ends the control stream

	owner *Client
	ctx   context.Context // the context of the control stream
	again dialSame        // makes another connection to the session's replica

	announced atomic.Bool // the cloud has said that it is about to stop

	// Guarded by session.mu.
	expects     map[string]*expected // by the topics of calls of Reach whose conns may come by data connections
	beats       []time.Time          // send times of the heartbeats without an echo, the oldest first
	opening     int                  // number of data connections that are being opened
	misses      int                  // failed attempts in a row to open a data connection
	noMoreUntil time.Time            // before this time the edge opens no data connection
	early       [64]string           // ring buffer: topics of the last cancels that found no open
	nextEarly   int                  // index in early of the next topic
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
		s.drain(sctx, tunnel.GraceLeft(ctx, s.owner.cfg.Grace))
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

// logEnd logs that the session has ended. A clean end has no error.
func (s *edgeSession) logEnd(err error, lived time.Duration) {
	switch {
	case errors.Is(err, errStopping):
		s.log.Info("session ended: "+errStopping.Error(), "dur", lived)
	case errors.Is(err, errCloudStops), s.announced.Load() && isClosing(err):
		s.log.Info("session ended: "+errCloudStops.Error(), "dur", lived)
	default:
		s.log.Info("session ended", "err", err, "dur", lived)
	}
}

// isClosing reports whether err is how a session ends when the other side closes it.
func isClosing(err error) bool {
	code := status.Code(err)
	return errors.Is(err, io.EOF) || errors.Is(err, context.Canceled) ||
		code == codes.Canceled || code == codes.Unavailable
}

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
			stuck = true // like watchSilence, beat checks once more after doubtTime
			timer.Reset(doubtTime)
			continue
		}
		stuck = false
		due := !tend.After(now)
		silent := s.silenceLocked()
		beats := due || silent >= heartbeatSilence
		s.mu.Unlock()
		if due {
			tend = now.Add(heartbeatInterval)
			s.dropLost()
			if s.isNarrow() {
				s.dropUnused()
			}
		}
		if beats {
			s.sendBeat()
		}
		next := heartbeatSilence - silent
		if next <= 0 {
			next = heartbeatSilence
		}
		timer.Reset(min(next, tend.Sub(now)))
	}
}

// sendBeat sends a heartbeat.
func (s *edgeSession) sendBeat() {
	s.mu.Lock()
	now := time.Now()
	s.beats = append(s.beats, now)
	s.mu.Unlock()
	s.post(message(typeHeartbeat, "", &pb.Heartbeat{Sent: now.UnixNano(), RoundTrip: s.pub.RTT.Load()}))
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
// with another replica, and then for the duration Overlap.
func (s *edgeSession) cloudLeaves(m *tunnel.Message) error {
	var d pb.Drain
	if err := proto.Unmarshal(m.Data, &d); err != nil {
		return fmt.Errorf("drain: %w", err)
	}
	if s.announced.Swap(true) {
		return nil // the cloud has said so before
	}
	s.log.Info("cloud is about to stop", "dur", time.Duration(d.GetGraceSeconds())*time.Second)
	s.wg.Go(s.guarded(func() {
		if d.GetElsewhere() {
			s.owner.waitForSuccessor(s)
			select {
			case <-time.After(Overlap):
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

// askedToRenew handles the request to renew the certificate.
func (s *edgeSession) askedToRenew(m *tunnel.Message) error {
	var r pb.Renew
	if err := proto.Unmarshal(m.Data, &r); err != nil {
		return fmt.Errorf("renew: %w", err)
	}
	if ask := s.owner.cfg.AskedToRenew; ask != nil {
		ask(min(time.Duration(r.GetWithinSeconds())*time.Second, maxRenewWithin))
	}
	return nil
}

// maxRenewWithin bounds the time that a cloud gives an edge to renew its certificate. Every certificate is valid for
// longer.
const maxRenewWithin = 24 * time.Hour

// AskToRenew asks the edge of a session to renew its certificate within a time. The edge chooses the moment. An edge
// whose Session.Renews is false ignores the request.
func AskToRenew(s *tunnel.Session, within time.Duration) error {
	return s.Send(message(typeRenew, "", &pb.Renew{WithinSeconds: uint32(within / time.Second)})) //nolint:gosec // hours
}

// cloudReplicas handles the list of the cloud's replicas.
func (s *edgeSession) cloudReplicas(m *tunnel.Message) error {
	var r pb.Replicas
	if err := proto.Unmarshal(m.Data, &r); err != nil {
		return fmt.Errorf("replicas: %w", err)
	}
	if len(r.GetInstances()) > maxReplicas {
		return fmt.Errorf("the list has %d replicas; %d are allowed", len(r.GetInstances()), maxReplicas)
	}
	s.owner.setReplicas(r.GetInstances())
	return nil
}
