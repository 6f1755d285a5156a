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

	"tunnel/pkg/tunnel"
)

func TestProxyEcho(t *testing.T) {
	r := newRig(t)
	c := r.client(t)
	id := c.dial(listen(t, echo))
	sent := random(1 << 20)
	for part := sent; len(part) > 0; part = part[min(len(part), 100_000):] {
		c.send(packet{typ: packetData, connID: id, data: part[:min(len(part), 100_000)]})
		var got []byte
		for len(got) < min(len(part), 100_000) {
			p := c.want(packetData, "the target echoes")
			got = append(got, p.data...)
			p.free()
		}
		if !bytes.Equal(got, part[:len(got)]) {
			t.Fatal("other bytes came back")
		}
	}
	c.send(packet{typ: packetCloseReq, connID: id})
	if rest := c.data(id); len(rest) != 0 {
		t.Errorf("%d bytes after the close request", len(rest))
	}
	if err := c.ended(); !errors.Is(err, io.EOF) {
		t.Errorf("the stream ended with %v", err)
	}
}

// What was written before either side closes arrives, whole.
func TestProxyLosesNothing(t *testing.T) {
	r := newRig(t)
	sent := random(4<<20 + 17)
	t.Run("from the client", func(t *testing.T) {
		got := make(chan []byte, 1)
		c := r.client(t)
		id := c.dial(listen(t, func(conn *net.TCPConn) {
			time.Sleep(50 * time.Millisecond) // so that all of it is on the way
			b, err := io.ReadAll(conn)
			if err != nil {
				t.Error(err)
			}
			got <- b
		}))
		for part := sent; len(part) > 0; part = part[min(len(part), 64<<10):] {
			c.send(packet{typ: packetData, connID: id, data: part[:min(len(part), 64<<10)]})
		}
		c.send(packet{typ: packetCloseReq, connID: id})
		if b := <-got; !bytes.Equal(b, sent) {
			t.Errorf("%d of %d bytes arrived", len(b), len(sent))
		}
		c.data(id)
	})
	t.Run("from the target", func(t *testing.T) {
		c := r.client(t)
		id := c.dial(listen(t, func(conn *net.TCPConn) { conn.Write(sent) }))
		time.Sleep(50 * time.Millisecond)
		if b := c.data(id); !bytes.Equal(b, sent) {
			t.Errorf("%d of %d bytes arrived", len(b), len(sent))
		}
	})
	t.Run("in one packet", func(t *testing.T) {
		c := r.client(t)
		got := make(chan []byte, 1)
		id := c.dial(listen(t, func(conn *net.TCPConn) {
			b, _ := io.ReadAll(conn)
			got <- b
		}))
		big := random(20 << 20)
		c.send(packet{typ: packetData, connID: id, data: big})
		c.send(packet{typ: packetCloseReq, connID: id})
		if b := <-got; !bytes.Equal(b, big) {
			t.Errorf("%d of %d bytes arrived", len(b), len(big))
		}
	})
}

// A close request is the end of both directions, also while the target talks on.
func TestProxyCloseWhileTargetSends(t *testing.T) {
	r := newRig(t)
	c := r.client(t)
	ended := make(chan error, 1)
	id := c.dial(listen(t, func(conn *net.TCPConn) {
		for {
			if _, err := conn.Write(make([]byte, 1000)); err != nil {
				ended <- err
				return
			}
		}
	}))
	c.want(packetData, "the target sends")
	c.send(packet{typ: packetCloseReq, connID: id})
	c.ended() // with a close response, or an error: Linux resets a socket that is shut both ways and still gets data
	<-ended
}

func TestProxyTargetResets(t *testing.T) {
	r := newRig(t)
	for name, stalled := range map[string]bool{"client reads": false, "client reads nothing": true} {
		t.Run(name, func(t *testing.T) {
			c := r.client(t)
			reset := make(chan struct{})
			id := c.dial(listen(t, func(conn *net.TCPConn) {
				io.ReadFull(conn, make([]byte, 1)) // it is connected
				if stalled {
					conn.SetWriteDeadline(time.Now().Add(300 * time.Millisecond))
					conn.Write(make([]byte, 64<<20))
				}
				tunnel.Reset(conn)
				close(reset)
			}))
			c.send(packet{typ: packetData, connID: id, data: []byte("x")})
			<-reset
			if err := c.ended(); status.Code(err) != codes.Aborted {
				t.Errorf("the stream ended with %v", err)
			}
		})
	}
}

