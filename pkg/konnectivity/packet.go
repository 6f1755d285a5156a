package konnectivity

import (
	"errors"
	"fmt"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
)

// The wire format is konnectivity-client/proto/client/client.proto of apiserver-network-proxy. Both
// services are streams of the message Packet. This file encodes and decodes the message by hand.
// The generated code would register names in the empty proto package, which only one library of a
// process can do. It would also copy every byte once more.

// PacketType is the type of a packet. It selects the payload; the oneof in the message is ignored.
// Every implementation ignores packets of unknown types.
type PacketType int32

// The types of packets.
const (
	PacketDialReq  PacketType = 0 // towards the target: dial Address; protobuf omits the type 0 on the wire
	PacketDialRsp  PacketType = 1 // towards the caller: the dial has led to ConnID, or failed with Err
	PacketCloseReq PacketType = 2 // towards the target: close the conn
	PacketCloseRsp PacketType = 3 // towards the caller: the conn is closed
	PacketData     PacketType = 4 // in both directions: bytes of a conn
	PacketDialCls  PacketType = 5 // in both directions: the dial is given up
	PacketDrain    PacketType = 6 // from the agent: send new dials to other agents
)

func (t PacketType) String() string {
	names := [...]string{"DIAL_REQ", "DIAL_RSP", "CLOSE_REQ", "CLOSE_RSP", "DATA", "DIAL_CLS", "DRAIN"}
	if t >= 0 && int(t) < len(names) {
		return names[t]
	}
	return fmt.Sprintf("packet type %d", int32(t))
}

// Packet is one message, with the fields of all payloads.
type Packet struct {
	Type     PacketType
	Protocol string // DIAL_REQ
	Address  string // DIAL_REQ
	Random   int64  // DIAL_REQ, DIAL_RSP, DIAL_CLS: id of the dial, chosen by the caller
	ConnID   int64  // DIAL_RSP, DATA, CLOSE_REQ, CLOSE_RSP: id of the conn on its stream
	Err      string // DIAL_RSP, CLOSE_RSP
	Data     []byte // DATA; in a received packet, part of buffer

	buffer mem.Buffer      // the memory of Data in a received packet, until Free; else nil
	Slice  mem.BufferSlice // data to send in place of Data, without a copy; encode owns it from then on
}

// Free returns the memory of the data to its pool. A second call does nothing.
func (p *Packet) Free() {
	if p.buffer != nil {
		p.buffer.Free()
	}
	p.Slice.Free()
	p.buffer, p.Data, p.Slice = nil, nil, nil
}

// length returns how many bytes of data the packet has.
func (p *Packet) length() int { return len(p.Data) + p.Slice.Len() }

// payload holds protobuf field numbers of one type of packet. field is the number of the payload in Packet. The other
// numbers are those of the payload's own fields; 0: the payload has no such field.
type payload struct {
	field                                        protowire.Number
	protocol, address, random, connID, err, data protowire.Number
}

//nolint:gochecknoglobals // a constant table
var payloads = [...]payload{
	PacketDialReq:  {field: 2, protocol: 1, address: 2, random: 3},
	PacketDialRsp:  {field: 3, err: 1, connID: 2, random: 3},
	PacketCloseReq: {field: 5, connID: 1},
	PacketCloseRsp: {field: 6, err: 1, connID: 2},
	PacketData:     {field: 4, connID: 1, data: 3},
	PacketDialCls:  {field: 7, random: 1},
	PacketDrain:    {field: 8},
}

const typeField = 1

// head appends the encoding of p to b, without the bytes of its data. The data must follow right
// after.
func (p *Packet) head(b []byte) []byte {
	l := payloads[p.Type]
	var in []byte
	str := func(n protowire.Number, s string) {
		if n != 0 && s != "" {
			in = protowire.AppendString(protowire.AppendTag(in, n, protowire.BytesType), s)
		}
	}
	num := func(n protowire.Number, v int64) {
		if n != 0 && v != 0 {
			in = protowire.AppendTag(in, n, protowire.VarintType)
			in = protowire.AppendVarint(in, uint64(v)) // the encoding of an int64 in protobuf
		}
	}
	str(l.protocol, p.Protocol)
	str(l.address, p.Address)
	str(l.err, p.Err)
	num(l.connID, p.ConnID)
	num(l.random, p.Random)
	n := p.length()
	if l.data != 0 && n > 0 {
		in = protowire.AppendVarint(protowire.AppendTag(in, l.data, protowire.BytesType), uint64(n))
	}
	if p.Type != 0 {
		b = protowire.AppendTag(b, typeField, protowire.VarintType)
		b = protowire.AppendVarint(b, uint64(p.Type)) // at most 6
	}
	b = protowire.AppendVarint(protowire.AppendTag(b, l.field, protowire.BytesType), uint64(len(in)+n))
	return append(b, in...)
}

// MaxHead is the most bytes that a packet with data needs beside its data.
const MaxHead = 48

