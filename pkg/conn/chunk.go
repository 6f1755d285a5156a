package conn

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"

	"google.golang.org/grpc/encoding"
	_ "google.golang.org/grpc/encoding/proto" // registers the codec for everything but chunks
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
)

// The codec writes and reads tunnel.v1.Chunk by hand. So the sending side copies forwarded bytes once,
// from the socket into a pooled block, and the receiving side hands out gRPC's own buffers. The wire
// is plain protobuf.

// Protobuf keys of Chunk's fields: number<<3 | wire type (2: bytes, 0: varint).
const (
	keyData  = 1<<3 | 2
	keyFin   = 2 << 3
	keyStop  = 3 << 3
	keyAbort = 4 << 3
)

const (
	// chunkHeader is the length of the header before the payload in a block: the key of data, and its
	// length as a varint of three bytes. A varint may be longer than necessary, so the length can be
	// filled in after the payload has been read into place.
	chunkHeader = 1 + 3
	// chunkTrailer is room behind the payload for two marks of two bytes each: stop, and either fin or
	// abort. No chunk has both fin and abort.
	chunkTrailer = 4
	// grpcHeader is gRPC's message prefix (compressed flag and length).
	grpcHeader = 5
	// maxRecord is how many bytes a data connection gives TLS in one record. Such a record of TLS 1.3, and the header of
	// its WebSocket message (RFC 6455 section 5.2: 14 bytes at most), fit into one record of the TLS that a proxy ends:
	// a full record would take two, and two system calls at each box.
	maxRecord = 16384 - recordOverhead - 14
	// recordOverhead is how many bytes TLS 1.3 adds to a record.
	recordOverhead = 5 + 1 + 16
	// MaxPayload makes a full chunk exactly two records of a data connection. On a stream, it is two HTTP/2 DATA frames
	// of at most 16,384 bytes.
	MaxPayload = 2*maxRecord - chunkHeader
	// maxChunk is the longest payload that is accepted from a data connection, in bytes: earlier versions fill two DATA
	// frames.
	maxChunk = 2*16384 - grpcHeader - chunkHeader
	// blockSize is the length of a block. Go rounds it up to pages of 8 KiB, so two bytes more would take
	// 40 KiB.
	blockSize = chunkHeader + maxChunk + chunkTrailer
	// MaxIncoming is the longest payload that is accepted, in bytes. It leaves peers room to choose
	// another size than ours.
	MaxIncoming = 64 << 10
	// MaxMessage bounds every gRPC message, control messages included, in bytes.
	MaxMessage = MaxIncoming + 1024
)

// Blocks is a pool of buffers, each with room for one chunk. All conns of a process share one. The zero
// value is ready.
type Blocks struct{ pool sync.Pool }

var _ mem.BufferPool = (*Blocks)(nil)

// Get implements mem.BufferPool.
func (b *Blocks) Get(int) *[]byte { return b.get() }

// Put implements mem.BufferPool.
func (b *Blocks) Put(p *[]byte) { b.put(p) }

func (b *Blocks) get() *[]byte {
	if p, ok := b.pool.Get().(*[]byte); ok {
		return p
	}
	p := make([]byte, blockSize)
	return &p
}

func (b *Blocks) put(p *[]byte) {
	*p = (*p)[:cap(*p)]
	b.pool.Put(p)
}

// payload is the part of a block that holds forwarded bytes.
func payload(p *[]byte) []byte { return (*p)[chunkHeader : chunkHeader+MaxPayload] }

// outgoing is a chunk to be sent: a block whose payload is in place.
type outgoing struct {
	block     *[]byte
	n         int // bytes of payload
	fin, stop bool
	abort     bool           // the conn is aborted behind these bytes
	last      bool           // the conn ends on this side with this chunk; the way may tell the other side at once
	pool      mem.BufferPool // gets the block back when the way has written it
	taken     bool           // the way has the block, and returns it to pool
	// forwarded, if not nil, is the payload: buffers that another conn has received. The block then holds
	// only the header.
	forwarded mem.BufferSlice
}

// encode finishes the block around its payload and returns it as one buffer, followed by the forwarded
// ones.
func (o *outgoing) encode() mem.BufferSlice {
	b := (*o.block)[:chunkHeader]
	if o.forwarded == nil {
		b = b[:chunkHeader+o.n]
	}
	b[0] = keyData
	b[1] = byte(o.n) | 0x80
	b[2] = byte(o.n>>7) | 0x80
	b[3] = byte(o.n >> 14)
	if o.fin {
		b = append(b, keyFin, 1)
	}
	if o.stop {
		b = append(b, keyStop, 1)
	}
	if o.abort {
		b = append(b, keyAbort, 1)
	}
	*o.block = b
	o.taken = true
	return append(mem.BufferSlice{mem.NewBuffer(o.block, o.pool)}, o.forwarded...)
}

// incoming is a chunk that was received. Its receiver owns data and frees it.
type incoming struct {
	data             mem.BufferSlice
	fin, stop, abort bool
}

