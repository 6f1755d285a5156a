package conn

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"
)

// A data connection is a TLS connection beside the session's own. It carries one conn at a time and
// nothing else: TCP gives that conn its flow control, and a lost packet delays no other conn. Cloud
// and edge are at its two ends, as they are at the two ends of a Connect stream. When its conn has
// ended, the data connection serves the next conn, which then costs no handshake.
//
// data.go holds its frames and phases, lease.go the use of a data connection by one conn. pkg/stream decides
// when a data connection is opened, used and closed.
//
// Each end of a data connection is in one phase. "Edge" and "cloud" name the end that takes the step;
// steps without a name are the same at both ends.
//
//	          cloud: Ask; edge: LendAtEdge
//	   idle ---------------------------------> asked
//	    ^ ^                                     | |
//	    | |  cloud: Refused                     | |  cloud: LendAtCloud
//	    | |  edge: ReturnAtEdge                 | |  edge: Accept
//	    | +-------------------------------------+ v
//	    |                                      carrying
//	    |                  flagEnd is sent      |    |      flagEnd comes
//	    |                       +---------------+    +--------------+
//	    |                       v                                   v
//	    |                    endSent                              endGot
//	    |                       |  flagEnd comes   flagEnd is sent  |
//	    |                       +-------------> ended <-------------+
//	    |                       |                 |                 |
//	    +<----------------------+-----------------+                 |
//	    |   ReturnAtCloud, ReturnAtEdge                             |
//	    |                                                           |
//	    +<----- edge: ReturnAtEdge, which sends flagEnd ------------+
//	    |                                                           |
//	    |  cloud: SayEnd, or the next Ask                           |
//	    +<---------------------- owing <--- cloud: ReturnAtCloud ---+
//
//	 asked, or any phase below: edge: Revoke; a frame that breaks the protocol ----> dead
//
// In the phases carrying and endSent, ReturnAtCloud waits for flagEnd. In endSent, ReturnAtEdge does not
// wait: the edge's session remembers that the cloud's flagEnd, or its next open, has yet to come.

// Types of frames. A frame is a header of four bytes and a body. The header is the type and the length of the
// body in 24 bits.
const (
	frameChunk   = 0x00 // a chunk of the conn, with flags; edge and cloud
	FrameAttach  = 0x10 // edge: the ticket of the cloud's request; cloud: the ticket is good
	FrameOpen    = 0x20 // cloud: a StreamMsg, as on the control stream
	FrameOpened  = 0x30 // edge: the target was reached, or a caller takes the conn; chunks follow
	FrameRefused = 0x40 // edge: a Refused, as on the control stream
)

// Flags of a chunk. Each takes effect behind the chunk's bytes.
const (
	flagFin  = 1 << 0
	flagStop = 1 << 1
	// flagEnd: this side has finished. Both directions have ended and every received byte was handed
	// on. Each side sends it once per conn; the cloud normally sends it first and the edge replies.
	// If the edge's fin comes last, the edge sets flagEnd on that chunk without waiting. The cloud's
	// next open acknowledges it, or else an empty chunk with flagEnd (SayEnd).
	flagEnd = 1 << 2
	// flagAbort: the conn is aborted behind these bytes. The receiver ends the data connection. The flag is
	// sent only to a peer with the capability abort.
	flagAbort = 1 << 3
)

const (
	// frameHeader is the length of a frame's header. In a block, it takes the place of chunkHeader.
	frameHeader = chunkHeader
	// chunkOverhead is how many bytes are sent beside a chunk's payload: the header, and what TLS 1.3
	// adds to a record.
	chunkOverhead = frameHeader + recordOverhead
	// MaxControlFrame bounds frames that are no chunks. They hold the same as control messages.
	MaxControlFrame = MaxMessage
)

// phase is where one end of a data connection stands. The drawing is at the top of data.go.
type phase int

const (
	phaseIdle     phase = iota // no conn
	phaseAsked                 // an open is on its way, or has arrived and has no answer
	phaseCarrying              // the conn is open, and neither side has finished
	phaseEndSent               // this side has sent flagEnd, the other side has not
	phaseEndGot                // the other side has sent flagEnd, this side has not
	phaseEnded                 // both sides have sent flagEnd
	phaseOwing                 // cloud: the conn has ended; the edge waits until SayEnd, or the next Ask, tells it so
	phaseDead                  // no conn may use the data connection any more
)

// Data is one end of a data connection.
type Data struct {
	// Set once.
	net.Conn          // over TLS
	raw      net.Conn // the connection below TLS; its deadlines interrupt callers that wait in TLS
	blocks   *Blocks

	// Owned by the receiver: by the caller of Receive, or by the holder of lease.recvMu.
	header [frameHeader]byte
	have   int // bytes of header that have come
	rest   int // bytes of the last frame that have not been read, because its reader was interrupted

	mu          sync.Mutex // guards the following; innermost, never held while waiting
	phase       phase
	lease       *Lease // the lease that holds the data connection; nil: none
	interrupted bool   // the lease's receiver was interrupted: the read deadline is in the past
}

// NewData makes c, a TLS connection over raw, one end of a data connection. Nothing is read or
// written.
func NewData(c, raw net.Conn, b *Blocks) *Data { return &Data{Conn: c, raw: raw, blocks: b} }

// Interrupt makes callers that wait for a frame give up. No bytes are lost: after Resume, the next caller
// continues in the middle of the frame.
func (d *Data) Interrupt() { d.raw.SetReadDeadline(time.Unix(1, 0)) }

