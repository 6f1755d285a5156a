package stream

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"
)

// A data connection is a TLS connection beside the session's own, which carries one conn
// at a time and nothing else: TCP gives that conn its flow control, and a packet that is
// lost holds up no other. Cloud and edge are at the ends of it as they are at the ends of
// a Connect stream, and a conn knows no difference. When its conn has ended, it serves
// the next one, which then costs no handshake.
//
// The edge opens one when the cloud asks for it, which it does when it has none to spare
// for an open; that one goes by the session's own connection. So an idle node has none.
//
// data.go is its wire, data_cloud.go and data_edge.go the two ends.

// dataProtocol tells a data connection from one that speaks gRPC (ALPN, RFC 7301).
const dataProtocol = "tunnel-data/1"

// A frame is a header of four bytes, its type and the length of what follows as 24 bits,
// and that.
const (
	frameChunk   = 0x00 // a chunk of the conn, with flags; edge and cloud
	frameAttach  = 0x10 // edge: the ticket that the cloud has asked with; cloud: it is good
	frameOpen    = 0x20 // cloud: a StreamMsg, as on the control stream
	frameOpened  = 0x30 // edge: the target is there, and chunks follow
	frameRefused = 0x40 // edge: a Refused, as on the control stream
)

// Flags of a chunk. Each comes behind the chunk's bytes.
const (
	flagFin  = 1 << 0
	flagStop = 1 << 1
	// flagEnd says that the conn has ended here, and that all which came has been taken. Either
	// end says it once: the edge by itself with a fin behind the cloud's, or else when the cloud
	// has. Where the edge was the first the cloud's next open says as much.
	flagEnd = 1 << 2
	// flagAbort says that the conn is aborted here. Its receiver ends the data connection. Only
	// a peer with capabilityAbort gets it.
	flagAbort = 1 << 3
)

// isChunk reports whether a frame is a chunk, and one that may be.
func isChunk(typ byte, n int) bool {
	return typ&^(flagFin|flagStop|flagEnd|flagAbort) == frameChunk && n <= maxPayload
}

const (
	frameHeader = chunkHeader // it takes that one's place in a block
	// chunkOverhead is what stands around a chunk's bytes: that and what TLS 1.3 adds to a record.
	chunkOverhead = frameHeader + 5 + 1 + 16
	// maxControlFrame bounds frames that are no chunks: they hold what a control message does.
	maxControlFrame = maxMessage
	// dataIdle is how long a data connection is kept for the next conn.
	dataIdle = 2 * time.Minute
	// stopTimeout is how long a write may take once the other end has said that it reads no more:
	// what comes nevertheless it throws away.
	stopTimeout = 10 * time.Second
	// answerTime is how long the other end's kernel may take to acknowledge an open.
	answerTime = 5 * time.Second
)

// dataConn is one end of a data connection.
type dataConn struct {
	net.Conn              // over TLS
	raw      net.Conn     // below it
	tcp      *net.TCPConn // below that; nil in tests with a network of their own
	blocks   *blocks

	carries atomic.Pointer[conn] // what it carries now
	broken  atomic.Bool          // the other end has lost its way: no other conn may follow

	// Owned by who receives.
	header [frameHeader]byte
	have   int // bytes of it that have come
	rest   int // bytes of the last frame that have not come: who waited was interrupted

	// Guarded by session.mu.
	since   time.Time   // when it was last used
	saying  *time.Timer // calls sayEnd
	unheard time.Time   // since when lost has seen that something is sent again; zero: nothing is

	owesEnd bool // the cloud has not said that the last conn has ended; owned by who has d, or by session.mu while it waits
}

func newDataConn(c, raw net.Conn, b *blocks) *dataConn {
	d := &dataConn{Conn: c, raw: raw, blocks: b, since: time.Now()}
	switch r := raw.(type) {
	case *carrier:
		d.tcp = r.tcp
	case *net.TCPConn:
		d.tcp = r
	}
	return d
}

// rests has the kernel notice soon that the connection is lost, while nothing is under way but
// an open: the other end acknowledges that at once.
func (d *dataConn) rests() { d.userTimeout(answerTime) }

// works undoes rests for a conn: a reader that is stalled lets its peer wait for any time,
// and the kernel's timeout does not tell it from a link that is cut (tcp(7)).
func (d *dataConn) works() { d.userTimeout(0) }

func (d *dataConn) userTimeout(t time.Duration) {
	if d.tcp != nil {
		setUserTimeout(d.tcp, t) //nolint:errcheck // it fails when d is closed, which others notice
	}
}

// abort ends the connection and whatever waits for it, and the other end sees no clean end
// of its conn. What has not been sent is thrown away.
func (d *dataConn) abort() {
	if d.tcp != nil {
		d.tcp.SetLinger(0) //nolint:errcheck // it fails when d is closed
	}
	d.raw.Close()
}