func TestProxyRefusals(t *testing.T) {
	r := newRig(t)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ln.Close()
	for name, tc := range map[string]struct{ protocol, addr, want string }{
		"nobody listens":  {"tcp", ln.Addr().String(), "refused"},
		"not an address":  {"tcp", "nowhere", "not host:port"},
		"not tcp":         {"udp", "127.0.0.1:1", "only tcp"},
		"a long address":  {"tcp", strings.Repeat("a", 32<<10) + ":1", ""},
		"nothing at all":  {"tcp", "", "not host:port"},
		"an empty host":   {"tcp", ":80", ""},
		"with a new line": {"tcp", "a\nb:80", ""},
	} {
		c := r.client(t)
		c.send(packet{typ: packetDialReq, protocol: tc.protocol, address: tc.addr, random: 9})
		rsp := c.want(packetDialRsp, name)
		if rsp.err == "" && tc.want != "" || !strings.Contains(rsp.err, tc.want) || rsp.random != 9 || rsp.err != "" && rsp.connID != 0 {
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
	c.send(packet{typ: packetData, connID: 5, data: []byte("too early")})
	if rsp := c.want(packetCloseRsp, "nothing has been dialled"); rsp.connID != 5 || rsp.err == "" {
		t.Errorf("%+v", rsp)
	}
	r.nodes.refuse[""] = tunnel.Refusef(tunnel.NoSuchNode, "no node is connected")
	c = r.client(t)
	c.send(packet{typ: packetDialReq, protocol: "tcp", address: "10.0.0.1:1"})
	if rsp := c.want(packetDialRsp, "there is no node"); rsp.err != "No agent available" {
		t.Errorf("%+v", rsp)
	}
}

// A dial that is not wanted any more is cancelled.
func TestProxyCancelsDials(t *testing.T) {
	for name, leave := range map[string]func(c *client){
		"by a packet":            func(c *client) { c.send(packet{typ: packetDialCls, random: 3}) },
		"by the stream's end":    func(c *client) { c.cancel() },
		"by closing the sending": func(c *client) { c.stream.CloseSend() },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			cancelled := make(chan struct{})
			r.nodes.hang = cancelled
			c := r.client(t)
			c.send(packet{typ: packetDialReq, protocol: "tcp", address: "10.0.0.1:1", random: 3})
			time.Sleep(10 * time.Millisecond) // so that it hangs; sooner is as well
			leave(c)
			<-cancelled
		})
	}
}

// Who leaves without a word resets the target.
func TestProxyClientVanishes(t *testing.T) {
	r := newRig(t)
	c := r.client(t)
	ended := make(chan error, 1)
	id := c.dial(listen(t, func(conn *net.TCPConn) {
		_, err := io.Copy(io.Discard, conn)
		ended <- err
	}))
	c.send(packet{typ: packetData, connID: id, data: []byte("half of a sente")})
	c.cancel()
	if err := <-ended; err == nil {
		t.Error("the target saw a clean end of half a message")
	}
}

// packets is a stream whose client is the test. It notes when two receive at once.
type packets struct {
	grpc.ServerStream
	from      chan packet // of the client; closed: it has left
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
	*m.(*packet) = in
	return nil
}

// When nobody wants the client's bytes any more, one goes on receiving, and no second, at
// whatever moment of a read that is said.
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
		for end, leave := range map[string]func(from chan packet){
			"with a close request": func(from chan packet) { from <- packet{typ: packetCloseReq, connID: theConn} },
			"without a word":       func(from chan packet) { close(from) },
		} {
			t.Run(name+", "+end, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					in := &packets{from: make(chan packet)}
					var working sync.WaitGroup
					s := &proxyStream{stream: in, working: &working, guard: func(_ string, do func() error) error { return do() }, over: make(chan struct{}), apart: newApart(), begun: true}
					stopped := make(chan struct{})
					s.OnStop(func() { close(stopped) })
					working.Go(func() {
						in.from <- packet{typ: packetData, connID: theConn, data: []byte("first")}
						time.Sleep(2 * time.Second)
						in.from <- packet{typ: packetData, connID: theConn, data: []byte("unwanted")}
						leave(in.from)
					})
					if b := make([]byte, 9); read(t, s, b) != "first" {
						t.Errorf("read %q", b)
					}
					err := say(s)
					if n, late := s.Read(make([]byte, 9)); n != 0 || !errors.Is(late, io.EOF) {
						t.Errorf("after that, %d bytes and %v were read", n, late)
					}
					if !errors.Is(err, tunnel.ErrReset) { // of which the splice knows itself
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

func read(t *testing.T, c net.Conn, b []byte) string {
	t.Helper()
	n, err := c.Read(b)
	if err != nil {
		t.Error(err)
	}
	return string(b[:n])
}
