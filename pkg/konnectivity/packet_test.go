package konnectivity

import (
	"bytes"
	"encoding/hex"
	"strings"
	"testing"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"pgregory.net/rapid"
)

// The encoding, byte by byte: the type, then the payload of that type
// (konnectivity-client/proto/client/client.proto).
func TestPacketWire(t *testing.T) {
	for want, p := range map[string]Packet{
		"120c0a03746370120361 3a311803":    {Type: PacketDialReq, Protocol: "tcp", Address: "a:1", Random: 3},
		"08011a05 0a016510 03":             {Type: PacketDialRsp, Err: "e", ConnID: 3},
		"0801 1a04 1001 1802":              {Type: PacketDialRsp, ConnID: 1, Random: 2},
		"0804 2206 0801 1a02 6869":         {Type: PacketData, ConnID: 1, Data: []byte("hi")},
		"0802 2a02 0801":                   {Type: PacketCloseReq, ConnID: 1},
		"0803 3202 1001":                   {Type: PacketCloseRsp, ConnID: 1},
		"0805 3a02 0809":                   {Type: PacketDialCls, Random: 9},
		"0806 4200":                        {Type: PacketDrain},
		"0801 1a0b 10ffffffffffffffffff01": {Type: PacketDialRsp, ConnID: -1},
	} {
		wire, err := hex.DecodeString(string(bytes.ReplaceAll([]byte(want), []byte(" "), nil)))
		if err != nil {
			t.Fatal(err)
		}
		if got := p.encode(mem.DefaultBufferPool()).Materialize(); !bytes.Equal(got, wire) {
			t.Errorf("%v is written as %x, want %x", p.Type, got, wire)
		}
	}
}

func split(b []byte, at int) mem.BufferSlice {
	at = min(at, len(b))
	return mem.BufferSlice{mem.SliceBuffer(b[:at]), mem.SliceBuffer(b[at:])}
}

func same(a, b Packet) bool {
	return a.Type == b.Type && a.Protocol == b.Protocol && a.Address == b.Address && a.Random == b.Random &&
		a.ConnID == b.ConnID && a.Err == b.Err && bytes.Equal(a.Data, b.Data)
}

// Every packet is decoded from its encoding, wherever that is split in two.
func TestPacketRoundTrip(t *testing.T) {
	pool := mem.DefaultBufferPool()
	rapid.Check(t, func(t *rapid.T) {
		p := Packet{Type: PacketType(rapid.IntRange(0, 6).Draw(t, "type"))}
		l := payloads[p.Type]
		if l.protocol != 0 {
			p.Protocol, p.Address = rapid.StringN(0, -1, 16).Draw(t, "protocol"), rapid.String().Draw(t, "address")
		}
		if l.err != 0 {
			p.Err = rapid.String().Draw(t, "error")
		}
		if l.random != 0 {
			p.Random = rapid.Int64().Draw(t, "random")
		}
		if l.connID != 0 {
			p.ConnID = rapid.Int64().Draw(t, "connection")
		}
		if l.data != 0 {
			p.Data = rapid.SliceOfN(rapid.Byte(), 0, 100).Draw(t, "data")
		}
		wire := p.encode(pool).Materialize()
		var got Packet
		if err := got.decode(split(wire, rapid.IntRange(0, 50).Draw(t, "cut")), pool); err != nil || !same(got, p) {
			t.Fatalf("%+v became %+v: %v", p, got, err)
		}
		got.Free()
	})
}

// A packet holds at most about twice the memory that a queue counts for it.
func TestPacketHolds(t *testing.T) {
	c := NewCodec()
	for _, n := range []int{1 << 10, 16<<10 + 22, 32 << 10, 33 << 10, 200 << 10, 256 << 10} {
		wire, err := c.Marshal(&Packet{Type: PacketData, ConnID: 1, Data: make([]byte, n)})
		if err != nil {
			t.Fatal(err)
		}
		var p Packet
		if err := c.Unmarshal(split(wire.Materialize(), 16384), &p); err != nil { // split between two HTTP/2 frames
			t.Fatal(err)
		}
		if held := cap(p.buffer.ReadOnlyData()); held > 2*(n+MaxHead) {
			t.Errorf("a packet with %d bytes holds %d", n, held)
		}
		p.Free()
	}
}