// interrupt makes who waits for a frame give up. Nothing is lost: they may go on.
func (d *dataConn) interrupt() { d.raw.SetReadDeadline(time.Unix(1, 0)) } //nolint:errcheck // it fails when d is closed

// resume undoes interrupt.
func (d *dataConn) resume() { d.raw.SetReadDeadline(time.Time{}) } //nolint:errcheck // likewise

// lost reports whether the kernel has ended the connection, or has sent something again and
// again for lostAfter and nothing has come back. A peer that does not read answers all the same.
// It is asked every heartbeatInterval; the caller holds session.mu.
func (d *dataConn) lost() (is bool) {
	if d.tcp == nil {
		return false
	}
	raw, err := d.tcp.SyscallConn()
	if err != nil {
		return false
	}
	raw.Control(func(fd uintptr) { //nolint:errcheck // it fails when d is closed
		acks, ok := acksOf(fd)
		is = ok && d.isLost(acks, time.Now())
	})
	return is
}

func (d *dataConn) isLost(a acks, now time.Time) bool {
	switch heard := now.Add(-a.last); {
	case !a.missing:
		d.unheard = time.Time{}
	case d.unheard.IsZero(), heard.After(d.unheard):
		d.unheard = now // that the last answer is long ago says nothing of a conn that was idle
	}
	return a.ended || a.missing && now.Sub(d.unheard) >= lostAfter
}

// send sends a frame that is no chunk.
func (d *dataConn) send(typ byte, data []byte) error {
	_, err := d.Write(append(header(typ, len(data)), data...))
	return err
}

func (d *dataConn) sendMessage(typ byte, m proto.Message) error { return d.send(typ, encode(m)) }

func header(typ byte, n int) []byte {
	return binary.BigEndian.AppendUint32(nil, uint32(typ)<<24|uint32(n)) //nolint:gosec // less than 24 bits
}

