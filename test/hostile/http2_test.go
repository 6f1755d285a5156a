package hostile

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"tunnel.example/tunnel/pkg/auth"
	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
)

// connection is what the cloud may hold for one connection of somebody who has not
// joined: TLS, gRPC's buffers, and the metadata of a stream.
const connection = 256 << 10

// joining is how many connections without a session one source may have.
const joining = 128

// TestHostileHTTP2 is strangers and an edge that break HTTP/2 at the gRPC port.
func TestHostileHTTP2(t *testing.T) {
	newLab(t, nil, "").endure(http2Attacks())
}

func http2Attacks() []attack {
	tooMuch := []string{"GOAWAY ENHANCE_YOUR_CALM", "closed"}
	// The status can be behind the end of the connection.
	flooded := []string{"closed", "ResourceExhausted"}
	return []attack{
		{name: "half a handshake", offend: halfHandshakes("grpc"), alone: true, answers: []string{"closed", "endured"},
			counter: limited("joiningperaddress"), holds: joining * connection},
		{name: "handshakes and no more", offend: idleHandshakes, alone: true, answers: []string{"closed", "endured"},
			holds: joining * connection},
		{name: "no TLS", offend: noTLS, answers: []string{"closed"}, holds: 2 * connection},
		{name: "rapid resets of a stranger", offend: framed(false, rapidResets),
			answers: append(flooded, "FailedPrecondition"), holds: 2 * mib},
		{name: "rapid resets of an edge", offend: framed(true, rapidResets), answers: flooded,
			counter: limited("streams"), holds: 2 * mib},
		{name: "streams that gRPC refuses itself, of a stranger", offend: framed(false, refusedByGRPC),
			answers: []string{"closed", "InvalidArgument"}, counter: limited("streams"), holds: 2 * connection},
		{name: "streams that gRPC refuses itself, of an edge", offend: framed(true, refusedByGRPC), answers: flooded,
			counter: limited("streams"), holds: 2 * mib},
		{name: "streams that gRPC refuses itself in long answers", offend: framed(true, refusedAtLength), answers: flooded,
			counter: limited("streams"), holds: 2 * refused * 4 * longType},
		{name: "pings", offend: framed(true, pings), answers: tooMuch, holds: 2 * connection},
		{name: "pings of a stranger", offend: framed(false, pings), answers: tooMuch, holds: 2 * connection},
		{name: "settings", offend: framed(true, settings), answers: flooded, counter: limited("frames"),
			holds: 2 * connection},
		{name: "priorities", offend: framed(true, priorities), answers: flooded, counter: limited("frames"),
			holds: 2 * connection},
		{name: "window updates", offend: framed(true, windowUpdates), answers: flooded, counter: limited("frames"),
			holds: 2 * connection},
		{name: "resets of nothing", offend: framed(true, resetsOfNothing), answers: flooded, counter: limited("frames"),
			holds: 2 * connection},
		{name: "metadata of 1 MB", offend: framed(false, longMetadata),
			answers: []string{"closed", "RST ENHANCE_YOUR_CALM", "RST FRAME_SIZE_ERROR", "RST PROTOCOL_ERROR",
				"GOAWAY PROTOCOL_ERROR", "GOAWAY ENHANCE_YOUR_CALM"}, holds: 2 * connection},
		{name: "metadata without end", offend: framed(true, endlessMetadata),
			answers: []string{"closed", "GOAWAY PROTOCOL_ERROR", "GOAWAY ENHANCE_YOUR_CALM", "GOAWAY COMPRESSION_ERROR"},
			holds:   2 * connection},
		{name: "a frame of 1 MB", offend: framed(true, longFrame), answers: []string{"closed", "GOAWAY FRAME_SIZE_ERROR"},
			holds: 2 * connection},
		{name: "methods that there are not", offend: framed(true, unknownMethods), answers: flooded,
			counter: limited("streams"), holds: 2 * mib},
	}
}

