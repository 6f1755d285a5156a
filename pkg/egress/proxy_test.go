package egress

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/konnectivity"
	"tunnel.example/tunnel/pkg/tunnel"
)

func TestProxyEcho(t *testing.T) {
	r := newRig(t)
	c := r.client(t)
	id := c.dial(testkit.Serve(t, testkit.Echo))
	sent := testkit.Random(1 << 20)
	for part := sent; len(part) > 0; part = part[min(len(part), 100_000):] {
		c.send(konnectivity.Packet{Type: konnectivity.PacketData, ConnID: id, Data: part[:min(len(part), 100_000)]})
		var got []byte
		for len(got) < min(len(part), 100_000) {
			p := c.want(konnectivity.PacketData, "the target echoes")
			got = append(got, p.Data...)
			p.Free()
		}
		if !bytes.Equal(got, part[:len(got)]) {
			t.Fatal("other bytes came back")
		}
	}
	c.send(konnectivity.Packet{Type: konnectivity.PacketCloseReq, ConnID: id})
	if rest := c.data(id); len(rest) != 0 {
		t.Errorf("%d bytes after the close request", len(rest))
	}
	if err := c.ended(); !errors.Is(err, io.EOF) {
		t.Errorf("the stream ended with %v", err)
	}
}

// All bytes written before a close arrive, whichever side closes.
func TestProxyLosesNothing(t *testing.T) {
	r := newRig(t)
	sent := testkit.Random(4<<20 + 17)
	t.Run("from the client", func(t *testing.T) {
		got := make(chan []byte, 1)
		c := r.client(t)
		id := c.dial(testkit.Serve(t, func(conn *net.TCPConn) {
			time.Sleep(50 * time.Millisecond) // so that all bytes are in flight
			b, err := io.ReadAll(conn)
			if err != nil {
				t.Error(err)
			}
			got <- b
		}))
		for part := sent; len(part) > 0; part = part[min(len(part), 64<<10):] {
			c.send(konnectivity.Packet{Type: konnectivity.PacketData, ConnID: id, Data: part[:min(len(part), 64<<10)]})
		}
		c.send(konnectivity.Packet{Type: konnectivity.PacketCloseReq, ConnID: id})
		if b := <-got; !bytes.Equal(b, sent) {
			t.Errorf("%d of %d bytes arrived", len(b), len(sent))
		}
		c.data(id)
	})
	t.Run("from the target", func(t *testing.T) {
		c := r.client(t)
		id := c.dial(testkit.Serve(t, func(conn *net.TCPConn) { conn.Write(sent) }))
		time.Sleep(50 * time.Millisecond)
		if b := c.data(id); !bytes.Equal(b, sent) {
			t.Errorf("%d of %d bytes arrived", len(b), len(sent))
		}
	})
	t.Run("in one packet", func(t *testing.T) {
		c := r.client(t)
		got := make(chan []byte, 1)
		id := c.dial(testkit.Serve(t, func(conn *net.TCPConn) {
			b, _ := io.ReadAll(conn)
			got <- b
		}))
		big := testkit.Random(20 << 20)
		c.send(konnectivity.Packet{Type: konnectivity.PacketData, ConnID: id, Data: big})
		c.send(konnectivity.Packet{Type: konnectivity.PacketCloseReq, ConnID: id})
		if b := <-got; !bytes.Equal(b, big) {
			t.Errorf("%d of %d bytes arrived", len(b), len(big))
		}
	})
}

// A close request ends both directions, also while the target still sends.
func TestProxyCloseWhileTargetSends(t *testing.T) {
	r := newRig(t)
	c := r.client(t)
	ended := make(chan error, 1)
	id := c.dial(testkit.Serve(t, func(conn *net.TCPConn) {
		for {
			if _, err := conn.Write(make([]byte, 1000)); err != nil {
				ended <- err
				return
			}
		}
	}))
	c.want(konnectivity.PacketData, "the target sends")
	c.send(konnectivity.Packet{Type: konnectivity.PacketCloseReq, ConnID: id})
	// The stream ends with a close response or an error: Linux resets a socket that is shut down in both
	// directions and receives data.
	c.ended()
	<-ended
}

func TestProxyTargetResets(t *testing.T) {
	r := newRig(t)
	for name, stalled := range map[string]bool{"client reads": false, "client reads nothing": true} {
		t.Run(name, func(t *testing.T) {
			c := r.client(t)
			reset := make(chan struct{})
			id := c.dial(testkit.Serve(t, func(conn *net.TCPConn) {
				io.ReadFull(conn, make([]byte, 1)) // the conn is open
				if stalled {
					conn.SetWriteDeadline(time.Now().Add(300 * time.Millisecond))
					conn.Write(make([]byte, 64<<20))
				}
				tunnel.Reset(conn)
				close(reset)
			}))
			c.send(konnectivity.Packet{Type: konnectivity.PacketData, ConnID: id, Data: []byte("x")})
			<-reset
			if err := c.ended(); status.Code(err) != codes.Aborted {
				t.Errorf("the stream ended with %v", err)
			}
		})
	}
}

