package stream

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/conn"
	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

func TestBucket(t *testing.T) {
	bubble(t, func(t *testing.T) {
		b := newBucket(10)
		takes := func() (n int) {
			for b.take() {
				n++
			}
			return n
		}
		want := func(why string, n int) {
			t.Helper()
			if got := takes(); got != n {
				t.Errorf("%s: %d, want %d", why, got, n)
			}
		}
		want("a full one holds two seconds' worth", 20)
		want("an empty one holds nothing", 0)
		time.Sleep(500 * time.Millisecond)
		want("half a second brings half of a second's worth", 5)
		time.Sleep(time.Hour)
		want("an hour fills it and no more", 20)
		for range 100 { // what is taken at the rate never ends
			time.Sleep(100 * time.Millisecond)
			want("a tenth of a second", 1)
		}
		if d := b.wait(); d < 99*time.Millisecond || d > 101*time.Millisecond {
			t.Errorf("the next one is there in %s, want 100ms", d)
		}
		b.most = 6
		b.allow(4)
		b.allow(4)
		want("what was allowed besides, at most", 6)
		if d := b.wait(); d <= 99*time.Millisecond || d > 100*time.Millisecond {
			t.Errorf("the next one is there in %s, want 100ms", d)
		}
		b.most = 6
		b.allow(4)
		b.allow(4)
		want("what was allowed besides, at most", 6)
	})
}

func (r *rig) wantLimited(l tunnel.Limit, n uint64) {
	r.t.Helper()
	if got := r.counters.LimitedBy(l); got != n {
		r.t.Errorf("limit %s was counted %d times, want %d", l, got, n)
	}
}

// wantOverloaded checks the refusal of one open too many: it names the limit and the node.
func wantOverloaded(t *testing.T, err error, l tunnel.Limit) {
	t.Helper()
	if err == nil || tunnel.CodeOf(err) != tunnel.Overloaded || !strings.Contains(err.Error(), "limit "+l.String()+": ") || !strings.Contains(err.Error(), "edge1") {
		t.Errorf("got %v, want overloaded by limit %s for edge1", err, l)
	}
}

func refuses(context.Context, tunnel.Request) (net.Conn, error) {
	return nil, tunnel.Refusef(tunnel.Refused, "nothing listens")
}

// Opens beyond the rate of a node wait for it, and none is refused. Another node has its own.
func TestOpensLimit(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		r.join("edge1", refuses)
		r.join("edge2", refuses)
		start := time.Now()
		var opened atomic.Int64
		var callers sync.WaitGroup
		for range 50 {
			callers.Go(func() {
				if _, err := r.dial("edge1", "target:1"); tunnel.CodeOf(err) != tunnel.Refused {
					t.Errorf("an open: %v", err)
				}
				opened.Add(1)
			})
		}
		want := func(n int64) {
			t.Helper()
			synctest.Wait()
			if got := opened.Load(); got < n || got > n+1 {
				t.Errorf("%d opens in %s, want %d", got, time.Since(start), n)
			}
		}
		time.Sleep(10 * time.Millisecond)
		want(20) // those of two seconds
		if _, err := r.dial("edge2", "target:1"); tunnel.CodeOf(err) != tunnel.Refused || time.Since(start) > time.Second/2 {
			t.Errorf("an open of another node: %v after %s", err, time.Since(start))
		}
		_, err := r.dir.Dial(t.Context(), tunnel.Request{Node: "edge1", Category: "tcp", Network: "tcp", Addr: "target:1", NoWait: true})
		wantOverloaded(t, err, tunnel.LimitOpens)
		time.Sleep(time.Second)
		want(30)
		time.Sleep(time.Second)
		want(40)
		callers.Wait()
		if took := time.Since(start); took < 2900*time.Millisecond || took > 3200*time.Millisecond {
			t.Errorf("50 opens took %s, want 3s", took)
		}
		r.wantLimited(tunnel.LimitOpens, 0)
		if n := r.counters.Refusals(tunnel.Overloaded); n != 0 {
			t.Errorf("%d refusals are counted as overloaded", n)
		}
	}, func(c *ServerConfig) { c.Limits.Opens = 10 })
}

// A flood of one address does not starve callers at another one of the same node, also when
// it fills the queue.
func TestFloodOfOneAddress(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		r.join("edge1", refuses)
		dial := func(caller string) error {
			ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
			defer cancel()
			_, err := r.dir.Dial(ctx, tunnel.Request{Node: "edge1", Category: "tcp", Network: "tcp", Addr: "target:1", Caller: caller})
			return err
		}
		var flood sync.WaitGroup
		var refused atomic.Int64
		for i := range 1000 {
			flood.Go(func() {
				if tunnel.CodeOf(dial(fmt.Sprint("10.0.0.1:", i))) == tunnel.Overloaded {
					refused.Add(1)
				}
			})
		}
		synctest.Wait()
		for i := range 20 {
			start := time.Now()
			if err := dial(fmt.Sprint("10.0.0.2:", i)); tunnel.CodeOf(err) != tunnel.Refused || time.Since(start) > time.Second/2 {
				t.Errorf("an open of another address: %v after %s", err, time.Since(start))
			}
		}
		flood.Wait()
		if n := refused.Load(); n < 800 {
			t.Errorf("%d of 1,000 opens were refused: there was no flood", n)
		}
	}, func(c *ServerConfig) { c.Limits.Opens, c.Limits.Conns, c.Limits.Dials = 10, 50, 50 })
}