// halfHandshakes opens more connections than a source may have, begins a handshake on
// each and goes no further.
func halfHandshakes(door string) func(ctx context.Context, v *victim, _ string) string {
	return func(ctx context.Context, v *victim, _ string) string {
		return hold(ctx, 3*joining, perConnection, func() (net.Conn, error) {
			c, err := attackerDial(ctx, v.Addr[door])
			if err == nil {
				_, err = c.Write([]byte{22, 3, 1, 2, 0, 1, 0})
			}
			return c, err
		})
	}
}

// How long who holds many connections waits before the next one.
const (
	perConnection = 2 * time.Millisecond
	perHandshake  = 20 * time.Millisecond
)

// hold opens connections one after the other and waits until one is closed by the other
// side, or until ctx is done.
func hold(ctx context.Context, n int, pause time.Duration, open func() (net.Conn, error)) string {
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan struct{}, n)
	var held sync.WaitGroup
	defer held.Wait()
	defer cancel()
	for range n {
		c, err := open()
		if err != nil {
			if ctx.Err() != nil {
				return "endured"
			}
			return "closed"
		}
		context.AfterFunc(ctx, func() { c.Close() })
		held.Go(func() {
			io.Copy(io.Discard, c)
			ended <- struct{}{}
		})
		select {
		case <-time.After(pause):
		case <-ctx.Done():
		}
	}
	select {
	case <-ctx.Done():
		return "endured"
	case <-ended:
	}
	// It was one too many, or its time was over. The others stay a little longer.
	select {
	case <-ctx.Done():
	case <-time.After(time.Second):
	}
	return "closed"
}

func idleHandshakes(ctx context.Context, v *victim, _ string) string {
	return hold(ctx, joining/2, perHandshake, func() (net.Conn, error) {
		c, err := attackerDial(ctx, v.Addr["grpc"])
		if err != nil {
			return nil, err
		}
		tc := tls.Client(c, v.edgeTLS())
		return tc, tc.HandshakeContext(ctx)
	})
}

func noTLS(ctx context.Context, v *victim, _ string) string {
	c, err := attackerDial(ctx, v.Addr["grpc"])
	if err != nil {
		return err.Error()
	}
	defer c.Close()
	io.WriteString(c, http2.ClientPreface)
	io.Copy(io.Discard, c)
	return "closed"
}

// framer is HTTP/2 written frame by frame.
type framer struct {
	*http2.Framer
	ctx    context.Context
	next   uint32 // stream
	head   bytes.Buffer
	enc    *hpack.Encoder
	answer chan string // one: what the connection, or the control stream, has ended with
	full   chan string // one: a stream was refused because there are too many

	mu sync.Mutex // one writer at a time: acknowledgements come between
}

// framed returns an attack on a connection, of an edge that has joined or of a stranger.
func framed(joined bool, attack func(f *framer) error) func(ctx context.Context, v *victim, as string) string {
	return func(ctx context.Context, v *victim, as string) string {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		raw, err := attackerDial(ctx, v.Addr["grpc"])
		if err != nil {
			return err.Error()
		}
		defer raw.Close()
		c := tls.Client(raw, v.edgeTLS())
		if _, err = io.WriteString(c, http2.ClientPreface); err != nil {
			return "closed"
		}
		f := &framer{Framer: http2.NewFramer(c, c), ctx: ctx, next: 1, answer: make(chan string, 1),
			full: make(chan string, 1)}
		f.enc = hpack.NewEncoder(&f.head)
		f.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
		f.AllowIllegalWrites = true
		if err := f.WriteSettings(); err != nil {
			return "closed"
		}
		session := make(chan struct{})
		go f.read(session)
		if joined {
			f.control(as, v.token(as))
			select {
			case <-session:
			case answer := <-f.answer:
				return answer
			case <-time.After(hangs):
				return "no session"
			}
		}
		err = attack(f)
		if said, ok := errors.AsType[answered](err); ok {
			return string(said)
		}
		if ctx.Err() != nil {
			return "endured"
		} else if err == nil || errors.Is(err, errEndured) {
			select {
			case answer := <-f.answer:
				return answer
			case <-ctx.Done():
				return "endured"
			case <-time.After(hangs):
				return "endured"
			}
		}
		select {
		case answer := <-f.answer:
			return answer
		case <-time.After(3 * time.Second):
			return "closed"
		}
	}
}

