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
	if !older.toldDrain.Load() { // otherwise its edge ends it
		s.succession = time.AfterFunc(successionTime, func() {
			s.predecessor.Store(nil)
			older.Close(errReplaced)
		})
	}
	n := 0
	for p := older; p != nil; p = p.predecessor.Load() {
		if n++; n > maxPredecessors {
			p.Close(errReplaced)
		}
	}
}

// fallBack attaches the session that an ended one has succeeded, if that still takes dials: the new process of the edge
// has ended early. The session then lasts as if nobody had succeeded it.
func (s *Server) fallBack(ended *cloudSession) {
	older := ended.predecessor.Load()
	if older == nil || older.hasLeft() || tunnel.IsClosed(older.done) {
		return
	}
	if !s.dir.AttachUnless(older.pub, func(*tunnel.Session) bool { return true }) {
		return
	}
	if ended.succession != nil {
		ended.succession.Stop()
	}
	if tunnel.IsClosed(older.done) { // meanwhile
		s.dir.Detach(older.pub)
	}
}