// So many opens are asked of a node at a time; the next ones wait for an answer, in order.
// One that is answered, or given up, makes room.
func TestDialsLimit(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		asked, answer := make(chan string, 10), make(chan struct{})
		r.join("edge1", func(ctx context.Context, q tunnel.Request) (net.Conn, error) {
			asked <- q.Addr
			select {
			case <-answer:
			case <-ctx.Done():
			}
			return nil, tunnel.Refusef(tunnel.Refused, "nothing listens")
		})
		var giveUp []func()
		var waiting sync.WaitGroup
		dial := func(ctx context.Context, addr string) error {
			_, err := r.dir.Dial(ctx, tunnel.Request{Node: "edge1", Category: "tcp", Network: "tcp", Addr: addr})
			return err
		}
		for _, addr := range []string{"a:1", "b:1", "c:1"} {
			ctx, cancel := context.WithCancel(t.Context())
			giveUp = append(giveUp, cancel)
			waiting.Go(func() {
				if err := dial(ctx, addr); tunnel.CodeOf(err) != tunnel.Gone {
					t.Errorf("an open that was given up: %v", err)
				}
			})
			<-asked
		}
		var others sync.WaitGroup
		for _, addr := range []string{"d:1", "e:1"} {
			others.Go(func() {
				if err := dial(t.Context(), addr); tunnel.CodeOf(err) != tunnel.Refused {
					t.Errorf("an open that has waited: %v", err)
				}
			})
			synctest.Wait()
		}
		if n := r.counters.Waiting.Load(); n != 2 {
			t.Errorf("%d opens wait, want 2", n)
		}
		time.Sleep(time.Second)
		for i, want := range []string{"d:1", "e:1"} { // each takes the place of one that is given up
			giveUp[i]()
			if addr := <-asked; addr != want {
				t.Errorf("the next one is %s, want %s", addr, want)
			}
		}
		giveUp[2]()
		waiting.Wait()
		close(answer)
		others.Wait()
		r.wantLimited(tunnel.LimitDials, 0)
		r.wantLimited(tunnel.LimitOpens, 0)
	}, func(c *ServerConfig) { c.Limits.Dials = 6 }) // half of it for targets that have never answered
}

// Targets that do not answer, 256 of them with callers that try again and again, leave the
// other targets of their node reachable; a burst of these is answered at once.
func TestBlackHoles(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		r.join("edge1", func(ctx context.Context, q tunnel.Request) (net.Conn, error) {
			if strings.HasPrefix(q.Addr, "10.") {
				<-ctx.Done()
				return nil, ctx.Err()
			}
			return refuses(ctx, q)
		})
		ctx, stop := context.WithCancel(t.Context())
		var callers sync.WaitGroup
		for i := range 256 {
			for range 20 {
				callers.Go(func() {
					for ctx.Err() == nil {
						ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
						r.dir.Dial(ctx, tunnel.Request{Node: "edge1", Category: "tcp", Network: "tcp", Addr: fmt.Sprintf("10.0.0.%d:80", i), Caller: "10.9.9.9:9"})
						cancel()
						time.Sleep(time.Second)
					}
				})
			}
		}
		lost, late := 0, 0
		for range 30 { // in half a minute
			time.Sleep(time.Second)
			start := time.Now()
			var all sync.WaitGroup
			var failed atomic.Int64
			for i := range 100 {
				all.Go(func() {
					if _, err := r.dial("edge1", fmt.Sprintf("target:%d", i%2)); tunnel.CodeOf(err) != tunnel.Refused {
						failed.Add(1)
					}
				})
			}
			all.Wait()
			lost += int(failed.Load())
			if time.Since(start) > time.Second {
				late++
			}
		}
		if lost != 0 || late > 1 { // in the first second nobody knows which targets are silent
			t.Errorf("of 3,000 opens of targets that answer %d were lost; %d of 30 bursts took longer than a second", lost, late)
		}
		stop()
		callers.Wait()
	})
}

// faultyContext panics where a dial waits for its answer.
type faultyContext struct{ context.Context }

func (faultyContext) Done() <-chan struct{} { panic("a fault in a dial") }

