package conn

import "time"

// A way carries the chunks of one conn to its other end. There are two kinds: an HTTP/2 stream
// (streamWay) and the lease of a data connection (Lease). Each difference between the two that
// matters to a conn is a method here, so that Conn never asks which kind it has.
type way interface {
	// SendMsg sends an *outgoing. One caller at a time. Once the way has taken the chunk's block
	// (outgoing.taken), the way gives it back to the chunk's pool, also when it fails.
	SendMsg(m any) error
	// RecvMsg waits for an *incoming. One caller at a time. After io.EOF no more chunks come.
	RecvMsg(m any) error
	// eofEndsBoth says what an io.EOF of RecvMsg means. true: the other side has ended both directions.
	// false: the other side has ended its own direction, and may still receive.
	eofEndsBoth() bool
	// sendsAtOnce reports whether SendMsg of a chunk without payload returns without waiting, on a conn
	// that has sent sent bytes before.
	sendsAtOnce(sent int) bool
	// hasRoom reports whether SendMsg of a few KiB returns without waiting, as far as this side can tell.
	hasRoom() bool
	// endSaid reports whether this side has told the other side that the conn has ended here.
	endSaid() bool
	// inputOver reports whether no more chunks come, so that RecvMsg would return io.EOF at once.
	inputOver() bool
	// pauseAfterFin is how long after the other side's fin no goroutine needs to call RecvMsg.
	pauseAfterFin() time.Duration
}

// Stream is what a conn needs of a grpc.ClientStream or grpc.ServerStream of the call Connect.
type Stream interface {
	SendMsg(m any) error
	RecvMsg(m any) error
}

// streamWay is an HTTP/2 stream as a way.
type streamWay struct {
	Stream
	isEdge bool
}

// eofEndsBoth: the edge receives io.EOF with the cloud's status, which ends the stream. The cloud
// receives io.EOF when the edge has half-closed the stream.
func (s *streamWay) eofEndsBoth() bool { return s.isEdge }

// sendsAtOnce returns false: gRPC's SendMsg may wait for the stream's window, however small the chunk is.
func (*streamWay) sendsAtOnce(int) bool { return false }

// hasRoom returns false for the same reason.
func (*streamWay) hasRoom() bool { return false }

// endSaid returns false: a stream ends only by the status of the cloud's handler.
func (*streamWay) endSaid() bool { return false }

// inputOver returns false: only RecvMsg knows whether a stream has ended.
func (*streamWay) inputOver() bool { return false }

// pauseAfterFin returns 0: only a call of RecvMsg notices that a stream has ended.
func (*streamWay) pauseAfterFin() time.Duration { return 0 }
