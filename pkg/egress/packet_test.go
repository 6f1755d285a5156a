package egress

import (
	"bytes"
	"encoding/hex"
	"strings"
	"testing"

	"google.golang.org/grpc/mem"
	"pgregory.net/rapid"
)

// The wire, byte by byte: type, then the payload of that type
// (konnectivity-client/proto/client/client.proto).
func TestPacketWire(t *testing.T) {
	for want, p := range map[string]packet{
		"120c0a03746370120361 3a311803":    {typ: packetDialReq, protocol: "tcp", address: "a:1", random: 3},
		"08011a05 0a016510 03":             {typ: packetDialRsp, err: "e", connID: 3},
		"0801 1a04 1001 1802":              {typ: packetDialRsp, connID: 1, random: 2},
		"0804 2206 0801 1a02 6869":         {typ: packetData, connID: 1, data: []byte("hi")},
		"0802 2a02 0801":                   {typ: packetCloseReq, connID: 1},
		"0803 3202 1001":                   {typ: packetCloseRsp, connID: 1},
		"0805 3a02 0809":                   {typ: packetDialCls, random: 9},
		"0806 4200":                        {typ: packetDrain},
		"0801 1a0b 10ffffffffffffffffff01": {typ: packetDialRsp, connID: -1},
	} {
		wire, err := hex.DecodeString(string(bytes.ReplaceAll([]byte(want), []byte(" "), nil)))
		if err != nil {
			t.Fatal(err)
		}
		if got := p.encode(mem.DefaultBufferPool()).Materialize(); !bytes.Equal(got, wire) {
			t.Errorf("%v is written as %x, want %x", p.typ, got, wire)
		}
	}
}

func split(b []byte, at int) mem.BufferSlice {
	at = min(at, len(b))
	return mem.BufferSlice{mem.SliceBuffer(b[:at]), mem.SliceBuffer(b[at:])}
}

func same(a, b packet) bool {
	return a.typ == b.typ && a.protocol == b.protocol && a.address == b.address && a.random == b.random &&
		a.connID == b.connID && a.err == b.err && bytes.Equal(a.data, b.data)
}

// What is written is read again, however it is cut in two on the way.
func TestPacketRoundTrip(t *testing.T) {
	pool := mem.DefaultBufferPool()
	rapid.Check(t, func(t *rapid.T) {
		p := packet{typ: packetType(rapid.IntRange(0, 6).Draw(t, "type"))}
		l := payloads[p.typ]
		if l.protocol != 0 {
			p.protocol, p.address = rapid.String().Draw(t, "protocol"), rapid.String().Draw(t, "address")
		}
		if l.err != 0 {
			p.err = rapid.String().Draw(t, "error")
		}
		if l.random != 0 {
			p.random = rapid.Int64().Draw(t, "random")
		}
		if l.connID != 0 {
			p.connID = rapid.Int64().Draw(t, "connection")
		}
		if l.data != 0 {
			p.data = rapid.SliceOfN(rapid.Byte(), 0, 100).Draw(t, "data")
		}
		wire := p.encode(pool).Materialize()
		var got packet
		if err := got.decode(split(wire, rapid.IntRange(0, 50).Draw(t, "cut")), pool); err != nil || !same(got, p) {
			t.Fatalf("%+v became %+v: %v", p, got, err)
		}
		got.free()
	})
}

// What a queue counts for a packet is about what the packet holds.
func TestPacketHolds(t *testing.T) {
	c := newCodec()
	for _, n := range []int{1 << 10, 16<<10 + 22, 32 << 10, 33 << 10, 200 << 10, 256 << 10} {
		wire, err := c.Marshal(&packet{typ: packetData, connID: 1, data: make([]byte, n)})
		if err != nil {
			t.Fatal(err)
		}
		var p packet
		if err := c.Unmarshal(split(wire.Materialize(), 16384), &p); err != nil { // over a frame's edge
			t.Fatal(err)
		}
		if held := cap(p.buffer.ReadOnlyData()); held > 2*(n+mostHead) {
			t.Errorf("a packet with %d bytes holds %d", n, held)
		}
		p.free()
	}
}

func FuzzPacket(f *testing.F) {
	f.Add([]byte{0x08, 0x04, 0x22, 0x06, 0x08, 0x01, 0x1a, 0x02, 'h', 'i'}, 3)
	f.Add([]byte{0x12, 0x05, 0x0a, 0x03, 't', 'c', 'p'}, 0)
	f.Add([]byte{0x08, 0x63}, 1)
	f.Fuzz(func(t *testing.T, b []byte, cut int) {
		var p, again packet
		if cut < 0 || p.decode(split(bytes.Clone(b), cut), mem.DefaultBufferPool()) != nil {
			return
		}
		if p.typ < 0 || int(p.typ) >= len(payloads) {
			return
		}
		wire := p.encode(mem.DefaultBufferPool())
		if err := again.decode(wire, mem.DefaultBufferPool()); err != nil || !same(again, p) {
			t.Fatalf("%x: %+v became %+v: %v", b, p, again, err)
		}
		p.free()
		again.free()
	})
}

// What a client may write at once fits, whatever the number of its conn.
func TestMostDataFits(t *testing.T) {
	p := packet{typ: packetData, connID: -1, data: make([]byte, mostData)}
	if n := len(p.head(nil)) + len(p.data); n > mostPacket {
		t.Errorf("%d bytes, and %d are accepted", n, mostPacket)
	}
}

// What is sent uncopied looks as if it had been copied.
func TestPacketSlice(t *testing.T) {
	pool := mem.DefaultBufferPool()
	for _, parts := range [][]string{{"one"}, {"some", "more"}, {"", strings.Repeat("x", 40000)}} {
		sliced := packet{typ: packetData, connID: 7}
		copied := packet{typ: packetData, connID: 7}
		for _, part := range parts {
			sliced.slice = append(sliced.slice, mem.SliceBuffer(part))
			copied.data = append(copied.data, part...)
		}
		got, want := sliced.encode(pool), copied.encode(pool)
		if !bytes.Equal(got.Materialize(), want.Materialize()) {
			t.Errorf("%d parts: %q", len(parts), got.Materialize())
		}
		if sliced.slice != nil {
			t.Error("the packet still holds what it has given away")
		}
		got.Free()
		want.Free()
	}
}