// A panic in a dial, which the front door recovers, leaves no open and no conn behind.
func TestPanicInADialMakesRoom(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		r.join("edge1", refuses)
		s := r.dir.Lookup("edge1").Link.(*cloudSession)
		func() {
			defer func() {
				if recover() == nil {
					t.Error("the dial did not panic")
				}
			}()
			s.dial(faultyContext{t.Context()}, tunnel.Request{Node: "edge1", Category: "tcp", Network: "tcp", Addr: "a:1"})
		}()
		if conns, dials := s.quota.queue.InUse(); conns != 0 || dials != 0 {
			t.Errorf("%d conns and %d dials are left", conns, dials)
		}
	})
}

// An edge that hangs does not fill the queue: callers are told within seconds.
func TestHungEdge(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		c := r.stranger().join("edge1") // it reads, and answers nothing
		go func() {
			for {
				if _, err := c.stream.Recv(); err != nil {
					return
				}
			}
		}()
		var callers sync.WaitGroup
		var early atomic.Int64
		for range 100 {
			callers.Go(func() {
				start := time.Now()
				_, err := r.dial("edge1", "target:1")
				if tunnel.CodeOf(err) == tunnel.Overloaded && time.Since(start) < 3*time.Second {
					wantOverloaded(t, err, tunnel.LimitDials)
					early.Add(1)
				}
			})
		}
		time.Sleep(5 * time.Second)
		start := time.Now()
		_, err := r.dial("edge1", "target:1")
		if wantOverloaded(t, err, tunnel.LimitDials); time.Since(start) > 0 {
			t.Errorf("a later one has waited for %s", time.Since(start))
		}
		callers.Wait()
		if n := early.Load(); n != 98 {
			t.Errorf("%d of 100 callers were told early, want all but the two that the edge was asked for", n)
		}
	})
}

// What a cloud may have an edge do is bounded by the edge, whatever the cloud thinks. What
// is too much waits there.
func TestEdgeLimits(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		answer := make(chan struct{})
		cfg := r.clientConfig("edge1")
		cfg.Limits = EdgeLimits{Conns: 5, Dials: 6}
		var fars sync.Map
		e := r.start(cfg, func(ctx context.Context, _ tunnel.Request) (net.Conn, error) {
			<-answer
			near, far := net.Pipe()
			fars.Store(far, true)
			return near, nil
		})
		defer fars.Range(func(far, _ any) bool { far.(net.Conn).Close(); return true })
		r.eventually("the edge joins", func() bool { return e.client.Ready() == nil && r.dir.Holds("edge1") })

		var conns sync.Map
		var waiting sync.WaitGroup
		for i := range 4 {
			waiting.Go(func() {
				c, err := r.dial("edge1", fmt.Sprint("target:", i))
				if err != nil {
					t.Errorf("an open that the edge has room for: %v", err)
					return
				}
				conns.Store(c, true)
			})
		}
		synctest.Wait()
		if n := r.edges.Waiting.Load(); n != 1 {
			t.Errorf("%d opens wait at the edge, want 1", n)
		}
		_, err := r.dir.Dial(t.Context(), tunnel.Request{Node: "edge1", Category: "tcp", Network: "tcp", Addr: "target:1", NoWait: true})
		wantOverloaded(t, err, tunnel.LimitDials)
		close(answer)
		waiting.Wait()
		conns.Store(r.mustDial("edge1", "target:1"), true)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err = r.dir.Dial(ctx, tunnel.Request{Node: "edge1", Category: "tcp", Network: "tcp", Addr: "target:1"}); tunnel.CodeOf(err) != tunnel.Timeout {
			t.Errorf("an open that waits at the edge for longer than its caller does: %v", err)
		}
		var late sync.WaitGroup
		late.Go(func() {
			c, err := r.dial("edge1", "target:1")
			if err != nil {
				t.Error(err)
				return
			}
			conns.Store(c, true)
		})
		time.Sleep(time.Second)
		conns.Range(func(c, _ any) bool { conns.Delete(c); tunnel.Reset(c.(net.Conn)); return false })
		late.Wait()
		conns.Range(func(c, _ any) bool { tunnel.Reset(c.(net.Conn)); return true })
		r.idle(e)
		r.mustDial("edge1", "target:1")
		for _, l := range []tunnel.Limit{tunnel.LimitDials, tunnel.LimitConns} {
			if n := r.edges.LimitedBy(l); n != 0 {
				t.Errorf("the edge counted limit %s %d times: nobody was refused who waits", l, n)
			}
			r.wantLimited(l, 0)
		}
	})
}

// inUse returns how many conns of all sessions and servers there are.
func (c *Client) inUse() int {
	n, _ := c.queue.InUse()
	return n
}

