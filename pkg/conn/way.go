package conn

import "time"

// A way carries the chunks of one conn to its other end. There are two: an HTTP/2 stream
// (streamWay) and the lease of a data connection (Lease). Everything in which the two differ for a
// conn is a method here, so that Conn never asks which one it has.
type way interface {
	// SendMsg sends an *outgoing. One caller at a time. Once the way has taken the chunk's block
	// (outgoing.taken), the way gives it back to the chunk's pool, also when it fails.
	SendMsg(m any) error
	// RecvMsg waits for an *incoming. One caller at a time. After it returns io.EOF nothing comes.
	RecvMsg(m any) error
	// eofEndsBoth reports what io.EOF of RecvMsg says: true when the other side has ended both
	// directions, false when it has ended its own and may still receive.
	eofEndsBoth() bool
	// sendsAtOnce reports whether one more chunk without bytes goes out without waiting, on a conn
	// that has sent so many bytes before.
	sendsAtOnce(sent int) bool
	// endSaid reports whether this side has told the other one that the conn has ended here.
	endSaid() bool
	// inputOver reports whether nothing more comes, so that RecvMsg would return io.EOF at once.
	inputOver() bool
	// pauseAfterFin is how long after the other side's fin nobody needs to call RecvMsg.
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

// sendsAtOnce: gRPC's SendMsg may wait for the stream's window, however small the chunk is.
func (*streamWay) sendsAtOnce(int) bool { return false }

// endSaid: only the status of the cloud's handler ends a stream.
func (*streamWay) endSaid() bool { return false }

// inputOver: only RecvMsg knows.
func (*streamWay) inputOver() bool { return false }

// pauseAfterFin: gRPC tells only a receiver that a stream has ended.
func (*streamWay) pauseAfterFin() time.Duration { return 0 }
