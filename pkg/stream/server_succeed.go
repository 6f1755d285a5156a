package stream

import (
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// A node has one session that takes dials: the newest. A session that succeeds an older one does not end the older
// one, whose conns go on. That happens in two cases, both with the instance of the older session:
//
//   - A new process of the edge takes over from the process of the older session, and says so.
//   - The cloud has told the older session to move, and the edge has come back: see Server.Move.
//
// Any other session of the same node ends the older one at once, since callers must learn that its conns are lost.

// errReplaced ends a session that a newer one has replaced.
var errReplaced = status.Error(codes.Aborted, "replaced by a newer session of this node")

const (
	// successionTime is how long a session may continue after that of a new process has succeeded it: the new
	// process becomes ready, and then conns have the grace period.
	successionTime = time.Minute
	// maxPredecessors is how many such sessions a node may have: processes that restart one after the other.
	maxPredecessors = 4
)

// succeeds reports whether s, whose edge has sent hello, succeeds older.
func (s *cloudSession) succeeds(older *cloudSession, hello *pb.Hello) bool {
	return s.pub.Instance != "" && older.pub.Instance == s.pub.Instance &&
		(hello.GetSucceeds() || older.toldDrain.Load())
}

// follow makes s the successor of older. The handler of s calls it once, before another session can follow s.
func (s *cloudSession) follow(older *cloudSession) {
	s.log.Info("this session succeeds an older one, whose conns go on", "succeeded", older.pub.ID)
	s.predecessor.Store(older)
	older = s.lastAlive()
	if older == nil {
		return
	}
	if !older.toldDrain.Load() { // otherwise its edge ends it
		s.succession.Store(time.AfterFunc(successionTime, func() {
			if p := s.lastAlive(); p != nil {
				p.Close(errReplaced)
				s.lastAlive() // nothing keeps p
			}
		}))
	}
	n := 0
	for p := older; p != nil; p = p.lastAlive() {
		if n++; n > maxPredecessors {
			p.Close(errReplaced)
		}
	}
}

// lastAlive returns the newest session before s that has not ended; nil: none. It makes that one the predecessor of s,
// so that nothing keeps the ended ones in between. Their timers stop: that of s ends the new predecessor. If s has
// none, the cloud has told all of them to move, and their edges end them.
func (s *cloudSession) lastAlive() *cloudSession {
	for {
		older := s.predecessor.Load()
		if older == nil || !tunnel.IsClosed(older.done) {
			return older
		}
		if timer := older.succession.Load(); timer != nil {
			timer.Stop()
		}
		s.predecessor.CompareAndSwap(older, older.predecessor.Load())
	}
}

// fallBack attaches the newest session before an ended one, if that still takes dials: the new process of the edge
// has ended early. The session then lasts as if nobody had succeeded it.
func (s *Server) fallBack(ended *cloudSession) {
	older := ended.lastAlive()
	if older == nil || older.hasLeft() {
		return
	}
	if !s.dir.AttachUnless(older.pub, func(*tunnel.Session) bool { return true }) {
		return
	}
	if timer := ended.succession.Load(); timer != nil {
		timer.Stop()
	}
	if tunnel.IsClosed(older.done) { // meanwhile
		s.dir.Detach(older.pub)
	}
}
