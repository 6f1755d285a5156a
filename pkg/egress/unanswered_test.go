package egress

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/konnectivity"
	"tunnel.example/tunnel/pkg/tunnel"
)

// hog opens streams on one connection. On each it sends the first most bytes of a message that never ends,
// as fast as flow control allows. It returns the number of bytes sent.
func hog(t *testing.T, c net.Conn, streams, most int) (sent int) {
	t.Helper()
	io.WriteString(c, http2.ClientPreface)
	f := http2.NewFramer(c, c)
	f.WriteSettings(http2.Setting{ID: http2.SettingMaxFrameSize, Val: 16 << 10})
	var mu sync.Mutex
	room := sync.NewCond(&mu)
	conn, window, initial := 64<<10-1, make(map[uint32]int), 64<<10-1
	over := false
	var head bytes.Buffer
	enc := hpack.NewEncoder(&head)
	var reading sync.WaitGroup
	reading.Go(func() {
		defer func() {
			mu.Lock()
			over = true
			room.Broadcast()
			mu.Unlock()
		}()
		for {
			frame, err := f.ReadFrame()
			if err != nil {
				return
			}
			mu.Lock()
			switch frame := frame.(type) {
			case *http2.SettingsFrame:
				if v, ok := frame.Value(http2.SettingInitialWindowSize); ok {
					for id := range window {
						window[id] += int(v) - initial
					}
					initial = int(v)
				}
				if !frame.IsAck() {
					f.WriteSettingsAck()
				}
			case *http2.WindowUpdateFrame:
				if frame.StreamID == 0 {
					conn += int(frame.Increment)
				} else {
					window[frame.StreamID] += int(frame.Increment)
				}
			}
			room.Broadcast()
			mu.Unlock()
		}
	})
	left := make(map[uint32]int)
	mu.Lock()
	for i := range streams {
		id := uint32(2*i + 1)
		head.Reset()
		for _, h := range [][2]string{{":method", "POST"}, {":scheme", "http"}, {":path", "/ProxyService/Proxy"},
			{":authority", "x"}, {"content-type", "application/grpc"}, {"te", "trailers"}} {
			enc.WriteField(hpack.HeaderField{Name: h[0], Value: h[1]})
		}
		f.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: head.Bytes(), EndHeaders: true})
		f.WriteData(id, false, binary.BigEndian.AppendUint32([]byte{0}, uint32(most+1))) // uncompressed, and its length
		window[id] = initial - 5
		left[id] = most
		conn -= 5
	}
	piece := make([]byte, 16<<10)
	c.SetDeadline(time.Now().Add(20 * time.Second))
	for len(left) > 0 && !over {
		stuck := true
		for id, n := range left {
			n = min(n, len(piece), window[id], conn)
			if n <= 0 {
				continue
			}
			stuck = false
			if f.WriteData(id, false, piece[:n]) != nil {
				over = true
				break
			}
			window[id] -= n
			conn -= n
			sent += n
			if left[id] -= n; left[id] == 0 {
				delete(left, id)
			}
		}
		if stuck && !over {
			room.Wait()
		}
	}
	mu.Unlock()
	t.Cleanup(func() {
		c.Close()
		reading.Wait()
	})
	return sent
}

// A caller that has not asked for a dial cannot fill the memory of the cloud.
func TestProxyBeforeTheDial(t *testing.T) {
	r := newRig(t)
	other := r.client(t)
	id := other.dial(testkit.Serve(t, testkit.Echo))
	c, err := net.Dial("unix", r.grpc)
	if err != nil {
		t.Fatal(err)
	}
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	sent := hog(t, c, 8, 60<<20)
	runtime.GC()
	runtime.ReadMemStats(&after)
	held := int64(after.HeapAlloc) - int64(before.HeapAlloc)
	t.Logf("%d MiB sent, %d MiB held", sent>>20, held>>20)
	if held > 16<<20 {
		t.Errorf("%d MiB are held for a caller that has dialled nothing", held>>20)
	}
	other.send(konnectivity.Packet{Type: konnectivity.PacketData, ConnID: id, Data: []byte("still here")})
	if p := other.want(konnectivity.PacketData, "another connection goes on"); string(p.Data) != "still here" {
		t.Errorf("%q", p.Data)
	}
	other.send(konnectivity.Packet{Type: konnectivity.PacketCloseReq, ConnID: id})
	other.data(id)
	if n := r.door.cfg.Counters.LimitedBy(tunnel.LimitMessage); n != 1 {
		t.Errorf("counted %d times", n)
	}
}

// The first packet of a stream has a deadline, and must be a dial request.
func TestProxyFirstPacket(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		in := &packets{from: make(chan konnectivity.Packet)}
		p := &proxies{door: new(FrontDoor), conns: context.Background()}
		start := time.Now()
		err := p.handle(nil, in)
		if status.Code(err) != codes.DeadlineExceeded || time.Since(start) != requestTimeout {
			t.Errorf("%v after %v", err, time.Since(start))
		}
		close(in.from) // as gRPC does when the handler has returned
		p.working.Wait()
	})
	r := newRig(t)
	c := r.client(t)
	c.send(konnectivity.Packet{Type: konnectivity.PacketData, ConnID: 5, Data: []byte("too early")})
	c.want(konnectivity.PacketCloseRsp, "nothing has been dialled")
	if err := c.ended(); !errors.Is(err, io.EOF) {
		t.Errorf("the stream ends with %v", err)
	}
}