// Dials that somebody else has asked the edge for count against the same limits.
func TestEdgeLimitsAreShared(t *testing.T) {
	r := newRig(t)
	cfg := r.clientConfig("edge1")
	cfg.Limits = EdgeLimits{Conns: 2, Dials: 1}
	e := r.start(cfg, direct)
	r.eventually("the edge joins", func() bool { return e.client.Ready() == nil && r.dir.Holds("edge1") })
	target := testkit.NewTarget(t).Addr().String()
	other := tunnel.Request{Addr: "other:1"}
	admit := func() {
		t.Helper()
		if refusal := e.client.Admit(t.Context(), other); refusal != nil {
			t.Fatal(refusal)
		}
	}
	full := func(l tunnel.Limit) {
		t.Helper()
		_, err := r.dir.Dial(t.Context(), tunnel.Request{Node: "edge1", Category: "tcp", Network: "tcp", Addr: target, NoWait: true})
		wantOverloaded(t, err, l)
	}
	admit()
	full(tunnel.LimitDials)
	e.client.Dialled(other, nil)
	tunnel.Reset(r.mustDial("edge1", target))
	r.eventually("there is room", func() bool { return e.client.inUse() == 1 })
	admit()
	e.client.Dialled(other, nil)
	full(tunnel.LimitConns)
	e.client.Over()
	e.client.Over()
	tunnel.Reset(r.mustDial("edge1", target))
}

// An edge that floods its session with messages loses it, with a reason.
func TestMessagesLimit(t *testing.T) {
	for name, m := range map[string]*pb.StreamMsg{
		"unknown type":               {Category: "nobody", Type: "knows"},
		"refusals of unknown topics": {Category: category, Type: typeRefused, Topic: "none"},
		"heartbeats":                 {Category: category, Type: typeHeartbeat},
	} {
		t.Run(name, func(t *testing.T) {
			onFakeClock(t, func(t *testing.T, r *rig) {
				c := r.stranger().join("edge1")
				go func() {
					for c.stream.Send(m) == nil {
					}
				}()
				if err := c.end(); status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "limit messages: ") {
					t.Errorf("the session ends with %v, want limit messages", err)
				}
				r.wantLimited(tunnel.LimitMessages, 1)
				r.eventually("the node is gone", func() bool { return !r.dir.Holds("edge1") })
			}, func(c *ServerConfig) { c.Limits.Opens = 1 })
		})
	}
}

// An edge that has lost its session by a flood has no second burst in the next one; a
// moment later it is as good as any, and then nothing is remembered of it.
func TestQuotaOutlivesTheSession(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		most := ownMessages
		// A session that has ended before does not shorten the time for which the quota of a later session is kept.
		s := r.stranger()
		s.join("edge1")
		s.cc.Close()
		time.Sleep(burst - 100*time.Millisecond)
		flood := func() (sent int) {
			s := r.stranger()
			defer s.cc.Close()
			c := s.join("edge1")
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				c.end()
			}()
			for ; ; sent++ {
				c.stream.Send(&pb.StreamMsg{Category: category, Type: typeRefused, Topic: "none"})
				synctest.Wait()
				select {
				case <-ended:
					return sent
				default:
				}
			}
		}
		if n := flood(); n != 2*most {
			t.Errorf("the first flood has %d messages, want %d", n, 2*most)
		}
		time.Sleep(200 * time.Millisecond)
		if n := flood(); n > most/2 {
			t.Errorf("the flood right after it has %d messages", n)
		}
		time.Sleep(time.Minute)
		r.server.quotas.mu.Lock()
		left := len(r.server.quotas.of)
		r.server.quotas.mu.Unlock()
		if left != 0 {
			t.Errorf("%d quotas are left", left)
		}
		if n := flood(); n != 2*most {
			t.Errorf("a minute later there are %d messages, want %d", n, 2*most)
		}
	}, func(c *ServerConfig) { c.Limits.Opens = 1 })
}

// So many messages in each second are no flood.
func TestMessagesWithinTheLimit(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		c := r.stranger().join("edge1")
		for range 5 {
			for range ownMessages {
				c.say(typeRefused, "none", &pb.Refused{})
			}
			synctest.Wait()
			time.Sleep(time.Second)
		}
		if !r.dir.Holds("edge1") {
			t.Error("the session has ended")
		}
		r.wantLimited(tunnel.LimitMessages, 0)
	}, func(c *ServerConfig) { c.Limits.Opens = 1 })
}