// answered is an answer that an attack itself has seen.
type answered string

func (a answered) Error() string { return string(a) }

var errEndured = errors.New("said all, and nobody minded")

// read reads frames until the connection ends. session is closed when the control stream
// has the cloud's hello.
func (f *framer) read(session chan struct{}) {
	answer := "closed"
	defer func() { f.answer <- answer }()
	for {
		frame, err := f.ReadFrame()
		if err != nil {
			return
		}
		switch frame := frame.(type) {
		case *http2.DataFrame:
			if frame.StreamID == 1 && session != nil {
				close(session)
				session = nil
			}
		case *http2.GoAwayFrame:
			answer = "GOAWAY " + frame.ErrCode.String()
			if frame.ErrCode == http2.ErrCodeNo {
				answer = "closed"
			}
		case *http2.RSTStreamFrame:
			if frame.ErrCode == http2.ErrCodeRefusedStream {
				select {
				case f.full <- "RST " + frame.ErrCode.String():
				default:
				}
			}
			if answer == "closed" && frame.ErrCode != http2.ErrCodeNo && frame.ErrCode != http2.ErrCodeCancel {
				answer = "RST " + frame.ErrCode.String()
			}
		case *http2.MetaHeadersFrame:
			for _, h := range frame.Fields {
				if h.Name == "grpc-status" && frame.StreamID == 1 {
					n, _ := strconv.Atoi(h.Value)
					answer = codes.Code(n).String()
				}
			}
		case *http2.SettingsFrame:
			if !frame.IsAck() {
				f.mu.Lock()
				f.WriteSettingsAck()
				f.mu.Unlock()
			}
		}
	}
}

// headers begins a call and returns its stream.
func (f *framer) headers(method string, more ...string) (uint32, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	id := f.next
	f.next += 2
	f.head.Reset()
	for _, h := range [][2]string{
		{":method", "POST"}, {":scheme", "https"}, {":path", method}, {":authority", "tunnel.cloud.io"},
		{"content-type", "application/grpc"}, {"te", "trailers"},
	} {
		f.enc.WriteField(hpack.HeaderField{Name: h[0], Value: h[1]})
	}
	for i := 0; i+1 < len(more); i += 2 {
		f.enc.WriteField(hpack.HeaderField{Name: more[i], Value: more[i+1]})
	}
	return id, f.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: f.head.Bytes(), EndHeaders: true})
}

const (
	connectMethod = "/tunnel.v1.Stream/Connect"
	controlMethod = "/tunnel.v1.Stream/TunnelStreaming"
)

// control joins as a node.
func (f *framer) control(node string, token auth.Secret) {
	id, err := f.headers(controlMethod, "authorization", "Bearer "+auth.EncodeToken(node, token))
	if err != nil {
		return
	}
	hello, _ := proto.Marshal(&pb.Hello{Version: 1})
	m, _ := proto.Marshal(&pb.StreamMsg{Category: "stream", Type: "hello", Data: hello})
	prefix := binary.BigEndian.AppendUint32([]byte{0}, uint32(len(m)))
	f.mu.Lock()
	defer f.mu.Unlock()
	f.WriteData(id, false, append(prefix, m...))
}

// refusedByGRPC opens streams with a content type that gRPC does not know. gRPC refuses each stream in an answer that
// quotes the content type, and the quote is four times as long. The first stream puts the content type into the table
// of HPACK. Each further stream refers to the table, and so costs the sender only some ten bytes.
func refusedByGRPC(f *framer) error {
	long := strings.Repeat("\xff", 4052) // with its name, as much as fits into the table of HPACK
	return pace(f.ctx, frames, func() error {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.head.Reset()
		f.enc.WriteField(hpack.HeaderField{Name: "content-type", Value: long})
		id := f.next
		f.next += 2
		return f.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: f.head.Bytes(), EndHeaders: true})
	})
}

const (
	// longType is the length of the content type of refusedAtLength: nearly all the metadata that a stream may have.
	longType = 28 << 10
	// refused is how many streams of a session gRPC refuses at most.
	refused = 33
)

