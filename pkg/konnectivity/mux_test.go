package konnectivity

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/tunnel"
)

// fakeStream records sent packets, and has none to receive.
type fakeStream struct{ sent func(*Packet) }

func (s fakeStream) RecvMsg(any) error { panic("the owner of the mux receives") }

func (s fakeStream) SendMsg(m any) error {
	if s.sent != nil {
		s.sent(m.(*Packet))
	}
	return nil
}

// testMux returns a mux whose peer is the test.
func testMux(t *testing.T, agent bool, sent func(*Packet)) *mux {
	m := newMux(fakeStream{sent}, agent, new(tunnel.Counters), slog.New(slog.DiscardHandler))
	ended := make(chan struct{})
	go func() {
		m.sendLoop()
		close(ended)
	}()
	t.Cleanup(func() {
		m.end(errors.New("the test is over"))
		<-ended
	})
	return m
}

func (m *mux) testConn(t *testing.T, id int64) *Conn {
	t.Helper()
	c, err := m.add(id, func() {})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// receive delivers data, in packets.
func (m *mux) receive(id int64, data []byte) {
	for part := range slices.Chunk(data, DataSize) {
		m.deliver(&Packet{Type: PacketData, ConnID: id, Data: part})
	}
}

func (m *mux) cut() uint64 { return m.counters.LimitedBy(tunnel.LimitUnread) }

func (c *Conn) lastReadAt() time.Time {
	c.m.mu.Lock()
	defer c.m.mu.Unlock()
	return c.lastRead
}

// behindSocket splices c with a socket, and returns the other end of the socket.
func behindSocket(t *testing.T, network string, c *Conn) (far net.Conn, spliced <-chan error) {
	t.Helper()
	addr := "127.0.0.1:0"
	if network == "unix" {
		addr = filepath.Join(t.TempDir(), "s")
	}
	ln, err := net.Listen(network, addr)
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	far, err = net.Dial(network, ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	near, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	far.(interface{ SetReadBuffer(int) error }).SetReadBuffer(64 << 10)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _, err := tunnel.Splice(ctx, near, c)
		ended <- err
	}()
	t.Cleanup(func() {
		cancel()
		far.Close()
		<-done
	})
	return far, ended
}

// slowly reads n bytes, rate of them per second.
func slowly(r io.Reader, n, rate int) ([]byte, error) {
	all := make([]byte, n)
	for part := range slices.Chunk(all, rate/50) {
		time.Sleep(20 * time.Millisecond)
		if _, err := io.ReadFull(r, part); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// A slow but steady reader behind a socket keeps its conn. Its progress is seen in time, although the
// kernel wakes a writer only after much of the socket's buffer has been read.
func TestMuxSteadyReader(t *testing.T) {
	for network, part := range map[string]int{"tcp": 512 << 10, "unix": 128 << 10} {
		t.Run(network, func(t *testing.T) {
			t.Parallel()
			m := testMux(t, false, nil)
			c := m.testConn(t, 1)
			far, _ := behindSocket(t, network, c)
			want := testkit.Random(2 * maxUnread)
			delivered := make(chan struct{})
			go func() {
				m.receive(1, want)
				m.peerClosed(1, "")
				close(delivered)
			}()
			defer func() {
				far.Close()
				<-delivered
			}()
			testkit.Eventually(t, "the queue and the socket are full", func() bool {
				m.mu.Lock()
				defer m.mu.Unlock()
				return c.unread > maxUnread-2*DataSize && time.Since(c.lastRead) > 100*time.Millisecond
			})
			before := c.lastReadAt()
			got := make([]byte, part)
			if _, err := io.ReadFull(far, got); err != nil {
				t.Fatal(err)
			}
			testkit.Eventually(t, "what was taken shows", func() bool { return c.lastReadAt().After(before) || m.cut() > 0 })
			more, err := slowly(far, 300<<10, 200<<10)
			if err != nil {
				t.Fatalf("a steady reader, after %d bytes: %v", len(got), err)
			}
			rest, err := io.ReadAll(far)
			if got = slices.Concat(got, more, rest); err != nil || !bytes.Equal(got, want) || m.cut() != 0 {
				t.Errorf("%d bytes of %d, %v; %d conns were cut off", len(got), len(want), err, m.cut())
			}
		})
	}
}

// All bytes written before a close reach a slow but steady target, however long that takes. A target that
// reads nothing is reset.
func TestMuxCloseBehindData(t *testing.T) {
	want := testkit.Random(1 << 20)
	closed := func(t *testing.T, wait time.Duration) (far net.Conn, spliced <-chan error) {
		t.Parallel()
		m := testMux(t, true, nil)
		m.halfClosedTimeout = wait
		far, spliced = behindSocket(t, "tcp", m.testConn(t, 1))
		m.receive(1, want)
		m.peerClosed(1, "")
		return far, spliced
	}
	t.Run("steady", func(t *testing.T) {
		far, spliced := closed(t, 2*time.Second)
		got, err := slowly(far, len(want), len(want)*2/5)
		if err != nil || !bytes.Equal(got, want) {
			t.Fatalf("%d bytes of %d, %v", len(got), len(want), err)
		}
		if _, err := far.Read(got); !errors.Is(err, io.EOF) {
			t.Errorf("the end is %v", err)
		}
		far.Close()
		<-spliced
	})
	t.Run("stalled", func(t *testing.T) {
		far, spliced := closed(t, 100*time.Millisecond)
		<-spliced
		if _, err := io.Copy(io.Discard, far); !errors.Is(err, tunnel.ErrReset) {
			t.Errorf("the target sees %v", err)
		}
	})
}

// A caller that has half-closed its conn gets the whole answer, however slow. If the target falls silent,
// the caller sees a reset: the answer may be incomplete.
func TestMuxHalfOpen(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var sent []PacketType
		m := testMux(t, false, func(p *Packet) { sent = append(sent, p.Type) })
		c := m.testConn(t, 1)
		c.CloseWrite()
		b := make([]byte, 9)
		for range 5 {
			time.Sleep(halfClosedTimeout - time.Second)
			m.receive(1, []byte("part of an answer"))
			time.Sleep(halfClosedTimeout - time.Second)
			for range 2 {
				if _, err := c.Read(b); err != nil {
					t.Fatal(err)
				}
			}
		}
		m.receive(1, []byte("the last"))
		time.Sleep(2 * halfClosedTimeout) // the reader is slow
		if n, err := c.Read(b); err != nil || string(b[:n]) != "the last" {
			t.Fatalf("%q, %v", b[:n], err)
		}
		if n, err := c.Read(b); !errors.Is(err, tunnel.ErrReset) {
			t.Errorf("the answer of a target that is silent ends with %q, %v", b[:n], err)
		}
		synctest.Wait()
		if !slices.Equal(sent, []PacketType{PacketCloseReq}) {
			t.Errorf("the agent is told %v", sent)
		}
	})
}

// A close request follows the last data after closeDelay, however slow the stream is.
func TestMuxCloseKeepsItsDistance(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var last, closed time.Time
		m := testMux(t, false, func(p *Packet) {
			time.Sleep(3 * closeDelay)
			if p.Type == PacketData {
				last = time.Now()
			} else {
				closed = time.Now().Add(-3 * closeDelay)
			}
		})
		c := m.testConn(t, 1)
		c.Write(make([]byte, 2*DataSize))
		c.Close()
		time.Sleep(time.Minute)
		synctest.Wait()
		if d := closed.Sub(last); d < closeDelay {
			t.Errorf("the close follows after %v", d)
		}
	})
}