// An edge that opens stream after stream loses its session, whatever becomes of them.
func TestStreamsLimit(t *testing.T) {
	for name, open := range map[string]func(ctx context.Context, s *stranger){
		"nobody waits": func(ctx context.Context, s *stranger) {
			if c, err := s.client.Connect(metadata.AppendToOutgoingContext(ctx, topicKey, "none")); err == nil {
				c.RecvMsg(&pb.Chunk{})
			}
		},
		"reset at once": func(ctx context.Context, s *stranger) {
			ctx, cancel := context.WithCancel(ctx)
			s.client.Connect(metadata.AppendToOutgoingContext(ctx, topicKey, "none"))
			cancel()
		},
		"a method that there is not": func(ctx context.Context, s *stranger) {
			s.cc.Invoke(ctx, "/no.such/Method", &pb.Hello{}, &pb.Hello{})
		},
	} {
		t.Run(name, func(t *testing.T) {
			onFakeClock(t, func(t *testing.T, r *rig) {
				s := r.stranger()
				c := s.join("edge1")
				ended := make(chan error, 1)
				go func() { ended <- c.end() }()
				for most := 2 * ownStreams; ; most-- {
					select {
					case err := <-ended:
						if status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "limit streams: ") {
							t.Errorf("the session ends with %v, want limit streams", err)
						}
						r.wantLimited(tunnel.LimitStreams, 1)
						return
					default:
					}
					if most < 0 {
						t.Fatal("the session does not end")
					}
					open(s.ctx, s)
					synctest.Wait()
				}
			}, func(c *ServerConfig) { c.Limits.Opens = 1 })
		})
	}
}

// HEADERS that gRPC answers itself count as streams. A stranger may send few of them: gRPC keeps an answer for each.
func TestStreamsThatGRPCAnswers(t *testing.T) {
	var refused bytes.Buffer
	enc := hpack.NewEncoder(&refused)
	long := strings.Repeat("\xff", 4052) // with its name, as much as fits into the table of HPACK
	for _, h := range [][2]string{{":method", "POST"}, {":scheme", "https"}, {":path", "/"}, {"content-type", long}} {
		enc.WriteField(hpack.HeaderField{Name: h[0], Value: h[1]})
	}
	open := func(f *http2.Framer, id uint32) error {
		return f.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: refused.Bytes(), EndHeaders: true})
	}
	t.Run("of a stranger", func(t *testing.T) {
		r := newRig(t)
		f, c := r.framer()
		for id := uint32(3); id < 200 && open(f, id) == nil; id += 2 {
		}
		if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("the connection goes on: %v", err)
		}
		r.wantLimited(tunnel.LimitStreams, 1)
	})
	t.Run("of a stranger, two", func(t *testing.T) {
		r := newRig(t)
		f, c := r.framer()
		open(f, 3)
		open(f, 5)
		if _, err := io.Copy(io.Discard, c); errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("the connection goes on: %v", err)
		}
		r.wantLimited(tunnel.LimitStreams, 1)
	})
	t.Run("of an edge", func(t *testing.T) {
		r := newRig(t, func(c *ServerConfig) { c.Limits.Opens = 1 })
		f, _ := r.joinedFramer()
		flooded := make(chan struct{})
		go func() {
			defer close(flooded)
			for id := uint32(3); open(f, id) == nil; id += 2 {
			}
		}()
		defer func() { <-flooded }()
		answers := 0
		for {
			frame, err := f.ReadFrame()
			if errors.Is(err, os.ErrDeadlineExceeded) {
				t.Fatalf("the connection goes on: %v", err)
			} else if err != nil {
				break
			}
			if h, ok := frame.(*http2.HeadersFrame); ok && h.StreamID > 1 {
				answers++
			}
		}
		if answers == 0 || answers > 33 {
			t.Errorf("gRPC has answered %d streams, want 1 to 33", answers)
		}
		r.wantLimited(tunnel.LimitStreams, 1)
		r.eventually("the node is gone", func() bool { return !r.dir.Holds("edge1") })
	})
}

// A busy process runs the handlers of streams late. The streams that an honest edge has begun by then do not end its
// session.
func TestWaitForHandlers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var busy transport
		busy.unserved.Store(10 * maxUnserved)
		time.AfterFunc(unservedPauses*unservedPause/2, func() { busy.unserved.Store(maxUnserved) })
		if !busy.waitForHandlers(maxUnserved, nil) {
			t.Error("late handlers are taken for none")
		}
		var over transport
		over.unserved.Store(maxUnserved + 1)
		ended := make(chan struct{})
		close(ended)
		if start := time.Now(); over.waitForHandlers(maxUnserved, ended) || time.Since(start) > unservedPause {
			t.Error("the server reads on after the end of the session")
		}
	})
}

// The server reads an edge's next stream after a pause if many of its streams wait for their handlers, and otherwise at
// once. So a burst of streams does not hold up the other edges. Another replica speaks for many callers, and may go on.
func TestGiveWay(t *testing.T) {
	for _, tt := range []struct {
		node     tunnel.NodeName // "": another replica
		unserved int64
		pause    time.Duration
	}{
		{"edge1", 0, 0},
		{"edge1", manyUnserved, 0},
		{"edge1", manyUnserved + 1, unservedPause},
		{"", manyUnserved + 1, 0},
	} {
		synctest.Test(t, func(t *testing.T) {
			cs := new(cloudSession)
			cs.pub = &tunnel.Session{Node: tt.node}
			var r transport
			r.session.Store(cs)
			r.unserved.Store(tt.unserved)
			start := time.Now()
			if tooMany := new(Server).count(&r, 1, 0); tooMany {
				t.Errorf("%+v: one more stream is too many", tt)
			}
			if paused := time.Since(start); paused != tt.pause {
				t.Errorf("%+v: the server pauses for %s", tt, paused)
			}
		})
	}
}