func TestProxyRefusals(t *testing.T) {
	r := newRig(t)
	for name, tc := range map[string]struct{ protocol, addr, want string }{
		"nobody listens":  {"tcp", testkit.FreeAddress(t), "refused"},
		"not an address":  {"tcp", "nowhere", "not host:port"},
		"not tcp":         {"udp", "127.0.0.1:1", "only tcp"},
		"a long address":  {"tcp", strings.Repeat("a", 32<<10) + ":1", ""},
		"nothing at all":  {"tcp", "", "not host:port"},
		"an empty host":   {"tcp", ":80", ""},
		"with a new line": {"tcp", "a\nb:80", ""},
	} {
		c := r.client(t)
		c.send(konnectivity.Packet{Type: konnectivity.PacketDialReq, Protocol: tc.protocol, Address: tc.addr, Random: 9})
		rsp := c.want(konnectivity.PacketDialRsp, name)
		if rsp.Err == "" && tc.want != "" || !strings.Contains(rsp.Err, tc.want) || rsp.Random != 9 ||
			rsp.Err != "" && rsp.ConnID != 0 {
			t.Errorf("%s: %+v", name, rsp)
		}
		if tc.want != "" {
			if err := c.ended(); !errors.Is(err, io.EOF) {
				t.Errorf("%s: the stream ended with %v", name, err)
			}
		}
		c.cancel()
	}
	c := r.client(t)
	c.send(konnectivity.Packet{Type: konnectivity.PacketData, ConnID: 5, Data: []byte("too early")})
	if rsp := c.want(konnectivity.PacketCloseRsp, "nothing has been dialled"); rsp.ConnID != 5 || rsp.Err == "" {
		t.Errorf("%+v", rsp)
	}
	r.nodes.refuse[""] = tunnel.Refusef(tunnel.NoSuchNode, "no node is connected")
	c = r.client(t)
	c.send(konnectivity.Packet{Type: konnectivity.PacketDialReq, Protocol: "tcp", Address: "10.0.0.1:1"})
	if rsp := c.want(konnectivity.PacketDialRsp, "there is no node"); rsp.Err != "No agent available" {
		t.Errorf("%+v", rsp)
	}
}

// A dial is cancelled when its caller gives it up.
func TestProxyCancelsDials(t *testing.T) {
	for name, leave := range map[string]func(c *client){
		"by a packet": func(c *client) {
			c.send(konnectivity.Packet{Type: konnectivity.PacketDialCls, Random: 3})
		},
		"by the stream's end":    func(c *client) { c.cancel() },
		"by closing the sending": func(c *client) { c.stream.CloseSend() },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			cancelled := make(chan struct{})
			r.nodes.hang = cancelled
			c := r.client(t)
			c.send(konnectivity.Packet{Type: konnectivity.PacketDialReq, Protocol: "tcp", Address: "10.0.0.1:1", Random: 3})
			testkit.Eventually(t, "the dial waits", func() bool {
				r.nodes.mu.Lock()
				defer r.nodes.mu.Unlock()
				return len(r.nodes.dialled) == 1
			})
			leave(c)
			<-cancelled
		})
	}
}

// A stream that ends without a close request resets the target.
func TestProxyClientVanishes(t *testing.T) {
	r := newRig(t)
	c := r.client(t)
	ended := make(chan error, 1)
	id := c.dial(testkit.Serve(t, func(conn *net.TCPConn) {
		_, err := io.Copy(io.Discard, conn)
		ended <- err
	}))
	c.send(konnectivity.Packet{Type: konnectivity.PacketData, ConnID: id, Data: []byte("half of a sente")})
	c.cancel()
	if err := <-ended; err == nil {
		t.Error("the target saw a clean end of half a message")
	}
}

// fill sends data until the target, which reads nothing, takes no more.
func (c *client) fill(id int64) {
	c.t.Helper()
	var sent atomic.Int64
	go func() {
		data := make([]byte, 64<<10)
		for c.stream.SendMsg(&konnectivity.Packet{Type: konnectivity.PacketData, ConnID: id, Data: data}) == nil {
			sent.Add(1)
		}
	}()
	for before := int64(-1); before != sent.Load(); time.Sleep(time.Second) {
		before = sent.Load()
	}
}

// The conn of a client that vanishes ends, although its target takes no bytes.
func TestProxyClientVanishesFromStalledTarget(t *testing.T) {
	r := newRig(t)
	c := r.client(t)
	release := make(chan struct{})
	defer close(release)
	c.fill(c.dial(testkit.Serve(t, func(*net.TCPConn) { <-release })))
	c.cancel()
	testkit.Eventually(t, "the conn ends", func() bool { return r.door.metrics.inFlight[doorGRPC].conns.Load() == 0 })
}

