package konnectivity

import (
	"errors"
	"fmt"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
)

// The wire of Konnectivity (apiserver-network-proxy, konnectivity-client/proto/client):
// both of its services are streams of one message, Packet. It is written and read by
// hand: its own generated code registers names in the empty proto package, which only
// one library of a process can do, and would copy every byte once more.

// PacketType says what a packet is; the oneof of its payload is not looked at. A type
// that is not listed is ignored by everybody.
type PacketType int32

const (
	PacketDialReq  PacketType = 0 // absent on the wire
	PacketDialRsp  PacketType = 1
	PacketCloseReq PacketType = 2
	PacketCloseRsp PacketType = 3
	PacketData     PacketType = 4
	PacketDialCls  PacketType = 5
	PacketDrain    PacketType = 6
)

func (t PacketType) String() string {
	names := [...]string{"DIAL_REQ", "DIAL_RSP", "CLOSE_REQ", "CLOSE_RSP", "DATA", "DIAL_CLS", "DRAIN"}
	if t >= 0 && int(t) < len(names) {
		return names[t]
	}
	return fmt.Sprintf("packet type %d", int32(t))
}

// packet is a Packet with the fields of all its payloads.
type Packet struct {
	Type     PacketType
	Protocol string // DIAL_REQ
	Address  string // DIAL_REQ
	Random   int64  // DIAL_REQ, DIAL_RSP, DIAL_CLS: which dial
	ConnID   int64  // DIAL_RSP, DATA, CLOSE_REQ, CLOSE_RSP: which connection of the stream
	Err      string // DIAL_RSP, CLOSE_RSP
	Data     []byte // DATA; part of buffer when it was received

	buffer mem.Buffer      // received: what holds Data, until Free
	Slice  mem.BufferSlice // to be sent in place of Data, uncopied; until it is encoded
}

// Free gives back what the data of a packet is in.
func (p *Packet) Free() {
	if p.buffer != nil {
		p.buffer.Free()
	}
	p.Slice.Free()
	p.buffer, p.Data, p.Slice = nil, nil, nil
}

// length is how many bytes of data it has.
func (p *Packet) length() int { return len(p.Data) + p.Slice.Len() }

// The payloads of a packet: the number of the field in Packet, and of the fields in the
// payload; 0 where it has none.
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

// head encodes everything of p but the bytes of its data, which come right behind.
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
			in = protowire.AppendVarint(protowire.AppendTag(in, n, protowire.VarintType), uint64(v)) //nolint:gosec // as protobuf has it
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
		b = protowire.AppendVarint(protowire.AppendTag(b, typeField, protowire.VarintType), uint64(p.Type)) //nolint:gosec // a few
	}
	b = protowire.AppendVarint(protowire.AppendTag(b, l.field, protowire.BytesType), uint64(len(in)+n))
	return append(b, in...)
}

// mostHead is enough for the head of a packet with data.
const MaxHead = 48

// encode copies p into a buffer of pool, since gRPC may send it later, and has its slice
// follow.
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

// decode reads a packet. It keeps a reference to what holds the data. Fields that are not
// known are skipped; the last of several wins.
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
			p.Type = PacketType(v) //nolint:gosec // an enum is cut to 32 bits
		}
		for t := range payloads {
			if payloads[t].field == n && body != nil {
				bodies[t] = body
			}
		}
	}
	if p.Type < 0 || int(p.Type) >= len(payloads) {
		buf.Free()
		return nil // somebody newer than us
	}
	if !p.body(payloads[p.Type], bodies[p.Type]) {
		buf.Free()
		return errPacket
	}
	if len(p.Data) == 0 {
		buf.Free()
		return nil
	}
	p.buffer = buf
	return nil
}

// body reads the payload of p.
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
			p.Protocol = string(body)
		case l.address:
			p.Address = string(body)
		case l.err:
			p.Err = string(body)
		case l.random:
			p.Random = int64(v) //nolint:gosec // as protobuf has it
		case l.connID:
			p.ConnID = int64(v) //nolint:gosec // as protobuf has it
		case l.data:
			p.Data = body
		}
	}
	return true
}

// field reads one field: a number, or bytes (not nil then). rest is nil when b is none.
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

// codec is a gRPC codec for packets. The wire is plain protobuf.
type Codec struct{ pool mem.BufferPool }

// NewCodec returns a codec whose buffers are at most twice as long as what they hold, up to
// 1 MiB. gRPC's own pool has none between 32 KiB and that: it clears 1 MiB for every packet
// that is a little longer, and a queue of such packets would hold far more than it counts.
func NewCodec() Codec {
	pool, err := mem.NewBinaryTieredBufferPool(8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20)
	if err != nil {
		panic(err) // one of these is no exponent
	}
	return Codec{pool}
}

// Name returns the content-subtype, which is that of plain protobuf.
func (Codec) Name() string { return "proto" }

// Marshal encodes a *packet; its data may be changed afterwards.
func (c Codec) Marshal(v any) (mem.BufferSlice, error) {
	p, ok := v.(*Packet)
	if !ok {
		return nil, fmt.Errorf("%T is no packet", v)
	}
	return p.encode(c.pool), nil
}

// Unmarshal decodes into a *packet, which the receiver frees.
func (c Codec) Unmarshal(b mem.BufferSlice, v any) error {
	p, ok := v.(*Packet)
	if !ok {
		return fmt.Errorf("%T is no packet", v)
	}
	return p.decode(b, c.pool)
}
