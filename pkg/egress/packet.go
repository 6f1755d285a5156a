package egress

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

// packetType says what a packet is; the oneof of its payload is not looked at. A type
// that is not listed is ignored by everybody.
type packetType int32

const (
	packetDialReq  packetType = 0 // absent on the wire
	packetDialRsp  packetType = 1
	packetCloseReq packetType = 2
	packetCloseRsp packetType = 3
	packetData     packetType = 4
	packetDialCls  packetType = 5
	packetDrain    packetType = 6
)

func (t packetType) String() string {
	names := [...]string{"DIAL_REQ", "DIAL_RSP", "CLOSE_REQ", "CLOSE_RSP", "DATA", "DIAL_CLS", "DRAIN"}
	if t >= 0 && int(t) < len(names) {
		return names[t]
	}
	return fmt.Sprintf("packet type %d", int32(t))
}

// packet is a Packet with the fields of all its payloads.
type packet struct {
	typ      packetType
	protocol string // DIAL_REQ
	address  string // DIAL_REQ
	random   int64  // DIAL_REQ, DIAL_RSP, DIAL_CLS: which dial
	connID   int64  // DIAL_RSP, DATA, CLOSE_REQ, CLOSE_RSP: which connection of the stream
	err      string // DIAL_RSP, CLOSE_RSP
	data     []byte // DATA; part of buffer when it was received

	buffer mem.Buffer      // received: what holds data, until free
	slice  mem.BufferSlice // to be sent in place of data, uncopied; until it is encoded
}

// free gives back what the data of a packet is in.
func (p *packet) free() {
	if p.buffer != nil {
		p.buffer.Free()
	}
	p.slice.Free()
	p.buffer, p.data, p.slice = nil, nil, nil
}

// length is how many bytes of data it has.
func (p *packet) length() int { return len(p.data) + p.slice.Len() }

// The payloads of a packet: the number of the field in Packet, and of the fields in the
// payload; 0 where it has none.
type payload struct {
	field                                        protowire.Number
	protocol, address, random, connID, err, data protowire.Number
}

//nolint:gochecknoglobals // a constant table
var payloads = [...]payload{
	packetDialReq:  {field: 2, protocol: 1, address: 2, random: 3},
	packetDialRsp:  {field: 3, err: 1, connID: 2, random: 3},
	packetCloseReq: {field: 5, connID: 1},
	packetCloseRsp: {field: 6, err: 1, connID: 2},
	packetData:     {field: 4, connID: 1, data: 3},
	packetDialCls:  {field: 7, random: 1},
	packetDrain:    {field: 8},
}

const typeField = 1

// head encodes everything of p but the bytes of its data, which come right behind.
func (p *packet) head(b []byte) []byte {
	l := payloads[p.typ]
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
	str(l.protocol, p.protocol)
	str(l.address, p.address)
	str(l.err, p.err)
	num(l.connID, p.connID)
	num(l.random, p.random)
	n := p.length()
	if l.data != 0 && n > 0 {
		in = protowire.AppendVarint(protowire.AppendTag(in, l.data, protowire.BytesType), uint64(n))
	}
	if p.typ != 0 {
		b = protowire.AppendVarint(protowire.AppendTag(b, typeField, protowire.VarintType), uint64(p.typ)) //nolint:gosec // a few
	}
	b = protowire.AppendVarint(protowire.AppendTag(b, l.field, protowire.BytesType), uint64(len(in)+n))
	return append(b, in...)
}

// mostHead is enough for the head of a packet with data.
const mostHead = 48

// encode copies p into a buffer of pool, since gRPC may send it later, and has its slice
// follow.
func (p *packet) encode(pool mem.BufferPool) mem.BufferSlice {
	var small [mostHead]byte
	head := p.head(small[:0])
	buf := pool.Get(len(head) + len(p.data))
	copy((*buf)[copy(*buf, head):], p.data)
	all := append(mem.BufferSlice{mem.NewBuffer(buf, pool)}, p.slice...)
	p.slice = nil
	return all
}

var errPacket = errors.New("not a packet of Konnectivity")

// decode reads a packet. It keeps a reference to what holds the data. Fields that are not
// known are skipped; the last of several wins.
func (p *packet) decode(in mem.BufferSlice, pool mem.BufferPool) error {
	*p = packet{}
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
			p.typ = packetType(v) //nolint:gosec // an enum is cut to 32 bits
		}
		for t := range payloads {
			if payloads[t].field == n && body != nil {
				bodies[t] = body
			}
		}
	}
	if p.typ < 0 || int(p.typ) >= len(payloads) {
		buf.Free()
		return nil // somebody newer than us
	}
	if !p.body(payloads[p.typ], bodies[p.typ]) {
		buf.Free()
		return errPacket
	}
	if len(p.data) == 0 {
		buf.Free()
		return nil
	}
	p.buffer = buf
	return nil
}

// body reads the payload of p.
func (p *packet) body(l payload, b []byte) bool {
	for len(b) > 0 {
		n, v, body, rest := field(b)
		if rest == nil {
			return false
		}
		b = rest
		switch n {
		case 0:
		case l.protocol:
			p.protocol = string(body)
		case l.address:
			p.address = string(body)
		case l.err:
			p.err = string(body)
		case l.random:
			p.random = int64(v) //nolint:gosec // as protobuf has it
		case l.connID:
			p.connID = int64(v) //nolint:gosec // as protobuf has it
		case l.data:
			p.data = body
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
type codec struct{ pool mem.BufferPool }

// newCodec returns a codec whose buffers are at most twice as long as what they hold, up to
// 1 MiB. gRPC's own pool has none between 32 KiB and that: it clears 1 MiB for every packet
// that is a little longer, and a queue of such packets would hold far more than it counts.
func newCodec() codec {
	pool, err := mem.NewBinaryTieredBufferPool(8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20)
	if err != nil {
		panic(err) // one of these is no exponent
	}
	return codec{pool}
}

// Name returns the content-subtype, which is that of plain protobuf.
func (codec) Name() string { return "proto" }

// Marshal encodes a *packet; its data may be changed afterwards.
func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	p, ok := v.(*packet)
	if !ok {
		return nil, fmt.Errorf("%T is no packet", v)
	}
	return p.encode(c.pool), nil
}

// Unmarshal decodes into a *packet, which the receiver frees.
func (c codec) Unmarshal(b mem.BufferSlice, v any) error {
	p, ok := v.(*packet)
	if !ok {
		return fmt.Errorf("%T is no packet", v)
	}
	return p.decode(b, c.pool)
}