// A node that joins again and again is refused, and the log has few lines. It can join again soon.
func TestJoinsLimit(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		join := func() error {
			s := r.stranger()
			defer s.cc.Close()
			c := s.control(bearerOf("edge1"))
			c.hello(Version)
			m, err := c.stream.Recv()
			if err == nil && m.GetType() != typeHello {
				t.Errorf("the answer is %v", m)
			}
			return err
		}
		joined := 0
		for range 100 {
			err := join()
			if err == nil {
				joined++
			} else if status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "limit joins: ") {
				t.Fatal(err)
			}
		}
		r.wantLimited(tunnel.LimitJoins, uint64(100-joined))
		if joined < burstJoins || joined > burstJoins+2 {
			t.Errorf("%d joins, want some %d", joined, burstJoins)
		}
		if n := len(r.log.lines("session started")); n != joined {
			t.Errorf("%d lines about %d joins", n, joined)
		}
		time.Sleep(2 * burst)
		if err := join(); err != nil {
			t.Errorf("a moment later: %v", err)
		}
	})
}

// An edge that tells of its stop again and again does not fill the log.
func TestDrainsAreLoggedOnce(t *testing.T) {
	r := newRig(t)
	c := r.stranger().join("edge1")
	for range 100 {
		c.say(typeDrain, "", &pb.Drain{})
		c.say(typeDrain, "", &pb.Drain{GraceSeconds: 1})
	}
	r.eventually("the cloud knows", func() bool {
		s := r.cloudEnd("edge1")
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.stopping
	})
	c.say(typeHeartbeat, "", &pb.Heartbeat{Sent: 1})
	c.want("the heartbeat comes behind the drains", typeHeartbeat)
	drains, stops := r.log.lines("edge takes no new conns"), r.log.lines("edge is about to stop")
	if len(drains) != 1 || len(stops) != 1 {
		t.Errorf("%d and %d lines", len(drains), len(stops))
	}
}

// Nor does a cloud that does so fill the log of the edge, or its memory.
func TestDrainsOfTheCloud(t *testing.T) {
	r := newRig(t)
	r.join("edge1", direct)
	r.pair("edge1") // else the edge would end the session
	cs, before := r.cloudEnd("edge1"), runtime.NumGoroutine()
	for range 1000 {
		if err := cs.Send(message(typeDrain, "", &pb.Drain{GraceSeconds: 60})); err != nil {
			t.Fatal(err)
		}
	}
	r.pair("edge1") // the edge has handled them
	if n := len(r.log.lines("cloud is about to stop")); n != 1 {
		t.Errorf("%d lines", n)
	}
	if n := runtime.NumGoroutine() - before; n > 100 {
		t.Errorf("%d more goroutines", n)
	}
}

// A stranger who asks for a method that we do not have gets no second stream.
func TestUnknownMethodOfAStranger(t *testing.T) {
	r := newRig(t)
	s := r.stranger()
	ask := func() error { return s.cc.Invoke(s.ctx, "/no.such/Method", &pb.Hello{}, &pb.Hello{}) }
	if err := ask(); status.Code(err) != codes.Unimplemented {
		t.Errorf("the first: %v", err)
	}
	if err := ask(); status.Code(err) != codes.Unavailable {
		t.Errorf("the second: %v", err)
	}
}

// Metadata that is too long is refused and counted; far too long, it is reset.
func TestMetadataLimit(t *testing.T) {
	r := newRig(t, func(c *ServerConfig) { c.Limits.Metadata = 4096 })
	s := r.stranger()
	long := func(n int) error {
		ctx := metadata.AppendToOutgoingContext(s.ctx, "authorization", bearerOf("edge1"), "x", strings.Repeat("x", n))
		stream, err := s.client.TunnelStreaming(ctx)
		if err != nil {
			return err
		}
		_, err = stream.Recv()
		return err
	}
	if err := long(10_000); err == nil || r.dir.Len() != 0 {
		t.Errorf("metadata of 10,000 bytes: %v", err)
	}
	r.wantLimited(tunnel.LimitMetadata, 0)
	if err := long(5000); status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "limit metadata: ") {
		t.Errorf("metadata of 5,000 bytes: %v", err)
	}
	r.wantLimited(tunnel.LimitMetadata, 1)
}

