package stream

import (
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// A node has one session that takes dials: the newest. A new session with the same instance may succeed the node's
// older session. The older session then does not end, and its conns continue. There are two such cases:
//
//   - A new process of the edge takes over from the process of the older session, and says so.
//   - The cloud has told the older session to move, and the edge has come back: see Server.Move.
//
// Any other new session of the node ends the older session at once: the old process has probably died, and callers must
// learn that their conns are lost.

// errReplaced ends a session that a newer one has replaced.
var errReplaced = status.Error(codes.Aborted, "replaced by a newer session of this node")

const (
	// successionTime is how long a session may continue after the session of a new process has succeeded it. The new
	// process needs time to become ready, and then the old conns have the grace period.
	successionTime = time.Minute
	// maxPredecessors is how many succeeded sessions a node may have, if its processes restart one after the other.
	maxPredecessors = 4
)

// succeeds reports whether s succeeds the session older, instead of ending it. hello is the hello of s's edge.
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
	if !older.toldDrain.Load() { // an edge that was told to move ends the session itself
		s.succession.Store(time.AfterFunc(successionTime, func() {
			if p := s.lastAlive(); p != nil {
				p.Close(errReplaced)
				s.lastAlive() // drops the reference to p
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

// lastAlive returns the newest session before s that has not ended; nil: none. It makes this session the predecessor of
// s, so that no reference keeps the ended sessions in between in memory. It stops the timers of those sessions, because
// the timer of s ends the new predecessor. If s has no timer, the cloud has told the older sessions to move, and their
// edges end them.
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

// fallBack is called when the session of a new process has ended early. It attaches the newest older session again, if
// that session still takes dials. The older session then lasts as if it had no successor.
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
	if tunnel.IsClosed(older.done) { // it has ended meanwhile
		s.dir.Detach(older.pub)
	}
}