// refusedAtLength is refusedByGRPC with a content type that is too long for the table of HPACK. So each stream costs
// the sender as many bytes.
func refusedAtLength(f *framer) error {
	long := strings.Repeat("\xff", longType)
	return pace(f.ctx, flood, func() error {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.head.Reset()
		f.enc.WriteField(hpack.HeaderField{Name: "content-type", Value: long, Sensitive: true})
		id, block := f.next, f.head.Bytes()
		f.next += 2
		first := true
		for len(block) > 0 {
			part := block[:min(len(block), 16<<10)] // the longest frame that HTTP/2 permits without a setting
			block = block[len(part):]
			last := len(block) == 0
			var err error
			if first {
				err = f.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: part, EndHeaders: last})
			} else {
				err = f.WriteContinuation(id, last, part)
			}
			if err != nil {
				return err
			}
			first = false
		}
		return nil
	})
}

// rapidResets opens streams and resets them at once (CVE-2023-44487).
func rapidResets(f *framer) error {
	return pace(f.ctx, flood, func() error {
		id, err := f.headers(connectMethod, "topic", fmt.Sprintf("topic-%d", f.next))
		if err != nil {
			return err
		}
		f.mu.Lock()
		defer f.mu.Unlock()
		return f.WriteRSTStream(id, http2.ErrCodeCancel)
	})
}

func pings(f *framer) error {
	return pace(f.ctx, flood, func() error {
		f.mu.Lock()
		defer f.mu.Unlock()
		return f.WritePing(false, [8]byte{1})
	})
}

// frames is how many frames without data an attacker sends in a second: some times what it
// may (8,000, and 4 for each open).
const frames = 40000

// floods sends frames without data.
func (f *framer) floods(write func() error) error {
	return pace(f.ctx, frames, func() error {
		f.mu.Lock()
		defer f.mu.Unlock()
		return write()
	})
}

func settings(f *framer) error {
	return f.floods(func() error {
		return f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: f.next % 1000})
	})
}

func priorities(f *framer) error {
	return f.floods(func() error { return f.WritePriority(1, http2.PriorityParam{Weight: 1}) })
}

func windowUpdates(f *framer) error {
	return f.floods(func() error { return f.WriteWindowUpdate(0, 1) })
}

// resetsOfNothing resets a stream that has ended.
func resetsOfNothing(f *framer) error {
	id, err := f.headers(connectMethod, "topic", "none")
	if err != nil {
		return err
	}
	return f.floods(func() error { return f.WriteRSTStream(id, http2.ErrCodeCancel) })
}

// longMetadata begins a call with 1 MB of metadata.
func longMetadata(f *framer) error { return continuations(f, mib/(8<<10)) }

// endlessMetadata begins a call whose metadata has no end (CVE-2023-45288).
func endlessMetadata(f *framer) error { return continuations(f, -1) }

// continuations sends n frames of 8 KiB of metadata, -1 without end.
func continuations(f *framer, n int) error {
	id := f.next
	f.next += 2
	f.head.Reset()
	f.enc.WriteField(hpack.HeaderField{Name: ":method", Value: "POST"})
	write := func(first, last bool) error {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.enc.WriteField(hpack.HeaderField{Name: "x", Value: strings.Repeat("\x00", 6<<10), Sensitive: true})
		defer f.head.Reset()
		if first {
			return f.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: f.head.Bytes()})
		}
		return f.WriteContinuation(id, last, f.head.Bytes())
	}
	for i := 0; i != n; i++ {
		if err := write(i == 0, i == n-1); err != nil {
			return err
		}
		if f.ctx.Err() != nil {
			return f.ctx.Err()
		}
	}
	return errEndured
}

// longFrame sends a frame of 1 MB.
func longFrame(f *framer) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.WriteRawFrame(http2.FrameData, 0, 1, make([]byte, mib)); err != nil {
		return err
	}
	return errEndured
}

func unknownMethods(f *framer) error {
	return pace(f.ctx, flood, func() error {
		_, err := f.headers("/no.such.Service/Method")
		return err
	})
}