// A message that is too long ends the session that it came on, or the conn.
func TestMessageLimit(t *testing.T) {
	r := newRig(t)
	s := r.stranger()
	c := s.join("edge1")
	open, result := r.sentOpen(c, "edge1")
	chunks := s.connect(open.GetTopic())
	d := <-result
	if d.err != nil {
		t.Fatal(d.err)
	}
	defer d.conn.Close()
	chunks.Send(&pb.Chunk{Data: make([]byte, 2*conn.MaxMessage)})
	if _, err := d.conn.Read(make([]byte, 1)); !errors.Is(err, tunnel.ErrReset) {
		t.Errorf("the conn ends with %v, want a reset", err)
	}
	r.eventually("it is counted", func() bool { return r.counters.LimitedBy(tunnel.LimitMessage) == 1 })
	c.send(&pb.StreamMsg{Category: category, Type: typeRefused, Data: make([]byte, 2*conn.MaxMessage)})
	if err := c.end(); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("the session ends with %v", err)
	}
	r.eventually("it is counted, too", func() bool { return r.counters.LimitedBy(tunnel.LimitMessage) == 2 })
}

// What strangers hold is bounded as configured, and counted.
func TestJoiningLimits(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		for range 3 { // of one source, one too many
			c, err := r.net.dial(t.Context(), "", "")
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
		}
		r.net.spread.Store(true)
		for range 3 { // for two of these there is room; the third takes the place of one of the first source
			c, err := r.net.dial(t.Context(), "", "")
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
		}
		synctest.Wait()
		r.wantLimited(tunnel.LimitJoiningPerAddress, 1)
		r.wantLimited(tunnel.LimitJoining, 1)
		time.Sleep(2 * time.Second)
		synctest.Wait()
		r.wantLimited(tunnel.LimitJoinTimeout, 4)
	}, func(c *ServerConfig) {
		c.Limits = Limits{Joining: 4, JoiningPerAddress: 2, JoinTimeout: 2 * time.Second}
	})
}

// Both ends log a denied dial, once a minute however many there are, and how many they
// have left out.
func TestDenialsAreLogged(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		r.join("edge1", func(context.Context, tunnel.Request) (net.Conn, error) {
			return nil, tunnel.Refusef(tunnel.Denied, "the edge may not dial 10.0.0.1:1")
		})
		deny := func(times int) {
			for range times {
				if _, err := r.dial("edge1", "10.0.0.1:1"); tunnel.CodeOf(err) != tunnel.Denied {
					t.Errorf("got %v, want denied", err)
				}
			}
		}
		deny(100)
		time.Sleep(time.Minute)
		deny(100)
		for end, words := range map[string]string{"cloud": "the edge has denied a dial", "edge": "a dial that the cloud asked for is denied"} {
			lines := r.log.lines("level=WARN", "end="+end, words, "node=edge1", "target=10.0.0.1:1", "caller=test")
			if len(lines) != 2 || !strings.Contains(lines[1], "skipped=99") {
				t.Errorf("the %s logs %q; want a line each minute that says how many were skipped", end, lines)
			}
		}
	})
}

// slowAuth is asked and does not answer until it is told to.
type slowAuth struct {
	auth.Authenticator
	asked  atomic.Int64
	answer chan struct{}
}

func (a *slowAuth) Authenticate(ctx context.Context, c auth.Credential) (auth.Grant, error) {
	a.asked.Add(1)
	select {
	case <-a.answer:
		return a.Authenticator.Authenticate(ctx, c)
	case <-ctx.Done():
		return auth.Grant{}, ctx.Err()
	}
}

// framer connects and opens a control stream as edge1, stream 1. The test writes the frames
// that follow, by the framer or to c.
func (r *rig) framer() (f *http2.Framer, c net.Conn) {
	r.t.Helper()
	c, err := tls.Dial("tcp", r.server.Addr().String(), &tls.Config{RootCAs: r.ca.Pool(), ServerName: "cloud", NextProtos: []string{"h2"}})
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(6 * patience))
	io.WriteString(c, http2.ClientPreface)
	f = http2.NewFramer(c, c)
	f.WriteSettings()
	var header bytes.Buffer
	enc := hpack.NewEncoder(&header)
	for _, h := range [][2]string{
		{":method", "POST"}, {":scheme", "https"}, {":path", pb.Stream_TunnelStreaming_FullMethodName}, {":authority", "cloud"},
		{"content-type", "application/grpc"}, {"te", "trailers"}, {"authorization", bearerOf("edge1")},
	} {
		enc.WriteField(hpack.HeaderField{Name: h[0], Value: h[1]})
	}
	f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: header.Bytes(), EndHeaders: true})
	return f, c
}

// joinedFramer is framer, and joins on the control stream.
func (r *rig) joinedFramer() (f *http2.Framer, c net.Conn) {
	r.t.Helper()
	f, c = r.framer()
	m, err := proto.Marshal(&pb.StreamMsg{Category: category, Type: typeHello, Data: encode(&pb.Hello{Version: Version})})
	if err != nil {
		r.t.Fatal(err)
	}
	f.WriteData(1, false, append(binary.BigEndian.AppendUint32([]byte{0}, uint32(len(m))), m...)) // a gRPC message
	r.eventually("it has joined", func() bool { return r.dir.Holds("edge1") })
	return f, c
}

