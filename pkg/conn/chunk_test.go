package conn

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
)

// pooled gives the codec a block with that payload, as a conn does.
func pooled(t testing.TB, payloadBytes []byte, fin, stop bool) *outgoing {
	t.Helper()
	b := new(Blocks)
	block := b.get()
	n := copy(payload(block), payloadBytes)
	if n != len(payloadBytes) {
		t.Fatalf("%d bytes do not fit into a chunk", len(payloadBytes))
	}
	f := &flow{}
	f.init(b)
	f.add()
	return &outgoing{block: block, n: n, fin: fin, stop: stop, pool: f}
}

// What the codec writes, protobuf reads, and the other way round.
func TestChunkIsProtobuf(t *testing.T) {
	for _, n := range []int{0, 1, 127, 128, 1 << 10, 1<<14 - 1, 1 << 14, MaxPayload} {
		for _, fin := range []bool{false, true} {
			for _, stop := range []bool{false, true} {
				want := &pb.Chunk{Data: blob(n), Fin: fin, Stop: stop}
				wire, err := NewCodec().Marshal(pooled(t, want.GetData(), fin, stop))
				if err != nil {
					t.Fatal(err)
				}
				var read pb.Chunk
				if err := proto.Unmarshal(wire.Materialize(), &read); err != nil {
					t.Errorf("%d bytes, fin %t, stop %t: protobuf does not read our chunk: %v", n, fin, stop, err)
				} else if !proto.Equal(&read, want) {
					t.Errorf("%d bytes, fin %t, stop %t: protobuf reads %d bytes, fin %t, stop %t",
						n, fin, stop, len(read.GetData()), read.GetFin(), read.GetStop())
				}
				wire.Free()

				theirs, err := proto.Marshal(want)
				if err != nil {
					t.Fatal(err)
				}
				var in incoming
				if err := NewCodec().Unmarshal(mem.BufferSlice{mem.SliceBuffer(theirs)}, &in); err != nil {
					t.Errorf("%d bytes, fin %t, stop %t: protobuf's chunk: %v", n, fin, stop, err)
				} else if !bytes.Equal(in.data.Materialize(), want.GetData()) || in.fin != fin || in.stop != stop {
					t.Errorf("%d bytes, fin %t, stop %t: read %d bytes, fin %t, stop %t", n, fin, stop, in.data.Len(), in.fin, in.stop)
				}
				in.free()
			}
		}
	}
}

// The bytes themselves, so that a change of the wire is seen in a review.
func TestChunkGolden(t *testing.T) {
	for _, c := range []struct {
		data      string
		fin, stop bool
		wire      string
	}{
		{"", false, false, "0a 80 80 00"},
		{"", true, false, "0a 80 80 00 10 01"},
		{"", false, true, "0a 80 80 00 18 01"},
		{"hi", false, false, "0a 82 80 00 68 69"},
		{"hi", true, true, "0a 82 80 00 68 69 10 01 18 01"},
		{strings.Repeat("x", 300), false, false, "0a ac 82 00" + strings.Repeat(" 78", 300)},
	} {
		wire, err := NewCodec().Marshal(pooled(t, []byte(c.data), c.fin, c.stop))
		if got := fmt.Sprintf("% x", wire.Materialize()); err != nil || got != c.wire {
			t.Errorf("%.5q fin %t stop %t: %s, error %v; want %s", c.data, c.fin, c.stop, got, err, c.wire)
		}
	}
}

// A full chunk is two HTTP/2 DATA frames on a stream.
func TestFullChunkIsTwoFrames(t *testing.T) {
	wire, err := NewCodec().Marshal(pooled(t, blob(MaxPayload), false, false))
	if n := grpcHeader + wire.Len(); err != nil || n <= 16384 || n > 2*16384 {
		t.Errorf("a full chunk takes %d bytes, error %v; want more than %d, and at most %d", n, err, 16384, 2*16384)
	}
}

// recorder is a connection that notes the length of each Write.
type recorder struct {
	net.Conn
	lengths []int
}

func (r *recorder) Write(b []byte) (int, error) {
	r.lengths = append(r.lengths, len(b))
	return len(b), nil
}

// On a data connection a full chunk is two records. If the data connection is inside a WebSocket that is inside TLS,
// each record with its WebSocket header fits into one record of the outer TLS.
func TestFullChunkIsTwoRecords(t *testing.T) {
	const tls13, webSocket, record = 5 + 1 + 16, 14, 16384
	for n, want := range map[int][]int{
		0: {4}, 100: {104}, MaxPayload: {record - tls13 - webSocket, record - tls13 - webSocket},
		maxChunk: {record - tls13 - webSocket, record - tls13 - webSocket, 67},
	} {
		var r recorder
		blocks := new(Blocks)
		if err := NewData(&r, &r, blocks).writeChunk(blocks.get(), n, 0); err != nil || !slices.Equal(r.lengths, want) {
			t.Errorf("a chunk of %d bytes is written in pieces of %d, error %v; want %d", n, r.lengths, err, want)
		}
	}
}