// Resume undoes Interrupt.
func (d *Data) Resume() { d.raw.SetReadDeadline(time.Time{}) }

// Ask sends the cloud's open for the next conn. The open also tells the edge that the previous conn has
// ended at the cloud. The edge answers with FrameOpened or FrameRefused.
func (d *Data) Ask(open []byte) error {
	d.mu.Lock()
	d.phase = phaseAsked
	d.mu.Unlock()
	return d.Send(FrameOpen, open)
}

// Refused notes at the cloud that the edge has refused the open: there is no conn.
func (d *Data) Refused() {
	d.mu.Lock()
	d.phase = phaseIdle
	d.mu.Unlock()
}

// OwesEnd reports whether the edge waits to hear that its last conn has ended at the cloud. Unless
// an open follows soon, the cloud calls SayEnd.
func (d *Data) OwesEnd() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.phase == phaseOwing
}

// EndGot reports whether the other side has said that the current conn has ended there.
func (d *Data) EndGot() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.phase == phaseEndGot || d.phase == phaseEnded
}

// SayEnd tells the edge that its last conn has ended at the cloud.
func (d *Data) SayEnd() error {
	if err := d.sendEnd(); err != nil {
		return err
	}
	d.mu.Lock()
	d.phase = phaseIdle
	d.mu.Unlock()
	return nil
}

// IsEnd reports whether a frame that Receive has returned is one that SayEnd sends.
func IsEnd(typ byte, data []byte) bool {
	return len(data) == 0 && isChunk(typ, 0) && typ&flagEnd != 0
}

// Send sends a frame that is no chunk.
func (d *Data) Send(typ byte, data []byte) error {
	_, err := d.Write(append(header(typ, len(data)), data...))
	return err
}

// sendEnd sends an empty chunk with flagEnd.
func (d *Data) sendEnd() error { return d.Send(frameChunk|flagEnd, nil) }

// writeChunk sends a chunk whose payload is in the block. Each Write becomes a record.
func (d *Data) writeChunk(block *[]byte, n int, flags byte) error {
	b := (*block)[:chunkHeader+n]
	binary.BigEndian.PutUint32(b, uint32(frameChunk|flags)<<24|uint32(n)) // less than 24 bits
	for len(b) > maxRecord {
		if _, err := d.Write(b[:maxRecord]); err != nil {
			return err
		}
		b = b[maxRecord:]
	}
	_, err := d.Write(b)
	return err
}

func header(typ byte, n int) []byte {
	return binary.BigEndian.AppendUint32(nil, uint32(typ)<<24|uint32(n)) // less than 24 bits
}

// isChunk reports whether a frame is a chunk with known flags and a length that is allowed.
func isChunk(typ byte, n int) bool {
	return typ&^(flagFin|flagStop|flagEnd|flagAbort) == frameChunk && n <= maxChunk
}

// Receive waits for a frame that is no chunk, and holds at most limit bytes.
func (d *Data) Receive(limit int) (typ byte, data []byte, err error) {
	typ, n, err := d.next()
	if err != nil || n == 0 {
		return typ, nil, err
	}
	if n > limit {
		return 0, nil, fmt.Errorf("a frame of type %#x holds %d bytes; %d are allowed", typ, n, limit)
	}
	data = make([]byte, n)
	return typ, data, d.fill(data)
}

// next waits for a frame and returns the type and the length in its header. After an interruption, next may be
// called again.
func (d *Data) next() (typ byte, n int, err error) {
	if err := d.skip(d.rest); err != nil {
		return 0, 0, err
	}
	for d.have < frameHeader {
		m, err := d.Read(d.header[d.have:])
		d.have += m
		if err != nil && d.have < frameHeader {
			return 0, 0, notClean(err)
		}
	}
	d.have = 0
	v := binary.BigEndian.Uint32(d.header[:])
	return byte(v >> 24), int(v & 0xffffff), nil
}

// putBack makes the next call of next return the same header again.
func (d *Data) putBack() { d.have = frameHeader }

// fill reads the body of a frame into b, as far as it fits.
func (d *Data) fill(b []byte) error {
	n, err := io.ReadFull(d.Conn, b)
	d.rest = len(b) - n
	return notClean(err)
}

// skip reads and discards n bytes of a frame.
func (d *Data) skip(n int) error {
	if n == 0 {
		return nil
	}
	m, err := io.CopyN(io.Discard, d.Conn, int64(n))
	d.rest = n - int(m)
	return notClean(err)
}

// skipToEnd reads and discards the frames of a conn that has ended here, until the peer's flagEnd.
func (d *Data) skipToEnd() error {
	for {
		typ, n, err := d.next()
		switch {
		case err != nil:
			return err
		case !isChunk(typ, n):
			return fmt.Errorf("a frame of type %#x with %d bytes after a conn", typ, n)
		case typ&flagAbort != 0:
			return errors.New("its conn was aborted")
		}
		if err := d.skip(n); err != nil || typ&flagEnd != 0 {
			return err
		}
	}
}

// notClean turns io.EOF into io.ErrUnexpectedEOF: a conn ends by a frame, never by the end of the connection.
func notClean(err error) error {
	if err == io.EOF { //nolint:errorlint // TLS returns io.EOF itself
		return io.ErrUnexpectedEOF
	}
	return err
}