// A listener that breaks ends the front door, also while a target takes no bytes.
func TestProxyListenerBreaks(t *testing.T) {
	r := newRig(t)
	ln, err := net.Listen("unix", r.grpc+".other")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1) // capacity 1, so that the send never blocks
	go func() { served <- r.door.serveGRPC(t.Context(), ln, nil) }()
	other := &rig{grpc: r.grpc + ".other"}
	c := other.client(t)
	release := make(chan struct{})
	defer close(release)
	c.fill(c.dial(testkit.Serve(t, func(*net.TCPConn) { <-release })))
	ln.Close()
	select {
	case err := <-served:
		if err == nil {
			t.Error("no error")
		}
	case <-time.After(time.Minute):
		t.Error("the front door goes on")
	}
}

// Conns of a twin's callers, which nobody authenticates, count as conns that any pod can cause.
func TestTwinsCountForPods(t *testing.T) {
	r := newRig(t)
	echo := testkit.Serve(t, testkit.Echo)
	twin := testkit.Serve(t, func(c *net.TCPConn) { r.door.Serve(t.Context(), c, echo) })
	c, err := net.Dial("tcp", twin)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.Write([]byte("x"))
	if _, err = io.ReadFull(c, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	r.client(t).dial(echo)
	r.nodes.mu.Lock()
	defer r.nodes.mu.Unlock()
	if len(r.nodes.dialled) != 2 || r.nodes.byPods != 1 {
		t.Errorf("%d of %d conns count as those of pods", r.nodes.byPods, len(r.nodes.dialled))
	}
}

// packets is a stream whose client is the test. It detects concurrent calls of RecvMsg.
type packets struct {
	grpc.ServerStream
	from      chan konnectivity.Packet // sent by the client; closed: the client has left
	receivers atomic.Int32
	tooMany   atomic.Bool
}

func (p *packets) Context() context.Context { return context.Background() }

func (p *packets) RecvMsg(m any) error {
	if p.receivers.Add(1) > 1 {
		p.tooMany.Store(true)
	}
	defer p.receivers.Add(-1)
	in, ok := <-p.from
	if !ok {
		return io.EOF
	}
	*m.(*konnectivity.Packet) = in
	return nil
}

// After CloseRead exactly one goroutine goes on receiving, at whatever moment of a Read the call comes.
func TestProxyCloseRead(t *testing.T) {
	for name, say := range map[string]func(s *proxyStream) error{
		"between two reads": (*proxyStream).CloseRead,
		"while one waits": func(s *proxyStream) error {
			time.AfterFunc(time.Second, func() { s.CloseRead() })
			_, err := s.Read(make([]byte, 9))
			return err
		},
		"when one has got something": func(s *proxyStream) error {
			s.mayRead()
			defer s.hasRead()
			return s.CloseRead()
		},
	} {
		for end, leave := range map[string]func(from chan konnectivity.Packet){
			"with a close request": func(from chan konnectivity.Packet) {
				from <- konnectivity.Packet{Type: konnectivity.PacketCloseReq, ConnID: onlyConn}
			},
			"without a word": func(from chan konnectivity.Packet) { close(from) },
		} {
			t.Run(name+", "+end, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					in := &packets{from: make(chan konnectivity.Packet)}
					var working sync.WaitGroup
					s := &proxyStream{stream: in, working: &working, guard: noGuard, over: make(chan struct{}),
						gap: newAnswerGap(), begun: true}
					stopped := make(chan struct{})
					s.OnStop(func() { close(stopped) })
					working.Go(func() {
						in.from <- konnectivity.Packet{Type: konnectivity.PacketData, ConnID: onlyConn, Data: []byte("first")}
						time.Sleep(2 * time.Second)
						in.from <- konnectivity.Packet{Type: konnectivity.PacketData, ConnID: onlyConn, Data: []byte("unwanted")}
						leave(in.from)
					})
					if b := make([]byte, 9); read(t, s, b) != "first" {
						t.Errorf("read %q", b)
					}
					err := say(s)
					if n, late := s.Read(make([]byte, 9)); n != 0 || !errors.Is(late, io.EOF) {
						t.Errorf("after that, %d bytes and %v were read", n, late)
					}
					if !errors.Is(err, tunnel.ErrReset) { // on a reset, the splice sees it in Read
						<-stopped
					}
					working.Wait()
					if in.tooMany.Load() {
						t.Error("two have received at once")
					}
				})
			})
		}
	}
}

func noGuard(_ string, do func() error) error { return do() }

func read(t *testing.T, c net.Conn, b []byte) string {
	t.Helper()
	n, err := c.Read(b)
	if err != nil {
		t.Error(err)
	}
	return string(b[:n])
}

// A packet with maxData bytes of data is accepted, whatever the id of its conn.
func TestMostDataFits(t *testing.T) {
	p := &konnectivity.Packet{Type: konnectivity.PacketData, ConnID: -1, Data: make([]byte, maxData)}
	wire, err := konnectivity.NewCodec().Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	defer wire.Free()
	if n := wire.Len(); n > maxPacket {
		t.Errorf("%d bytes, and %d are accepted", n, maxPacket)
	}
}