// A block takes 32 KiB of memory, and has room for a full chunk with every notice that sendPending puts
// into one chunk.
func TestBlockHoldsAFullChunk(t *testing.T) {
	if blockSize > 32<<10 {
		t.Errorf("a block has %d bytes, and takes %d KiB", blockSize, 8*((blockSize+8191)/8192))
	}
	for _, o := range []outgoing{{fin: true, stop: true}, {stop: true, abort: true}} {
		o.block, o.n = new(Blocks).get(), MaxPayload
		block := &(*o.block)[0]
		o.encode()
		if &(*o.block)[0] != block {
			t.Errorf("fin %t, stop %t, abort %t: the chunk has outgrown its block", o.fin, o.stop, o.abort)
		}
	}
}

func TestChunkFromOthers(t *testing.T) {
	for _, c := range []struct {
		name string
		wire string
		data string
		fin  bool
		stop bool
		err  string // part of it; "" for none
	}{
		{name: "nothing", wire: ""},
		{name: "shortest length", wire: "\x0a\x02hi", data: "hi"},
		{name: "fields in another order", wire: "\x18\x01\x10\x01\x0a\x02hi", data: "hi", fin: true, stop: true},
		{name: "over-long length", wire: "\x0a\x82\x80\x80\x80\x80\x80\x80\x80\x80\x00hi", data: "hi"},
		{name: "over-long key", wire: "\x8a\x00\x02hi", data: "hi"},
		{name: "the last data wins", wire: "\x0a\x03one\x0a\x02hi", data: "hi"},
		{name: "the last data wins, empty", wire: "\x0a\x03one\x0a\x00"},
		{name: "the last fin wins", wire: "\x10\x01\x10\x00"},
		{name: "any number is true", wire: "\x10\xff\xff\x03", fin: true},
		{name: "unknown varint", wire: "\x20\x07\x0a\x02hi", data: "hi"},
		{name: "unknown bytes behind", wire: "\x0a\x02hi\x10\x01\xfa\x01\x03abc", data: "hi", fin: true},
		{name: "unknown fixed64 and fixed32", wire: "\x2112345678\x2d1234\x18\x01", stop: true},
		{name: "unknown group", wire: "\x23\x28\x01\x24\x0a\x02hi", data: "hi"},
		{name: "data of another wire type is unknown", wire: "\x08\x05"},
		{name: "cut short in the key", wire: "\x8a", err: "cut short"},
		{name: "cut short in the length", wire: "\x0a\x82", err: "cut short"},
		{name: "cut short in the data", wire: "\x0a\x03hi", err: "cut short"},
		{name: "length beyond everything", wire: "\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", err: "cut short"},
		{name: "cut short in fin", wire: "\x0a\x02hi\x10", err: "cut short"},
		{name: "varint of 65 bits", wire: "\x10\xff\xff\xff\xff\xff\xff\xff\xff\xff\x02", err: "64 bits"},
		{name: "varint of 11 bytes", wire: "\x10\x80\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01", err: "64 bits"},
		{name: "field number 0", wire: "\x00\x01", err: "chunk"},
		{name: "wire type 7", wire: "\x27\x01", err: "chunk"},
		{name: "group without end", wire: "\x23\x28\x01", err: "chunk"},
		{name: "as long as allowed", wire: "\x0a\x80\x80\x04" + strings.Repeat("x", MaxIncoming),
			data: strings.Repeat("x", MaxIncoming)},
		{name: "too long", wire: "\x0a\x81\x80\x04" + strings.Repeat("x", MaxIncoming+1),
			err: "65537 bytes; 65536 are allowed"},
		{name: "too long beside an unknown field", wire: "\x20\x01\x0a\x81\x80\x04" + strings.Repeat("x", MaxIncoming+1),
			err: "65536 are allowed"},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, pieces := range []int{len(c.wire) + 1, 1, 2, 3, 7} {
				var in incoming
				err := NewCodec().Unmarshal(split([]byte(c.wire), pieces), &in)
				switch {
				case c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)):
					t.Errorf("in buffers of %d: error %v, want %q", pieces, err, c.err)
				case c.err != "":
				case err != nil:
					t.Errorf("in buffers of %d: %v", pieces, err)
				case string(in.data.Materialize()) != c.data || in.fin != c.fin || in.stop != c.stop:
					t.Errorf("in buffers of %d: %q fin %t stop %t; want %q fin %t stop %t",
						pieces, in.data.Materialize(), in.fin, in.stop, c.data, c.fin, c.stop)
				}
				if c.err != "" && in.data != nil {
					t.Errorf("in buffers of %d: a chunk that is refused holds on to buffers", pieces)
				}
			}
		})
	}
}

// split returns b in buffers of at most size bytes, and an empty one here and there,
// which gRPC's callers must reckon with.
func split(b []byte, size int) mem.BufferSlice {
	s := mem.BufferSlice{mem.SliceBuffer(nil)}
	for len(b) > 0 {
		n := min(size, len(b))
		s = append(s, mem.SliceBuffer(b[:n]), mem.SliceBuffer(nil))
		b = b[n:]
	}
	return s
}