func FuzzPacket(f *testing.F) {
	f.Add([]byte{0x08, 0x04, 0x22, 0x06, 0x08, 0x01, 0x1a, 0x02, 'h', 'i'}, 3)
	f.Add([]byte{0x12, 0x05, 0x0a, 0x03, 't', 'c', 'p'}, 0)
	f.Add([]byte{0x08, 0x63}, 1)
	f.Fuzz(func(t *testing.T, b []byte, cut int) {
		var p, again Packet
		if cut < 0 || p.decode(split(bytes.Clone(b), cut), mem.DefaultBufferPool()) != nil {
			return
		}
		if p.Type < 0 || int(p.Type) >= len(payloads) {
			return
		}
		wire := p.encode(mem.DefaultBufferPool())
		if err := again.decode(wire, mem.DefaultBufferPool()); err != nil || !same(again, p) {
			t.Fatalf("%x: %+v became %+v: %v", b, p, again, err)
		}
		p.Free()
		again.Free()
	})
}

// Data sent by Slice have the same encoding as data sent by Data.
func TestPacketSlice(t *testing.T) {
	pool := mem.DefaultBufferPool()
	for _, parts := range [][]string{{"one"}, {"some", "more"}, {"", strings.Repeat("x", 40000)}} {
		sliced := Packet{Type: PacketData, ConnID: 7}
		copied := Packet{Type: PacketData, ConnID: 7}
		for _, part := range parts {
			sliced.Slice = append(sliced.Slice, mem.SliceBuffer(part))
			copied.Data = append(copied.Data, part...)
		}
		got, want := sliced.encode(pool), copied.encode(pool)
		if !bytes.Equal(got.Materialize(), want.Materialize()) {
			t.Errorf("%d parts: %q", len(parts), got.Materialize())
		}
		if sliced.Slice != nil {
			t.Error("the packet still holds what it has given away")
		}
		got.Free()
		want.Free()
	}
}

// puts counts the buffers that are given back.
type puts struct {
	mem.BufferPool
	n int
}

func (p *puts) Put(*[]byte) { p.n++ }

// A packet that is much longer than its data does not stay in memory: the queues count only the data.
func TestPacketPadded(t *testing.T) {
	pool := mem.DefaultBufferPool()
	for _, size := range []int{1, 5000} {
		data := bytes.Repeat([]byte("d"), size)
		wire := (&Packet{Type: PacketData, ConnID: 1, Data: data}).encode(pool).Materialize()
		wire = protowire.AppendBytes(protowire.AppendTag(wire, 100, protowire.BytesType), make([]byte, 200<<10))
		var p Packet
		if err := p.decode(mem.BufferSlice{mem.SliceBuffer(wire)}, pool); err != nil || !bytes.Equal(p.Data, data) {
			t.Fatalf("%d bytes, %v", len(p.Data), err)
		}
		if n := p.buffer.Len(); n > 2*size {
			t.Errorf("%d bytes of data hold %d", size, n)
		}
		p.Free()
	}
	// The packet may be a part of a frame of gRPC, which stays in memory as long as a part of it is in use.
	wire := (&Packet{Type: PacketData, ConnID: 1, Data: make([]byte, 4<<10)}).encode(pool).Materialize()
	freed, memory := &puts{BufferPool: pool}, make([]byte, 16<<10)
	copy(memory, wire)
	frame, rest := mem.SplitUnsafe(mem.NewBuffer(&memory, freed), len(wire))
	rest.Free()
	var p Packet
	if err := p.decode(mem.BufferSlice{frame}, pool); err != nil || len(p.Data) != 4<<10 {
		t.Fatalf("%d bytes, %v", len(p.Data), err)
	}
	if frame.Free(); freed.n != 1 {
		t.Error("4 KiB of data hold a frame of 16 KiB")
	}
	p.Free()
	long := (&Packet{Type: PacketDialReq, Protocol: strings.Repeat("x", 17)}).encode(pool).Materialize()
	if err := new(Packet).decode(mem.BufferSlice{mem.SliceBuffer(long)}, pool); err == nil {
		t.Error("a protocol of 17 bytes is accepted")
	}
}