// If the queues of a stream are full together, the reader with the most unread bytes loses its conn, also
// after its peer has closed. While that reader makes progress, the stream waits.
func TestMuxFullTogether(t *testing.T) {
	for _, closed := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			m := testMux(t, false, nil)
			data := make([]byte, maxUnread*31/32)
			var stalled []*Conn
			for id := int64(1); m.unread+maxUnread/4 < maxUnreadOfStream; id++ {
				c := m.testConn(t, id)
				m.receive(id, data[:min(len(data), maxUnreadOfStream-m.unread-maxUnread/8)])
				if closed {
					m.peerClosed(id, "")
				}
				stalled = append(stalled, c)
			}
			whole := func(c *Conn, n int) {
				t.Helper()
				if got, err := io.ReadAll(c); err != nil || len(got) != n {
					t.Errorf("a conn beside stalled ones has %d bytes of %d, %v", len(got), n, err)
				}
			}
			other := m.testConn(t, 100)
			go func() {
				m.receive(100, data[:maxUnread/2])
				m.peerClosed(100, "")
			}()
			time.Sleep(stallTimeout / 2)
			for _, c := range stalled {
				c.Read(make([]byte, 1))
			}
			time.Sleep(stallTimeout - time.Millisecond)
			whole(other, maxUnread/2)
			if m.cut() != 0 {
				t.Error("a reader that takes something is cut off")
			}
			time.Sleep(stallTimeout)
			start := time.Now()
			for id := int64(101); id < 110; id++ {
				c := m.testConn(t, id)
				m.receive(id, data[:maxUnread/2])
				m.peerClosed(id, "")
				defer whole(c, maxUnread/2)
			}
			if d := time.Since(start); d != 0 || m.cut() < 3 {
				t.Errorf("the stream waits %v for readers that are known to take nothing, and cuts off %d", d, m.cut())
			}
			for _, c := range stalled {
				c.Close()
			}
		})
	}
}