// Every buffer that gRPC lends is given back, whatever was in the chunk.
func TestDecodeFreesItsBuffers(t *testing.T) {
	for name, wire := range map[string]string{
		"data":          "\x0a\x02hi" + strings.Repeat("\x10\x01", 1000),
		"data twice":    "\x0a\x03one" + strings.Repeat("\x10\x01", 1000) + "\x0a\x02hi",
		"error behind":  "\x0a\x02hi" + strings.Repeat("\x10\x01", 1000) + "\x10",
		"unknown field": "\x0a\x02hi" + strings.Repeat("\x20\x01", 1000),
	} {
		t.Run(name, func(t *testing.T) {
			pool := &countingPool{}
			block := pool.Get(4 << 10)
			*block = (*block)[:copy(*block, wire)]
			data := mem.BufferSlice{mem.NewBuffer(block, pool)}
			var in incoming
			in.decode(data) // one of them fails, and has nothing to free
			data.Free()     // as gRPC does after Unmarshal
			in.free()
			if pool.out != 0 {
				t.Errorf("%d buffers do not come back", pool.out)
			}
		})
	}
}

type countingPool struct{ out int }

func (p *countingPool) Get(n int) *[]byte {
	p.out++
	b := make([]byte, n)
	return &b
}

func (p *countingPool) Put(*[]byte) { p.out-- }

// FuzzChunk holds decode to the protobuf library: the same verdict and the same value,
// but for the limit on data, in one buffer or many.
func FuzzChunk(f *testing.F) {
	for _, s := range []string{"", "\x0a\x02hi\x10\x01\x18\x01", "\x0a\x82\x80\x00hi", "\x23\x28\x01\x24", "\x8a\x00\x01x",
		"\x0a\x01a\x20\x01\x0a\x01b"} {
		f.Add([]byte(s), 3)
	}
	f.Fuzz(func(t *testing.T, wire []byte, size int) {
		var want pb.Chunk
		wantErr := proto.Unmarshal(wire, &want)
		var in incoming
		err := in.decode(split(wire, max(1, size)))
		if err != nil && strings.Contains(err.Error(), "are allowed") {
			return
		}
		if (err == nil) != (wantErr == nil) {
			t.Fatalf("%x: error %v, protobuf's %v", wire, err, wantErr)
		}
		if err == nil && (!bytes.Equal(in.data.Materialize(), want.GetData()) || in.fin != want.GetFin() ||
			in.stop != want.GetStop()) {
			t.Fatalf("%x: %x fin %t stop %t; protobuf has %v", wire, in.data.Materialize(), in.fin, in.stop, &want)
		}
	})
}

// The rest of the protocol goes through the library.
func TestOtherMessagesAreLeftToTheLibrary(t *testing.T) {
	want := &pb.StreamMsg{Category: "tcp", Type: "open", Topic: "t", Data: []byte("d"), Addr: "a:1"}
	wire, err := NewCodec().Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	var got pb.StreamMsg
	if err := NewCodec().Unmarshal(wire, &got); err != nil || !proto.Equal(&got, want) {
		t.Errorf("got %v, error %v; want %v", &got, err, want)
	}
	if _, err := NewCodec().Marshal("no message"); err == nil {
		t.Error("a string goes over the wire")
	}
}

// codecRun is one chunk's way through the codec: block, wire, and Read at the other end.
type codecRun struct {
	flow  flow
	codec Codec
	c     Conn
	into  []byte
	n     int
}

func newCodecRun(n int) *codecRun {
	r := &codecRun{codec: NewCodec(), into: make([]byte, n), n: n}
	r.flow.init(new(Blocks))
	return r
}

func (r *codecRun) once() error {
	r.flow.add()
	wire, err := r.codec.Marshal(&outgoing{block: r.flow.Get(0), n: r.n, pool: &r.flow})
	if err != nil {
		return err
	}
	var in incoming
	if err := r.codec.Unmarshal(wire, &in); err != nil {
		return err
	}
	wire.Free()
	r.c.in.current = in.data
	if n := r.c.take(r.into); n != r.n || r.flow.inFlight.Load() != 0 {
		return errors.New("the chunk did not come through whole, or its block did not come back")
	}
	return nil
}

var codecSizes = []int{16, 1 << 10, MaxPayload}

// A chunk of any size costs a few small allocations at both ends together, and never
// one of the size of its payload.
func TestCodecAllocations(t *testing.T) {
	const most = 6 // outgoing, and two buffer lists with a reference each; the race detector adds one
	for _, n := range codecSizes {
		run := newCodecRun(n)
		got := testing.AllocsPerRun(1000, func() {
			if err := run.once(); err != nil {
				t.Fatal(err)
			}
		})
		t.Logf("%d bytes: %.1f allocations", n, got)
		if got > most {
			t.Errorf("a chunk of %d bytes costs %.1f allocations, %d are allowed", n, got, most)
		}
	}
}

func BenchmarkCodec(b *testing.B) {
	for _, n := range codecSizes {
		b.Run(fmt.Sprintf("%dB", n), func(b *testing.B) {
			run := newCodecRun(n)
			b.ReportAllocs()
			b.SetBytes(int64(n))
			for b.Loop() {
				if err := run.once(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