// Only streams without an answer are bounded. Frames are found however reads and writes split them.
func TestUnansweredConn(t *testing.T) {
	frame := func(typ, flags byte, stream uint32, length int) []byte {
		b := []byte{byte(length >> 16), byte(length >> 8), byte(length), typ, flags}
		return append(binary.BigEndian.AppendUint32(b, stream), make([]byte, length)...)
	}
	var in []byte
	in = append(in, http2.ClientPreface...)
	in = append(in, frame(0x4, 0, 0, 18)...) // settings
	for stream := uint32(1); stream <= 3; stream += 2 {
		in = append(in, frame(frameHeaders, 0x4, stream, 50)...)
		in = append(in, frame(frameData, 0, stream, maxUnanswered)...)
	}
	for _, piece := range []int{1, 7, 9, 1000, 1 << 20} {
		for name, tc := range map[string]struct {
			answer []byte // written before more is read
			more   []byte
			want   bool // the connection goes on
		}{
			"answered":            {frame(frameData, 0, 1, 20), frame(frameData, 0, 1, 1<<20), true},
			"ended by us":         {frame(frameHeaders, flagEnd, 1, 20), frame(frameData, 0, 1, 1), true},
			"reset by us":         {frame(frameReset, 0, 1, 4), frame(frameData, 0, 1, 1), true},
			"reset by the caller": {nil, append(frame(frameReset, 0, 1, 4), frame(frameData, 0, 1, 1)...), true},
			"only a header":       {frame(frameHeaders, 0x4, 1, 20), frame(frameData, 0, 1, 1), false},
			"another is answered": {frame(frameData, 0, 3, 20), frame(frameData, 0, 1, 1), false},
			"no answer":           {nil, frame(frameData, 0, 3, 1), false},
		} {
			c := newUnansweredConn(&pieces{rest: in, piece: piece}, new(tunnel.Counters))
			if n, err := io.Copy(io.Discard, c); err != nil || n != int64(len(in)) {
				t.Fatalf("%s, by %d: %d bytes, %v", name, piece, n, err)
			}
			for part := range bytesBy(tc.answer, piece) {
				c.Write(part)
			}
			c.Conn.(*pieces).rest = tc.more
			if _, err := io.Copy(io.Discard, c); (err == nil) != tc.want ||
				err != nil && !strings.Contains(err.Error(), errUnanswered.Error()) {
				t.Errorf("%s, by %d: %v", name, piece, err)
			}
			if len(c.streams) > 2 {
				t.Errorf("%s: %v", name, c.streams)
			}
		}
	}
}

// Streams that gRPC would refuse itself end the connection.
func TestStreamsThatGRPCAnswers(t *testing.T) {
	var most []uint32
	for i := range uint32(proxyStreams) {
		most = append(most, 2*i+1)
	}
	for name, tc := range map[string]struct {
		ids  []uint32
		want error
	}{
		"as many as a caller may begin": {most, nil},
		"one more":                      {append(slices.Clone(most), 2*proxyStreams+1), errStreams},
		"a stream again":                {[]uint32{1, 3, 3}, errStreams},
		"an older id":                   {[]uint32{1, 5, 3}, errStreams},
	} {
		wire := bytes.NewBufferString(http2.ClientPreface)
		f := http2.NewFramer(wire, nil)
		for _, id := range tc.ids {
			f.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: []byte("x"), EndHeaders: true})
		}
		counters := new(tunnel.Counters)
		c := newUnansweredConn(&pieces{rest: wire.Bytes(), piece: 1000}, counters)
		if _, err := io.Copy(io.Discard, c); !errors.Is(err, tc.want) {
			t.Errorf("%s: %v, want %v", name, err, tc.want)
		}
		if n := counters.LimitedBy(tunnel.LimitStreams); (n == 1) != (tc.want != nil) {
			t.Errorf("%s: the limit is counted %d times", name, n)
		}
	}
}

// pieces is a connection whose Reads return at most piece bytes of rest.
type pieces struct {
	net.Conn
	rest  []byte
	piece int
}

func (p *pieces) Read(b []byte) (int, error) {
	if len(p.rest) == 0 {
		return 0, io.EOF
	}
	n := copy(b, p.rest[:min(len(p.rest), p.piece)])
	p.rest = p.rest[n:]
	return n, nil
}

func (p *pieces) Write(b []byte) (int, error) { return len(b), nil }

func bytesBy(b []byte, n int) func(yield func([]byte) bool) {
	return func(yield func([]byte) bool) {
		for len(b) > 0 {
			k := min(n, len(b))
			if !yield(b[:k]) {
				return
			}
			b = b[k:]
		}
	}
}