// An edge that floods its session with frames that carry nothing loses it, with a reason.
func TestFramesLimit(t *testing.T) {
	for name, write := range map[string]func(f *http2.Framer) error{
		"settings":       func(f *http2.Framer) error { return f.WriteSettings() },
		"priorities":     func(f *http2.Framer) error { return f.WritePriority(1, http2.PriorityParam{Weight: 1}) },
		"window updates": func(f *http2.Framer) error { return f.WriteWindowUpdate(0, 1) },
		"resets":         func(f *http2.Framer) error { return f.WriteRSTStream(3, http2.ErrCodeCancel) },
		"empty data":     func(f *http2.Framer) error { return f.WriteData(1, false, nil) },
		"padded data":    func(f *http2.Framer) error { return f.WriteDataPadded(1, false, nil, []byte{}) },
		"unknown frames": func(f *http2.Framer) error { return f.WriteRawFrame(0x77, 0, 0, []byte("x")) },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, func(c *ServerConfig) { c.Limits.Opens = 1 })
			f, c := r.joinedFramer()
			if name == "resets" { // of a stream that was there
				var header bytes.Buffer
				hpack.NewEncoder(&header).WriteField(hpack.HeaderField{Name: ":method", Value: "GET"})
				f.WriteHeaders(http2.HeadersFrameParam{StreamID: 3, BlockFragment: header.Bytes(), EndHeaders: true})
			}
			var burst bytes.Buffer // in few records of TLS: the cloud has a second to send its last status
			frames := http2.NewFramer(&burst, nil)
			for range 1000 {
				if err := write(frames); err != nil {
					t.Fatal(err)
				}
			}
			flooded := make(chan struct{})
			go func() {
				defer close(flooded)
				for err := error(nil); err == nil; {
					_, err = c.Write(burst.Bytes())
				}
			}()
			defer func() {
				c.Close()
				<-flooded
			}()
			f.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
			var told string
			for told == "" {
				frame, err := f.ReadFrame()
				if err != nil {
					t.Fatalf("the connection ends without a status: %v", err)
				}
				if h, ok := frame.(*http2.MetaHeadersFrame); ok && h.StreamID == 1 && h.StreamEnded() {
					told = fmt.Sprint(h.Fields)
				}
			}
			if !strings.Contains(told, `"grpc-status" = "8"`) || !strings.Contains(told, "limit frames: ") {
				t.Errorf("the session ends with %s, want limit frames", told)
			}
			r.wantLimited(tunnel.LimitFrames, 1)
			r.eventually("the node is gone", func() bool { return !r.dir.Holds("edge1") })
		})
	}
}

// A stranger whose proof is being looked at has the cloud hold little of what it sends,
// whatever the windows of a session are.
func TestStrangersBytes(t *testing.T) {
	a := &slowAuth{answer: make(chan struct{})}
	r := newRig(t, func(c *ServerConfig) { a.Authenticator, c.Auth = c.Auth, a })
	const strangers, window, size = 64, 1 << 20, 16 << 10 // a stream's window, and a frame
	before := inUse()
	data := make([]byte, size)
	for range strangers {
		f, _ := r.framer()
		for range window / size {
			f.WriteData(1, false, data) // the kernel takes what the cloud does not read
		}
	}
	r.eventually("all are looked at", func() bool { return a.asked.Load() == strangers })
	held := inUse() - before
	for grows := true; grows; { // until what is read is read
		time.Sleep(100 * time.Millisecond)
		now := inUse() - before
		grows = now > held
		held = max(held, now)
	}
	t.Logf("%d KiB are held for each stranger, of %d that each has sent", held/strangers>>10, window>>10)
	if most := int64(256 << 10); held/strangers > most {
		t.Errorf("want %d KiB at most", most>>10)
	}
}

// A stranger who has sent as much as it may has the rest read when it has joined.
func TestStrangersBytesAreReadLater(t *testing.T) {
	a := &slowAuth{answer: make(chan struct{})}
	r := newRig(t, func(c *ServerConfig) { a.Authenticator, c.Auth = c.Auth, a })
	c := r.stranger().control(bearerOf("edge1"))
	c.hello(Version)
	const messages, size = 64, 32 << 10 // two windows
	sent := make(chan error, 1)
	go func() {
		for range messages {
			if err := c.stream.Send(&pb.StreamMsg{Category: "nobody", Type: "knows", Data: make([]byte, size)}); err != nil {
				sent <- err
				return
			}
		}
		sent <- nil
	}()
	r.eventually("it is looked at", func() bool { return a.asked.Load() == 1 })
	close(a.answer)
	c.want("it has joined", typeHello)
	if err := <-sent; err != nil {
		t.Error(err)
	}
	if !r.dir.Holds("edge1") {
		t.Error("it has no session")
	}
}

// inUse returns the bytes of the heap that are in use.
func inUse() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