// Codec is the gRPC codec of a session. It encodes and decodes chunks by hand, and leaves every other
// message to the registered protobuf codec.
type Codec struct{ proto encoding.CodecV2 }

func NewCodec() Codec { return Codec{encoding.GetCodecV2("proto")} }

// Name returns the content-subtype, which is that of plain protobuf.
func (Codec) Name() string { return "proto" }

// Marshal encodes an *outgoing without copying its payload, or a protobuf message.
func (c Codec) Marshal(v any) (mem.BufferSlice, error) {
	if o, ok := v.(*outgoing); ok {
		return o.encode(), nil
	}
	return c.proto.Marshal(v)
}

// Unmarshal decodes into an *incoming, which then holds references to data's
// buffers, or into a protobuf message.
func (c Codec) Unmarshal(data mem.BufferSlice, v any) error {
	if in, ok := v.(*incoming); ok {
		return in.decode(data)
	}
	return c.proto.Unmarshal(data, v)
}

var errTruncated = errors.New("chunk is cut short")

// decode parses a Chunk by the rules of protobuf (protobuf.dev/programming-guides/encoding): fields come
// in any order, and the last of several values counts.
func (in *incoming) decode(data mem.BufferSlice) (err error) {
	*in = incoming{}
	defer func() {
		if err != nil {
			in.free()
		}
	}()
	c := cursor{bufs: data, left: data.Len()}
	for c.left > 0 {
		key, err := c.uvarint()
		if err != nil {
			return err
		}
		switch key {
		case keyData:
			n, err := c.length()
			if err != nil {
				return err
			}
			if err := checkLength(n); err != nil {
				return err
			}
			in.free()
			in.data = c.take(n)
		case keyFin, keyStop, keyAbort:
			v, err := c.uvarint()
			if err != nil {
				return err
			}
			switch key {
			case keyFin:
				in.fin = v != 0
			case keyStop:
				in.stop = v != 0
			case keyAbort:
				in.abort = v != 0
			}
		default:
			return in.decodeStrange(data)
		}
	}
	return nil
}

// decodeStrange decodes a chunk with unknown fields, which a newer peer may send. It copies the bytes,
// because the protobuf library, which knows how to skip each kind of field, needs them in one piece.
func (in *incoming) decodeStrange(data mem.BufferSlice) error {
	in.free()
	var chunk pb.Chunk
	if err := proto.Unmarshal(data.Materialize(), &chunk); err != nil {
		return fmt.Errorf("chunk: %w", err)
	}
	if err := checkLength(len(chunk.GetData())); err != nil {
		return err
	}
	in.fin, in.stop, in.abort = chunk.GetFin(), chunk.GetStop(), chunk.GetAbort()
	if b := chunk.GetData(); len(b) > 0 {
		in.data = mem.BufferSlice{mem.SliceBuffer(b)}
	}
	return nil
}

func checkLength(n int) error {
	if n > MaxIncoming {
		return fmt.Errorf("chunk holds %d bytes; %d are allowed", n, MaxIncoming)
	}
	return nil
}

func (in *incoming) free() {
	in.data.Free()
	in.data = nil
}

// cursor walks over the bytes of several buffers.
type cursor struct {
	bufs mem.BufferSlice
	off  int // into bufs[0]
	left int // bytes in all
}

func (c *cursor) byte() (byte, error) {
	if c.left == 0 {
		return 0, errTruncated
	}
	for c.off == c.bufs[0].Len() {
		c.bufs, c.off = c.bufs[1:], 0
	}
	b := c.bufs[0].ReadOnlyData()[c.off]
	c.off++
	c.left--
	return b, nil
}

func (c *cursor) uvarint() (uint64, error) {
	var buf [binary.MaxVarintLen64]byte
	for i := range buf {
		b, err := c.byte()
		if err != nil {
			return 0, err
		}
		buf[i] = b
		if b < 0x80 {
			v, n := binary.Uvarint(buf[:i+1])
			if n <= 0 {
				break
			}
			return v, nil
		}
	}
	return 0, errors.New("chunk has a varint of more than 64 bits")
}

// length reads the length of a field and checks that so many bytes are there.
func (c *cursor) length() (int, error) {
	n, err := c.uvarint()
	if err != nil {
		return 0, err
	}
	if n > uint64(c.left) {
		return 0, errTruncated
	}
	return int(n), nil
}

// take returns references to the next n bytes; n has been checked.
func (c *cursor) take(n int) mem.BufferSlice {
	var out mem.BufferSlice
	c.left -= n
	for n > 0 {
		if c.off == c.bufs[0].Len() {
			c.bufs, c.off = c.bufs[1:], 0
			continue
		}
		part := min(n, c.bufs[0].Len()-c.off)
		out = append(out, c.bufs[0].Slice(c.off, c.off+part))
		c.off += part
		n -= part
	}
	return out
}