// encode copies p to a buffer of pool, because gRPC may send the packet after the caller has reused Data. It does
// not copy p.Slice: the result owns these buffers from then on.
func (p *Packet) encode(pool mem.BufferPool) mem.BufferSlice {
	var small [MaxHead]byte
	head := p.head(small[:0])
	buf := pool.Get(len(head) + len(p.Data))
	copy((*buf)[copy(*buf, head):], p.Data)
	all := append(mem.BufferSlice{mem.NewBuffer(buf, pool)}, p.Slice...)
	p.Slice = nil
	return all
}

var errPacket = errors.New("not a packet of Konnectivity")

// decode decodes a packet, and keeps a reference to the memory of its data until Free. It skips unknown
// fields. If a field occurs several times, the last value counts, as in protobuf. If the memory is much larger than the
// data, decode copies the data: queues count only the data.
func (p *Packet) decode(in mem.BufferSlice, pool mem.BufferPool) error {
	*p = Packet{}
	buf := in.MaterializeToBuffer(pool)
	b := buf.ReadOnlyData()
	var bodies [len(payloads)][]byte
	for len(b) > 0 {
		n, v, body, rest := field(b)
		if rest == nil {
			buf.Free()
			return errPacket
		}
		b = rest
		if n == typeField {
			p.Type = PacketType(v) // an enum is cut to 32 bits
		}
		for t := range payloads {
			if payloads[t].field == n && body != nil {
				bodies[t] = body
			}
		}
	}
	if p.Type < 0 || int(p.Type) >= len(payloads) {
		buf.Free()
		return nil // a type of a newer version
	}
	if !p.body(payloads[p.Type], bodies[p.Type]) {
		buf.Free()
		return errPacket
	}
	if len(p.Data) == 0 {
		buf.Free()
		return nil
	}
	if len(p.Data) < copiedData || buf.Len() > 2*len(p.Data) {
		own := pool.Get(len(p.Data))
		copy(*own, p.Data)
		buf.Free()
		p.Data, buf = *own, mem.NewBuffer(own, pool)
	}
	p.buffer = buf
	return nil
}

// copiedData is the length below which decode copies data, in bytes. gRPC keeps a whole frame, of up to 16 KiB, as long
// as a part of it is in use. So data hold at most twice the memory that the queues count.
const copiedData = 8 << 10

// body reads the payload of p, and reports whether it is well-formed.
func (p *Packet) body(l payload, b []byte) bool {
	for len(b) > 0 {
		n, v, body, rest := field(b)
		if rest == nil {
			return false
		}
		b = rest
		switch n {
		case 0:
		case l.protocol:
			if len(body) > 16 { // "tcp" is usual
				return false
			}
			p.Protocol = string(body)
		case l.address:
			p.Address = string(body)
		case l.err:
			p.Err = string(body)
		case l.random:
			p.Random = int64(v) // the decoding of an int64 in protobuf
		case l.connID:
			p.ConnID = int64(v) // the decoding of an int64 in protobuf
		case l.data:
			p.Data = body
		}
	}
	return true
}

// field reads one protobuf field from b: its number n, and its value as a varint v, or as bytes (then
// body is not nil). A field of another wire type has n = 0. rest is nil if b is malformed.
func field(b []byte) (n protowire.Number, v uint64, body, rest []byte) {
	n, t, size := protowire.ConsumeTag(b)
	if size < 0 {
		return 0, 0, nil, nil
	}
	b = b[size:]
	switch t {
	case protowire.VarintType:
		v, size = protowire.ConsumeVarint(b)
	case protowire.BytesType:
		body, size = protowire.ConsumeBytes(b)
	default:
		size = protowire.ConsumeFieldValue(n, t, b)
		n = 0
	}
	if size < 0 {
		return 0, 0, nil, nil
	}
	return n, v, body, b[size:]
}

// Codec is a gRPC codec for [*Packet]. The encoding is plain protobuf.
type Codec struct{ pool mem.BufferPool }

// NewCodec returns a codec with a buffer pool of its own, whose sizes are the powers of two from
// 256 bytes to 1 MiB. A buffer is thus at most twice as long as its content. gRPC's default pool has
// no size between 32 KiB and 1 MiB. It would clear 1 MiB for each packet just above 32 KiB, and a
// queue of such packets would hold far more memory than it counts.
func NewCodec() Codec {
	pool, err := mem.NewBinaryTieredBufferPool(8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20)
	if err != nil {
		panic(err) // an exponent is out of range
	}
	return Codec{pool}
}

// Name returns the content-subtype of plain protobuf.
func (Codec) Name() string { return "proto" }

// Marshal encodes a *Packet. The caller may change Data afterwards. The result owns the buffers of Slice.
func (c Codec) Marshal(v any) (mem.BufferSlice, error) {
	p, ok := v.(*Packet)
	if !ok {
		return nil, fmt.Errorf("%T is not a packet", v)
	}
	return p.encode(c.pool), nil
}

// Unmarshal decodes b into v, a *Packet. Packet.Data refers to memory of the codec's pool: after use, the code
// that receives the packet calls Packet.Free.
func (c Codec) Unmarshal(b mem.BufferSlice, v any) error {
	p, ok := v.(*Packet)
	if !ok {
		return fmt.Errorf("%T is not a packet", v)
	}
	return p.decode(b, c.pool)
}