// next waits for a frame and returns what its header says. It may be interrupted, and
// called again.
func (d *dataConn) next() (typ byte, n int, err error) {
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

// fill reads the rest of a frame, or a part of it.
func (d *dataConn) fill(b []byte) error {
	n, err := io.ReadFull(d.Conn, b)
	d.rest = len(b) - n
	return notClean(err)
}

// skip throws away n bytes of a frame.
func (d *dataConn) skip(n int) error {
	if n == 0 {
		return nil
	}
	m, err := io.CopyN(io.Discard, d.Conn, int64(n))
	d.rest = n - int(m)
	return notClean(err)
}

// receive waits for a frame that is no chunk, and holds so many bytes at most.
func (d *dataConn) receive(most int) (typ byte, data []byte, err error) {
	typ, n, err := d.next()
	if err != nil || n == 0 {
		return typ, nil, err
	}
	if n > most {
		return 0, nil, fmt.Errorf("a frame of type %#x holds %d bytes; %d are allowed", typ, n, most)
	}
	data = make([]byte, n)
	return typ, data, d.fill(data)
}

// notClean makes the end of a connection an error: conns end by frames.
func notClean(err error) error {
	if err == io.EOF { //nolint:errorlint // TLS returns io.EOF itself
		return io.ErrUnexpectedEOF
	}
	return err
}

// ride is a conn's use of a data connection: what a Connect stream is to other conns. When it
// is over, nobody sends or receives for that conn any more, whoever may still be about to.
type ride struct {
	*dataConn
	isEdge bool
	recvMu sync.Mutex // held around RecvMsg, as conn.sendMu is around SendMsg
	over   atomic.Bool

	// At the edge; owned by who serves it.
	topic  string
	settle func() // the conn before is no longer waited for
	opened bool   // the cloud was told that there is a conn

	endSent, endGot atomic.Bool // flagEnd was
	interrupted     atomic.Bool
}

var _ messageStream = (*ride)(nil)

// SendMsg sends an *outgoing chunk. It takes the chunk over, whether it fails or not.
func (r *ride) SendMsg(m any) error {
	o := m.(*outgoing) //nolint:forcetypeassert // a conn sends nothing else
	o.taken = true
	defer o.pool.Put(o.block)
	defer o.forwarded.Free()
	if r.over.Load() {
		return errEnded
	}
	have := 0 // bytes of what is forwarded that are in the block
	for _, b := range o.forwarded {
		for p := b.ReadOnlyData(); len(p) > 0; {
			if have == maxPayload {
				if err := r.write(o.block, have, 0); err != nil {
					return err
				}
				have = 0
			}
			n := copy(payload(o.block)[have:], p)
			p, have = p[n:], have+n
		}
	}
	if o.forwarded == nil {
		have = o.n
	}
	var flags byte
	if o.fin {
		flags |= flagFin
	}
	if o.stop {
		flags |= flagStop
	}
	if o.last {
		flags |= flagEnd
	}
	if o.abort {
		flags |= flagAbort
	}
	if err := r.write(o.block, have, flags); err != nil || !o.last {
		return err
	}
	r.endSent.Store(true)
	if r.isEdge { // who receives need not wait for the cloud's word
		r.stopReceiving()
	}
	return nil
}

// stopReceiving has who is in RecvMsg return. Others who come later must not get there.
func (r *ride) stopReceiving() {
	if r.recvMu.TryLock() {
		r.recvMu.Unlock()
		return
	}
	r.interrupt()
}

// interrupt is that of its connection.
func (r *ride) interrupt() {
	r.interrupted.Store(true)
	r.dataConn.interrupt()
}

// resume undoes interrupt, if there was one.
func (r *ride) resume() {
	if r.interrupted.Load() {
		r.dataConn.resume()
	}
}

// write sends a chunk whose payload is in the block.
func (r *ride) write(block *[]byte, n int, flags byte) error {
	b := (*block)[:chunkHeader+n]
	binary.BigEndian.PutUint32(b, uint32(frameChunk|flags)<<24|uint32(n)) //nolint:gosec // less than 24 bits
	_, err := r.Write(b)
	return err
}

// RecvMsg receives an *incoming chunk. io.EOF says that nothing more comes; at the edge, that
// the conn has ended.
func (r *ride) RecvMsg(m any) error {
	in := m.(*incoming) //nolint:forcetypeassert // a conn receives nothing else
	*in = incoming{}
	r.recvMu.Lock()
	defer r.recvMu.Unlock()
	switch {
	case r.over.Load():
		return errEnded
	case r.hasEnded():
		return io.EOF
	}
	typ, n, err := r.next()
	switch {
	case err != nil && r.hasEnded(): // it was interrupted
		return io.EOF
	case err != nil:
		return err
	case r.isEdge && typ == frameOpen: // the next conn's: the cloud has our end, which is just being noted here
		r.have = frameHeader // next returns it once more
		return io.EOF
	case !isChunk(typ, n):
		r.broken.Store(true)
		return fmt.Errorf("a frame of type %#x with %d bytes in the middle of a conn", typ, n)
	}
	in.fin, in.stop, in.abort = typ&flagFin != 0, typ&flagStop != 0, typ&flagAbort != 0
	if typ&flagEnd != 0 {
		r.endGot.Store(true)
	}
	if n == 0 {
		return nil
	}
	block := r.blocks.get()
	*block = (*block)[:n]
	if err := r.fill(*block); err != nil {
		r.blocks.put(block)
		return err
	}
	in.data = mem.BufferSlice{mem.NewBuffer(block, r.blocks)}
	return nil
}

// hasEnded reports whether nothing more comes for the conn.
func (r *ride) hasEnded() bool { return r.endGot.Load() || r.isEdge && r.endSent.Load() }

// unsaid reports whether the conn has ended at the edge, and the cloud has not said that it has
// all of it.
func (r *ride) unsaid() bool { return r.isEdge && r.endSent.Load() && !r.endGot.Load() }

// sendEnd says by itself that the conn has ended.
func (d *dataConn) sendEnd() error { return d.send(frameChunk|flagEnd, nil) }

// hold makes a data connection one of the session's. It fails when the session has ended.
func (s *session) hold(d *dataConn) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return false
	}
	if s.data == nil {
		s.data = make(map[*dataConn]struct{})
	}
	s.data[d] = struct{}{}
	if c, ok := d.raw.(*carrier); ok {
		s.pacer.add(c)
	}
	s.counters.DataLive.Add(1)
	return true
}

// drop undoes hold and ends the connection.
func (s *session) drop(d *dataConn) {
	s.mu.Lock()
	s.dropLocked(d)
	s.mu.Unlock()
	d.abort()
}

func (s *session) dropLocked(d *dataConn) {
	if _, held := s.data[d]; held {
		delete(s.data, d)
		if c, ok := d.raw.(*carrier); ok {
			s.pacer.remove(c)
		}
		s.counters.DataLive.Add(-1)
	}
}

// dropLost ends the data connections whose other end cannot be reached, and their conns. Over a narrow
// link most packets of a connection may be lost for that long; there the kernel decides, which takes
// some minute (dataBackoff).
func (s *session) dropLost() {
	if s.pacer.narrow() {
		return
	}
	s.mu.Lock()
	var lost []*dataConn
	for d := range s.data {
		if d.lost() {
			lost = append(lost, d)
		}
	}
	s.mu.Unlock()
	for _, d := range lost {
		s.log.Info("a data connection is lost", "remote", d.raw.RemoteAddr().String())
		if c := d.carries.Load(); c != nil {
			c.abort() // whoever has it may not be receiving
		}
		s.drop(d)
	}
}
