package stream

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/conn"
	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// reachDirect connects as the operating system does. The target is an address.
func reachDirect(ctx context.Context, request *ReachRequest) (net.Conn, error) {
	return direct(ctx, tunnel.Request{Addr: request.Target})
}

// newReachRig is a rig whose conns edges ask for.
func newReachRig(t *testing.T, change ...func(*ServerConfig)) *rig {
	t.Helper()
	r := newRig(t, append([]func(*ServerConfig){func(c *ServerConfig) { c.Reach = reachDirect }}, change...)...)
	r.reaches = true
	return r
}

// withReach has a server connect edges by dial.
func withReach(dial ReachFunc) func(*ServerConfig) { return func(c *ServerConfig) { c.Reach = dial } }

// reach opens a Reach with these metadata: keys and values in turn.
func (s *stranger) reach(pairs ...string) pb.Stream_ReachClient {
	s.t.Helper()
	stream, err := s.client.Reach(metadata.AppendToOutgoingContext(s.ctx, pairs...))
	if err != nil {
		s.t.Fatal(err)
	}
	return stream
}

// The cloud learns which node asks, and for what. Both ends count the conn and its bytes.
func TestReach(t *testing.T) {
	type requested struct{ node, target string }
	got := make(chan requested, 1)
	l := testkit.NewTarget(t)
	r := newRig(t, withReach(func(ctx context.Context, request *ReachRequest) (net.Conn, error) {
		got <- requested{string(request.From.Node), request.Target}
		return reachDirect(ctx, &ReachRequest{Target: l.Address()})
	}))
	e := r.join("edge1", direct)
	c, err := e.client.Reach(t.Context(), "endpoint/default/web TCP 80")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if want := (requested{"edge1", "endpoint/default/web TCP 80"}); <-got != want {
		t.Errorf("the cloud is not asked for %v", want)
	}
	if c.LocalAddr().String() != "edge1" || c.RemoteAddr().String() != "endpoint/default/web TCP 80" {
		t.Errorf("the conn goes from %s to %s", c.LocalAddr(), c.RemoteAddr())
	}
	far := l.Next(t)
	go func() {
		c.Write([]byte("ask"))
		c.(interface{ CloseWrite() error }).CloseWrite()
	}()
	if got := testkit.ReadAll(t, far); string(got) != "ask" {
		t.Errorf("the target gets %q", got)
	}
	far.Write([]byte("answer"))
	far.Close()
	if got := testkit.ReadAll(t, c); string(got) != "answer" {
		t.Errorf("the caller gets %q", got)
	}
	r.idle(e)
	for name, s := range map[string]*tunnel.Session{"edge": e.client.Session(), "cloud": r.dir.Lookup("edge1")} {
		if sent, received := s.Traffic.Bytes(); sent+received != uint64(len("ask"+"answer")) {
			t.Errorf("the %s counts %d and %d bytes", name, sent, received)
		}
	}
	if r.counters.ConnsOpened.Load() != 1 || r.edges.ConnsOpened.Load() != 1 {
		t.Error("the conn is not counted once at each end")
	}
}

// Every code that the cloud gives as a reason reaches the caller at the edge, with its text.
func TestReachRefusalsTravel(t *testing.T) {
	var next atomic.Pointer[error]
	r := newRig(t, withReach(func(context.Context, *ReachRequest) (net.Conn, error) { return nil, *next.Load() }))
	e := r.join("edge1", direct)
	refuse := func(err error) error {
		next.Store(&err)
		_, err = e.client.Reach(t.Context(), "target")
		if _, ok := errors.AsType[*tunnel.Refusal](err); !ok {
			t.Errorf("%v is no refusal", err)
		}
		return err
	}
	for _, code := range tunnel.Codes() {
		err := refuse(tunnel.Refusef(code, "because of %s", code))
		if err.Error() != code.String()+": because of "+code.String() {
			t.Errorf("%s arrives as %v", code, err)
		}
		if r.counters.Refusals(code) != 1 || r.edges.Refusals(code) != 1 {
			t.Errorf("%s is counted %d times at the cloud and %d at the edge", code, r.counters.Refusals(code), r.edges.Refusals(code))
		}
	}
	for name, c := range map[string]struct {
		err  error
		code tunnel.Code
		says string
	}{
		"no refusal":          {errors.New("10.0.0.1 has a secret"), tunnel.Internal, "cannot connect to target"},
		"of the future":       {tunnel.Refusef(200, "x"), tunnel.Internal, "x"},
		"odd text":            {tunnel.Refusef(tunnel.Denied, "odd \xff\x1b text"), tunnel.Denied, "odd ?? text"},
		"with a secret":       {&tunnel.Refusal{Code: tunnel.Denied, Text: "no", Detail: "secret"}, tunnel.Denied, "no"},
		"a text of megabytes": {tunnel.Refusef(tunnel.Denied, "%s", strings.Repeat("é", 1<<20)), tunnel.Denied, "éé"},
	} {
		err := refuse(c.err)
		if tunnel.CodeOf(err) != c.code || !strings.Contains(err.Error(), c.says) || strings.Contains(err.Error(), "secret") || len(err.Error()) > 600 {
			t.Errorf("%s: %.600v; want %s and %q", name, err, c.code, c.says)
		}
	}
	r.idle(e)
	if n := r.counters.Sessions.Load(); n != 1 {
		t.Errorf("the session was lost %d times", n-1)
	}
}

// What the edge itself decides about a Reach.
func TestReachIsRefusedAtTheEdge(t *testing.T) {
	r := newReachRig(t)
	c, err := NewClient(r.clientConfig("edge1"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Reach(t.Context(), "target"); tunnel.CodeOf(err) != tunnel.NoSuchNode || !strings.Contains(err.Error(), "no session") {
		t.Errorf("without a session: %v", err)
	}
	e := r.join("edge1", direct)
	for name, target := range map[string]string{
		"empty": "", "too long": strings.Repeat("x", maxTarget+1), "not ASCII": "é", "a line": "a\nb",
	} {
		if _, err := e.client.Reach(t.Context(), target); tunnel.CodeOf(err) != tunnel.Unreachable {
			t.Errorf("a target that is %s: %v", name, err)
		}
	}
	if _, err := e.client.Reach(t.Context(), strings.Repeat("x", maxTarget)); tunnel.CodeOf(err) != tunnel.Refused {
		t.Errorf("the longest target: %v", err)
	}
	r.idle(e)
}

// A cloud that connects edges to nothing says so, and so does one that does not know the call.
func TestReachWithoutServices(t *testing.T) {
	r := newRig(t)
	e := r.join("edge1", direct)
	_, err := e.client.Reach(t.Context(), "target")
	if tunnel.CodeOf(err) != tunnel.Internal || !strings.Contains(err.Error(), "too old or has no [mode.cloud.services]") {
		t.Errorf("the edge gets %v", err)
	}
	s := r.stranger()
	s.join("edge2")
	_, err = s.reach(topicKey, uuid.NewString(), targetKey, "x").Recv()
	if status.Code(err) != codes.Unimplemented || !strings.Contains(err.Error(), "[mode.cloud.services]") {
		t.Errorf("on the wire it is %v", err)
	}
}

// A Reach that breaks the protocol is refused.
func TestOddReach(t *testing.T) {
	r := newReachRig(t)
	s := r.stranger()
	s.join("edge1")
	topic := uuid.NewString()
	for _, c := range []struct {
		name   string
		stream pb.Stream_ReachClient
		code   codes.Code
		says   string
	}{
		{"a connection without a session", r.stranger().reach(topicKey, topic, targetKey, "x"), codes.FailedPrecondition, "wrong-session"},
		{"no topic", s.reach(targetKey, "x"), codes.InvalidArgument, "one topic and one target"},
		{"no target", s.reach(topicKey, topic), codes.InvalidArgument, "one topic and one target"},
		{"two targets", s.reach(topicKey, topic, targetKey, "x", targetKey, "y"), codes.InvalidArgument, "one topic and one target"},
		{"a topic that is no UUID", s.reach(topicKey, "x", targetKey, "x"), codes.InvalidArgument, "UUID"},
		{"a topic in braces", s.reach(topicKey, "{"+topic+"}", targetKey, "x"), codes.InvalidArgument, "UUID"},
		{"an empty target", s.reach(topicKey, topic, targetKey, ""), codes.InvalidArgument, "1 to 1024"},
		{"a target too long", s.reach(topicKey, topic, targetKey, strings.Repeat("x", maxTarget+1)), codes.InvalidArgument, "1 to 1024"},
	} {
		_, err := c.stream.Recv()
		if status.Code(err) != c.code || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v; want %s and %q", c.name, err, c.code, c.says)
		}
	}
	if n := r.counters.Refusals(tunnel.WrongSession); n != 1 {
		t.Errorf("%d wrong-session counted, want 1", n)
	}
	l := testkit.NewTarget(t)
	first := s.reach(topicKey, topic, targetKey, l.Address())
	if _, err := first.Header(); err != nil {
		t.Fatal(err)
	}
	l.Next(t)
	if _, err := s.reach(topicKey, topic, targetKey, l.Address()).Recv(); infoOf(err).GetMetadata()[codeFact] != "internal" {
		t.Errorf("a topic in use: %v", err)
	}
	if !r.dir.Holds("edge1") {
		t.Error("the session is gone")
	}
}

// A header without an end, or with far too much in it, costs the connection and nothing else.
func TestEndlessReachHeader(t *testing.T) {
	r := newReachRig(t)
	f, _ := r.framer()
	defer goOn(t, r)
	var header bytes.Buffer
	hpack.NewEncoder(&header).WriteField(hpack.HeaderField{Name: targetKey, Value: strings.Repeat("x", 8<<10)})
	before := inUse()
	f.WriteHeaders(http2.HeadersFrameParam{StreamID: 3, BlockFragment: header.Bytes()})
	ended := false
	for range 1 << 14 { // 128 MiB
		if ended = f.WriteContinuation(3, false, header.Bytes()) != nil; ended {
			break
		}
	}
	if !ended {
		t.Error("the cloud reads a header without end")
	}
	if held := inUse() - before; held > 32<<20 {
		t.Errorf("%d MiB are held", held>>20)
	}
}

// goOn checks that a node can join and get a conn.
func goOn(t *testing.T, r *rig) {
	t.Helper()
	e := r.join("edge9", direct)
	c, far := r.pair("edge9")
	go c.Write([]byte("x"))
	if _, err := io.ReadFull(far, make([]byte, 1)); err != nil {
		t.Errorf("another node: %v", err)
	}
	c.Close()
	far.Close()
	r.idle(e)
}

// An edge that opens Reach after Reach and waits for no answer loses its session.
func TestReachFlood(t *testing.T) {
	for name, open := range map[string]func(s *stranger){
		"reset at once": func(s *stranger) {
			ctx, cancel := context.WithCancel(s.ctx)
			s.client.Reach(metadata.AppendToOutgoingContext(ctx, topicKey, uuid.NewString(), targetKey, "x"))
			cancel()
		},
		"odd ones": func(s *stranger) { s.client.Reach(s.ctx) },
		"waiting ones": func(s *stranger) {
			s.client.Reach(metadata.AppendToOutgoingContext(s.ctx, topicKey, uuid.NewString(), targetKey, "x"))
		},
	} {
		t.Run(name, func(t *testing.T) {
			onFakeClock(t, func(t *testing.T, r *rig) {
				s := r.stranger()
				c := s.join("edge1")
				ended := make(chan error, 1)
				go func() { ended <- c.end() }()
				for most := 2*ownStreams + 10; ; most-- {
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
					open(s)
					synctest.Wait()
				}
			}, func(c *ServerConfig) { c.Limits.Opens = 1 }, withReach(func(ctx context.Context, _ *ReachRequest) (net.Conn, error) {
				<-ctx.Done()
				return nil, ctx.Err()
			}))
		})
	}
}

// A node that joins again and again has no more calls at the cloud than maxUnanswered, even if those of its earlier
// sessions have not ended yet.
func TestReachUnanswered(t *testing.T) {
	var working atomic.Int64
	var release chan struct{} // of the test's bubble; closed by the test
	onFakeClock(t, func(t *testing.T, r *rig) {
		release = make(chan struct{})
		overloaded := func() uint64 { return r.counters.Refusals(tunnel.Overloaded) }
		const each = maxUnanswered * 3 / 5
		for range 3 {
			s := r.stranger()
			s.join("edge1")
			for range each {
				id := uuid.NewString()
				s.client.Reach(metadata.AppendToOutgoingContext(s.ctx, topicKey, id, targetKey, id))
				time.Sleep(time.Second / ownStreams)
			}
			synctest.Wait()
			s.cc.Close()
			synctest.Wait()
		}
		if working.Load() != maxUnanswered || overloaded() != 3*each-maxUnanswered {
			t.Errorf("the cloud works on %d calls, and has refused %d; want %d and %d",
				working.Load(), overloaded(), maxUnanswered, 3*each-maxUnanswered)
		}
		close(release)
		synctest.Wait()
		if n := working.Load(); n != 0 {
			t.Errorf("%d calls have not ended", n)
		}
		s := r.stranger()
		s.join("edge1")
		if _, err := s.reach(topicKey, uuid.NewString(), targetKey, "x").Recv(); infoOf(err).GetMetadata()[codeFact] != "refused" {
			t.Errorf("a call after that: %v", err)
		}
	}, func(c *ServerConfig) { c.Limits.Conns, c.Limits.Dials = 8*maxUnanswered, 8*maxUnanswered },
		withReach(func(context.Context, *ReachRequest) (net.Conn, error) { // it does not notice that its caller has gone
			working.Add(1)
			defer working.Add(-1)
			<-release
			return nil, tunnel.Refusef(tunnel.Refused, "nothing listens")
		}))
}

// An edge of ours never loses its session by the callers of Reach, however many fail, give up, or wait.
func TestReachStaysBelowTheLimits(t *testing.T) {
	for name, target := range map[string]string{"refused": "refused", "silent": "silent", "given up": "given up"} {
		t.Run(name, func(t *testing.T) {
			onFakeClock(t, func(t *testing.T, r *rig) {
				e := r.join("edge1", refuses)
				ctx, stop := context.WithCancel(t.Context())
				var requested atomic.Int64
				var callers sync.WaitGroup
				for range maxReaching + 500 {
					callers.Go(func() {
						for ctx.Err() == nil {
							ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
							if target == "given up" {
								time.AfterFunc(time.Millisecond, cancel)
							}
							if _, err := e.client.Reach(ctx, target); err == nil {
								t.Error("it is not refused")
							}
							cancel()
							requested.Add(1)
							time.Sleep(100 * time.Millisecond)
						}
					})
				}
				time.Sleep(6 * time.Second)
				stop()
				callers.Wait()
				if n := requested.Load(); n < 2*ownStreams {
					t.Errorf("only %d were asked for", n)
				}
				if n := r.counters.Sessions.Load(); n != 1 || !r.dir.Holds("edge1") {
					t.Errorf("the session was lost %d times", n-1)
				}
				time.Sleep(2 * burst)
				if n := len(e.client.links[0].reaching); n != 0 {
					t.Errorf("%d places are taken at the end", n)
				}
				r.idle(e)
			}, withReach(func(ctx context.Context, request *ReachRequest) (net.Conn, error) {
				if request.Target != "refused" {
					<-ctx.Done()
					return nil, ctx.Err()
				}
				return nil, tunnel.Refusef(tunnel.Refused, "nothing listens")
			}))
		})
	}
}

// Conns that an edge asks for and conns that the cloud dials share the quota of the node.
func TestReachQuota(t *testing.T) {
	r := newReachRig(t, func(c *ServerConfig) { c.Limits.Conns = 4 })
	e := r.join("edge1", direct)
	l := testkit.NewTarget(t)
	requested, _ := r.pair("edge1")
	var dialled [3]net.Conn
	var err error
	for i := range dialled {
		dialled[i], err = r.dir.Dial(t.Context(), tunnel.Request{Node: "edge1", Category: "tcp", Network: "tcp", Addr: l.Address()})
		if err != nil {
			t.Fatal(err)
		}
	}
	short := func() context.Context {
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		t.Cleanup(cancel)
		return ctx
	}
	if _, err := e.client.Reach(short(), l.Address()); tunnel.CodeOf(err) != tunnel.Timeout {
		t.Errorf("a fifth conn, which the edge asks for: %v", err)
	}
	_, err = r.dir.Dial(short(), tunnel.Request{Node: "edge1", Category: "tcp", Network: "tcp", Addr: l.Address()})
	wantOverloaded(t, err, tunnel.LimitConns)
	late := make(chan error, 1)
	go func() {
		c, err := e.client.Reach(t.Context(), l.Address())
		if err == nil {
			tunnel.Reset(c)
		}
		late <- err
	}()
	time.Sleep(50 * time.Millisecond) // not waited for: it lets the Reach wait
	tunnel.Reset(dialled[0])
	if err := <-late; err != nil {
		t.Errorf("a Reach that has waited: %v", err)
	}
	for _, c := range append(dialled[1:], requested) {
		tunnel.Reset(c)
	}
	r.idle(e)
	q := &r.dir.Lookup("edge1").Link.(*cloudSession).quota.queue
	r.eventually("the quota has room again", func() bool {
		conns, dials := q.InUse()
		return conns == 0 && dials == 0
	})
}

// Targets that do not answer take a part of the node's dials, and no more.
func TestReachDials(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		e := r.join("edge1", refuses)
		var callers sync.WaitGroup
		for i := range 100 {
			callers.Go(func() {
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				start := time.Now()
				_, err := e.client.Reach(ctx, fmt.Sprint("silent ", i))
				if code := tunnel.CodeOf(err); code != tunnel.Timeout && code != tunnel.Overloaded || time.Since(start) > dialTimeout+time.Second {
					t.Errorf("a silent target: %v after %s", err, time.Since(start))
				}
			})
		}
		time.Sleep(time.Second)
		if _, dials := r.dir.Lookup("edge1").Link.(*cloudSession).quota.queue.InUse(); dials != 5 {
			t.Errorf("%d dials are unanswered, want 5", dials)
		}
		callers.Wait()
		if _, err := r.dial("edge1", "target:1"); tunnel.CodeOf(err) != tunnel.Refused {
			t.Errorf("a dial of the cloud: %v", err)
		}
		r.idle(e)
	}, func(c *ServerConfig) { c.Limits.Dials = 10 }, withReach(func(ctx context.Context, _ *ReachRequest) (net.Conn, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	}))
}

// A caller that gives up, and a session that ends, end the dial at the cloud.
func TestReachGivesUp(t *testing.T) {
	dialling, ended := make(chan struct{}, 1), make(chan error, 1)
	r := newRig(t, withReach(func(ctx context.Context, _ *ReachRequest) (net.Conn, error) {
		dialling <- struct{}{}
		<-ctx.Done()
		ended <- ctx.Err()
		near, far := net.Pipe() // too late: nobody owns it
		far.Close()
		near.Close()
		return nil, ctx.Err()
	}))
	e := r.join("edge1", direct)
	for name, giveUp := range map[string]func(cancel func()){
		"the caller":        func(cancel func()) { cancel() },
		"the cloud's end":   func(func()) { r.dir.Lookup("edge1").Close(errors.New("cut by the test")) },
		"the edge's end":    func(func()) { e.client.Session().Close(errors.New("cut by the test")) },
		"a cut, far and up": func(func()) { e.client.Session().Link.(*edgeSession).own.Close() },
	} {
		before := e.client.Session()
		ctx, cancel := context.WithCancel(t.Context())
		result := make(chan error, 1)
		go func() {
			_, err := e.client.Reach(ctx, "target")
			result <- err
		}()
		<-dialling
		giveUp(cancel)
		if err := <-result; tunnel.CodeOf(err) != tunnel.Gone {
			t.Errorf("%s: %v, want gone", name, err)
		}
		<-ended
		cancel()
		if name == "the caller" {
			continue
		}
		r.eventually("there is another session, at both ends", func() bool {
			edge, cloud := e.client.Session(), r.dir.Lookup("edge1")
			return edge != nil && edge != before && cloud != nil && cloud.ID == edge.ID
		})
	}
	r.idle(e)
}

// newReachDataRig is a rig with an edge whose conns, for which it asks, go by data connections.
func newReachDataRig(t *testing.T, change ...func(*ServerConfig)) (*rig, *edge) {
	t.Helper()
	r := newReachRig(t, change...)
	r.spares = 8 // half of them are for conns that stay, and half of these for conns that pods can cause
	return r, r.join("edge1", direct)
}

// Callers that give up at any moment, by a stream or a data connection, leave nothing behind.
func TestReachGivesUpWhileHandedOver(t *testing.T) {
	dialled := make(chan struct{}, 1)
	r, e := newReachDataRig(t, withReach(func(ctx context.Context, request *ReachRequest) (net.Conn, error) {
		c, err := reachDirect(ctx, request)
		select {
		case dialled <- struct{}{}: // the conn is about to be handed over
		default: // an earlier call ended before anybody saw that it had dialled
		}
		return c, err
	}))
	target := testkit.Serve(t, testkit.Echo)
	made := 0
	for i := range 300 {
		r.haveSpare("edge1")
		ctx, cancel := context.WithCancel(t.Context())
		go func() {
			select {
			case <-dialled:
				time.Sleep(time.Microsecond << (i % 17))
			case <-ctx.Done():
			}
			cancel()
		}()
		if c, err := e.client.Reach(ctx, target); err == nil {
			made++
			if i%2 == 0 {
				c.(interface{ Abort() }).Abort()
			}
			c.Close()
		}
		cancel()
	}
	if made == 0 || made == 300 {
		t.Errorf("%d of 300 conns were made", made)
	}
	r.idle(e)
	r.eventually("no call is expected to bring a conn", func() bool {
		s := e.client.Session().Link.(*edgeSession)
		s.mu.Lock()
		defer s.mu.Unlock()
		return len(s.expects) == 0
	})
	c := r.mustDial("edge1", target)
	if _, err := c.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		t.Errorf("the next conn: %v", err)
	}
}

// If the data connection has died unnoticed, as behind a NAT that forgets, the conn comes by the stream of the call.
func TestReachAfterADataConnectionDied(t *testing.T) {
	r, e := newReachDataRig(t)
	r.withSpares("edge1", func(cs *cloudSession) {
		for _, d := range cs.spares {
			d.raw.Close()
		}
	})
	c, err := e.client.Reach(t.Context(), testkit.Serve(t, testkit.Echo))
	if err != nil {
		t.Fatal(err)
	}
	if e.client.Session().Link.(*edgeSession).byData(c) {
		t.Error("it goes by a data connection that is dead")
	}
	if _, err := c.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		t.Error(err)
	}
	c.Close()
	r.idle(e)
}

// A cloud cannot hand over a conn for which nobody waits, and an edge that does not say so gets no data connection.
func TestOddHandOver(t *testing.T) {
	r, e := newReachDataRig(t)
	r.haveSpare("edge1")
	cs := r.cloudEnd("edge1")
	m := &tunnel.Message{Category: category, Type: tunnel.TypeOpen, Topic: uuid.NewString(), Addr: uuid.NewString()}
	c, refusal, lost := cs.dialOver(t.Context(), cs.takeSpare(true), tunnel.Request{Node: "edge1"}, m, false)
	if c != nil || lost || refusal == nil || refusal.Code != tunnel.Gone {
		t.Errorf("a conn for nobody: %v, %t", refusal, lost)
	}
	if cs.handOver(t.Context(), uuid.NewString()) != nil {
		t.Error("a call without the key gets a data connection")
	}
	r.idle(e)
}

// At most half of the data connections carry conns that pods can cause, so a front door finds another one.
func TestPodsLeaveDataConnections(t *testing.T) {
	r, e := newReachDataRig(t)
	target := testkit.Serve(t, testkit.Echo)
	cs, es := r.cloudEnd("edge1"), e.client.Session().Link.(*edgeSession)
	r.eventually("there are enough data connections", func() bool {
		cs.requestMore()
		return cs.dataConns() == 4
	})
	byData := 0
	for range 8 {
		if es.byData(r.mustDial("edge1", target)) {
			byData++
		}
	}
	if byData != 2 {
		t.Errorf("%d of 8 conns that pods can cause have data connections", byData)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, err := r.dir.Dial(ctx, tunnel.Request{Node: "edge1", Category: "tcp", Network: "tcp", Addr: target})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if !cs.byData(c) {
		t.Error("the conn of a front door finds no data connection")
	}
}

// An edge that swallows a hand-over delays its caller for a moment, and the conn comes by the stream of the call.
func TestReachByASilentDataConnection(t *testing.T) {
	r, e := newReachDataRig(t, func(c *ServerConfig) { c.handOverTime = 100 * time.Millisecond })
	near, far := net.Pipe() // whoever writes to it is heard, and not answered
	defer far.Close()
	go io.Copy(io.Discard, far)
	cs := r.withSpares("edge1", func(cs *cloudSession) {
		for _, d := range cs.spares {
			d.Data = conn.NewData(near, near, cs.blocks)
		}
	})
	began := time.Now()
	c, err := e.client.Reach(t.Context(), testkit.Serve(t, testkit.Echo))
	if err != nil {
		t.Fatalf("after %v: %v", time.Since(began), err)
	}
	if e.client.Session().Link.(*edgeSession).byData(c) {
		t.Error("it goes by a data connection")
	}
	c.Close()
	r.eventually("no idle data connection is kept", func() bool {
		cs.mu.Lock()
		defer cs.mu.Unlock()
		return len(cs.spares) == 0
	})
}

// An edge that takes no new conns gets the conns for which it asks by streams, and is asked for no data connections.
func TestReachOfADrainedEdgeByStreams(t *testing.T) {
	r, e := newReachDataRig(t)
	target := testkit.Serve(t, testkit.Echo)
	cs := r.withSpares("edge1", func(cs *cloudSession) { cs.leaving = true })
	before := r.counters.DataOpened.Load()
	for range 5 {
		c, err := e.client.Reach(t.Context(), target)
		if err != nil {
			t.Fatal(err)
		}
		if e.client.Session().Link.(*edgeSession).byData(c) {
			t.Error("a conn goes by a data connection")
		}
		c.Close()
	}
	cs.mu.Lock()
	requested := cs.requested
	cs.mu.Unlock()
	if n := r.counters.DataOpened.Load() - before; n > 0 || requested > 0 {
		t.Errorf("the edge is asked for %d data connections", int(n)+requested)
	}
	r.idle(e)
}

// The cloud stops only after the last bytes and the event of a conn that was handed over.
func TestRelayOfAHandedOverConnEndsWithTheCloud(t *testing.T) {
	slow := &slowToClose{closing: make(chan struct{}), closed: make(chan struct{})}
	r := newReachRig(t, func(c *ServerConfig) {
		c.Grace = time.Millisecond
		c.Reach = func(ctx context.Context, request *ReachRequest) (net.Conn, error) {
			var err error
			slow.Conn, err = reachDirect(ctx, request)
			return slow, err
		}
	})
	r.spares = 8
	r.join("edge1", direct)
	r.mustDial("edge1", testkit.Serve(t, testkit.Echo)).Close() // so the conn is over, and the target is being closed
	r.eventually("the conn is over", func() bool { return r.dir.Lookup("edge1").Conns.Load() == 0 || tunnel.IsClosed(slow.closing) })
	r.running.Stop()
	if !tunnel.IsClosed(slow.closed) {
		t.Error("the cloud has stopped before the target was closed")
	}
}

// slowToClose takes its time to close.
type slowToClose struct {
	net.Conn
	once    sync.Once
	closing chan struct{} // closed by the first Close, at its start
	closed  chan struct{} // closed by the first Close, at its end
}

func (s *slowToClose) Close() error {
	s.once.Do(func() {
		close(s.closing)
		time.Sleep(200 * time.Millisecond)
		s.Conn.Close()
		close(s.closed)
	})
	return nil
}

// A conn that is handed over for a call gets a reset if the call has a conn already, or if its caller goes.
func TestHandedOverTooMuch(t *testing.T) {
	r, e := newReachDataRig(t)
	cs, es := r.cloudEnd("edge1"), e.client.Session().Link.(*edgeSession)
	ctx := metadata.NewIncomingContext(t.Context(), metadata.Pairs(dataKey, dataYes))
	handOver := func(topic string) *conn.Conn {
		t.Helper()
		r.haveSpare("edge1")
		request := tunnel.Request{Node: "edge1", Category: categoryServices, Addr: "x"}
		if refusal := cs.quota.enter(ctx, cs.done, request); refusal != nil {
			t.Fatal(refusal)
		}
		cs.quota.dialled("x", true)
		c := cs.handOver(ctx, topic)
		if c == nil {
			t.Fatal("no conn is handed over")
		}
		t.Cleanup(func() { c.Close() })
		c.SetReadDeadline(time.Now().Add(patience))
		return c
	}
	topic := uuid.NewString()
	expected := es.expect(topic, "x", func() {})
	first := handOver(topic)
	r.eventually("the call has a conn", func() bool { return len(expected.conn) == 1 })
	second := handOver(topic)
	_, err := second.Read(make([]byte, 1))
	wantErr(t, "the second conn", err, syscall.ECONNRESET)
	es.expectNoMore(topic)
	_, err = first.Read(make([]byte, 1))
	wantErr(t, "the first conn", err, syscall.ECONNRESET)
	r.idle(e)
}

// A lost session resets the conns that were asked for over it, at both ends.
func TestReachSessionLost(t *testing.T) {
	t.Run("by streams", func(t *testing.T) { reachSessionLost(t, 0) })
	t.Run("by data connections", func(t *testing.T) { reachSessionLost(t, 8) })
}

func reachSessionLost(t *testing.T, spares int) {
	for name, cut := range map[string]func(r *rig, e *edge){
		"at the cloud":   func(r *rig, _ *edge) { r.dir.Lookup("edge1").Close(errors.New("cut by the test")) },
		"at the edge":    func(_ *rig, e *edge) { e.client.Session().Close(errors.New("cut by the test")) },
		"in between":     func(_ *rig, e *edge) { e.client.Session().Link.(*edgeSession).own.Close() },
		"with the cloud": func(r *rig, _ *edge) { r.server.drain() },
	} {
		t.Run(name, func(t *testing.T) {
			r := newReachRig(t, func(c *ServerConfig) { c.Grace = time.Millisecond })
			r.spares = spares
			e := r.join("edge1", direct)
			c1, far1 := r.pair("edge1")
			c2, far2 := r.pair("edge1")
			c2.(interface{ CloseWrite() error }).CloseWrite()
			testkit.ReadAll(t, far2)
			cut(r, e)
			for name, c := range map[string]net.Conn{"edge's": c1, "target's": far1, "edge's half-closed": c2} {
				c.SetReadDeadline(time.Now().Add(patience))
				_, err := c.Read(make([]byte, 1))
				wantErr(t, name+" read", err, syscall.ECONNRESET)
			}
			r.eventually("the target that was half-closed cannot write any more", func() bool {
				_, err := far2.Write([]byte("x"))
				return err != nil
			})
			r.idle(e)
		})
	}
}

// An edge that stops lets its conns finish, and asks for no new ones.
func TestReachWhileTheEdgeStops(t *testing.T) {
	r := newReachRig(t)
	e := r.join("edge1", direct)
	c, far := r.pair("edge1")
	e.Cancel()
	r.eventually("it asks for no more", func() bool {
		made, err := r.dial("edge1", far.LocalAddr().String())
		if err == nil {
			tunnel.Reset(made)
		}
		return tunnel.CodeOf(err) == tunnel.Draining
	})
	staysOpen(t, c, far)
	select {
	case <-e.Done():
		t.Fatal("the edge stops before its conn has ended")
	default:
	}
	far.Close()
	testkit.ReadAll(t, c)
	c.Close()
	e.Stop()
}

// The cloud opens nothing through a drained edge, and still connects it to targets. A session that such an edge loses
// has not ended because the edge has stopped; the end of the process has.
func TestReachOfADrainedEdge(t *testing.T) {
	ends := new(testkit.Trail[tunnel.Event])
	r := newReachRig(t, func(cfg *ServerConfig) {
		cfg.Audit = func(e tunnel.Event) {
			if e.Kind == tunnel.EventLeave {
				ends.Record(e)
			}
		}
	})
	cfg := r.clientConfig("edge1")
	var raw atomic.Value // the last connection to the cloud
	cfg.Dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := (&net.Dialer{}).DialContext(ctx, network, addr)
		if err == nil {
			raw.Store(c)
		}
		return c, err
	}
	e := r.start(cfg, direct)
	drained := func(what string) {
		t.Helper()
		r.eventually(what, func() bool {
			c, err := r.dir.Dial(t.Context(), tunnel.Request{Node: "edge1", Category: "tcp", Network: "tcp", Addr: "127.0.0.1:1"})
			if err == nil {
				c.Close()
			}
			return tunnel.CodeOf(err) == tunnel.Draining
		})
		c, far := r.pair("edge1")
		staysOpen(t, c, far)
		far.Close()
		testkit.ReadAll(t, c)
		c.Close()
	}
	r.eventually("the edge joins", func() bool { return r.dir.Holds("edge1") && e.client.Ready() == nil })
	first := r.dir.Lookup("edge1")
	e.client.Drain()
	drained("the cloud opens nothing")

	tunnel.Reset(raw.Load().(net.Conn))
	r.eventually("the end is recorded", func() bool { return len(ends.All()) == 1 })
	if end := ends.All()[0]; end.Err == "" || end.Err == "the edge has stopped" {
		t.Errorf("the audit says of a lost session: %q", end.Err)
	}
	if l := r.log.lines("end=cloud", "the edge has stopped"); len(l) != 0 {
		t.Errorf("the log says of a lost session: %s", l)
	}
	r.eventually("the edge joins again", func() bool {
		now := r.dir.Lookup("edge1")
		return now != nil && now != first && e.client.Ready() == nil
	})
	drained("the cloud opens nothing through the next session")

	e.Stop()
	r.eventually("the end of the edge is recorded", func() bool { return len(ends.All()) == 2 })
	if end := ends.All()[1]; end.Err != "" {
		t.Errorf("the audit says of an edge that stops: %q", end.Err)
	}
	if l := r.log.lines("end=cloud", "session ended: the edge has stopped"); len(l) != 1 {
		t.Errorf("the log says of an edge that stops: %s", r.log.lines("end=cloud", "session ended"))
	}
}

// A cloud that stops lets conns finish, and connects edges to nothing more.
func TestReachWhileTheCloudStops(t *testing.T) {
	r := newReachRig(t)
	e := r.join("edge1", direct)
	c, far := r.pair("edge1")
	r.running.Cancel()
	r.eventually("it connects to nothing more", func() bool {
		made, err := r.dial("edge1", far.LocalAddr().String())
		if err == nil {
			tunnel.Reset(made)
		}
		return tunnel.CodeOf(err) == tunnel.Draining
	})
	staysOpen(t, c, far)
	c.Close()
	testkit.ReadAll(t, far)
	far.Close()
	r.running.Stop()
	r.eventually("the edge has no session", func() bool { return e.client.Ready() != nil })
}

// While a cloud stops, a conn through another node ends at a quiet moment. One whose caller waits for an answer lasts
// until the end of the grace period, wherever its target is.
func TestReachEndsAtAQuietMoment(t *testing.T) {
	for name, test := range map[string]struct {
		near     bool // the cloud itself has the target
		waits    bool // the last bytes are a request
		leaves   bool // the cloud leaves before it stops, for as long as it may
		data     bool // the conn goes by a data connection
		earliest time.Duration
		latest   time.Duration
	}{
		"an answered request":                            {false, false, false, false, 15 * time.Second, 23 * time.Second},
		"an answered request, by a data connection":      {false, false, false, true, 15 * time.Second, 23 * time.Second},
		"an answered request, and the edges do not move": {false, false, true, false, 15 * time.Second, 23 * time.Second},
		"a request that waits":                           {false, true, false, false, 25 * time.Second, 25 * time.Second},
		"a request that waits for the cloud's side":      {true, true, false, false, 25 * time.Second, 25 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			var target net.Conn
			var dir *tunnel.Directory
			onFakeClock(t, func(t *testing.T, r *rig) {
				near, far := net.Pipe()
				defer far.Close()
				target, dir = near, r.dir
				r.join("edge2", func(context.Context, tunnel.Request) (net.Conn, error) { return target, nil })
				if test.data {
					r.spares = 8 // half of them are for conns that stay, and half of these for conns that pods can cause
				}
				e := r.join("edge1", direct)
				if test.data {
					r.haveSpare("edge1")
				}
				reached, err := e.client.Reach(t.Context(), "target")
				if err != nil {
					t.Fatal(err)
				}
				if data := e.client.Session().Link.(*edgeSession).byData(reached); data != test.data {
					t.Fatalf("the conn goes by a data connection: %t, want %t", data, test.data)
				}
				c, a := net.Pipe()
				defer c.Close()
				spliced := make(chan struct{})
				go func() {
					defer close(spliced)
					tunnel.Splice(t.Context(), a, reached)
				}()
				pass := func(from, to net.Conn) {
					t.Helper()
					go from.Write([]byte("x"))
					if _, err := io.ReadFull(to, make([]byte, 1)); err != nil {
						t.Fatal(err)
					}
				}
				pass(c, far)
				if !test.waits {
					pass(far, c)
				}
				time.Sleep(7 * time.Second) // Splice has looked once before
				start := time.Now()
				if test.leaves {
					r.server.Leave(t.Context())
				}
				r.running.Cancel()
				<-spliced
				if took := time.Since(start).Round(time.Second); took < test.earliest || took > test.latest {
					t.Errorf("the conn ends after %s, want %s to %s", took, test.earliest, test.latest)
				}
				r.running.Stop()
			}, func(cfg *ServerConfig) {
				cfg.Grace = tunnel.GracePeriod
				if test.leaves {
					cfg.Replicas = slowOthers{leavingOthers{&others{id: uuid.NewString()}, func() {}}}
				}
				cfg.Reach = func(ctx context.Context, _ *ReachRequest) (net.Conn, error) {
					if test.near {
						return target, nil
					}
					return dir.Dial(ctx, tunnel.Request{Node: "edge2", Category: "tcp", Network: "tcp", Addr: "target:1"})
				}
			})
		})
	}
}

// staysOpen checks that bytes go both ways.
func staysOpen(t *testing.T, c, far net.Conn) {
	t.Helper()
	for range 3 {
		for _, way := range [][2]net.Conn{{c, far}, {far, c}} {
			go way[0].Write([]byte("still here"))
			if _, err := io.ReadFull(way[1], make([]byte, 10)); err != nil {
				t.Fatalf("the live conn: %v", err)
			}
		}
	}
}

// A cloud that stops resets a conn whose target takes nothing, though the edge has sent everything and has gone.
func TestReachTargetStallsWhileTheCloudStops(t *testing.T) {
	r := newReachRig(t, func(c *ServerConfig) { c.Grace = 500 * time.Millisecond })
	e := r.join("edge1", direct)
	c, far := r.pair("edge1")
	far.SetReadBuffer(4 << 10)
	sent := make(chan struct{})
	go func() {
		defer close(sent)
		c.Write(blob(8 << 20))
		c.Close()
	}()
	select {
	case <-sent:
	case <-time.After(300 * time.Millisecond): // not waited for: the target has stalled by then
	}
	r.running.Stop() // fails unless Run returns in time
	_, err := io.Copy(io.Discard, far)
	wantErr(t, "the target's read", err, syscall.ECONNRESET)
	<-sent
	r.idle(e)
}

// While a replica leaves, an edge asks the one that stays.
func TestReachPrefersTheReplicaThatStays(t *testing.T) {
	l := testkit.NewTarget(t)
	var requested [2]atomic.Int64
	var n atomic.Int64
	all := newFleet(t, 2, func(c *ServerConfig) {
		i := n.Add(1) - 1
		c.Reach = func(ctx context.Context, _ *ReachRequest) (net.Conn, error) {
			requested[i].Add(1)
			return reachDirect(ctx, &ReachRequest{Target: l.Address()})
		}
	})
	cfg := all[0].clientConfig("edge1")
	cfg.Dial, cfg.All = all.balanced(), true
	e := all[0].start(cfg, direct)
	all[0].eventually("the edge has both sessions", func() bool { return len(e.client.Sessions()) == 2 })
	reach := func() {
		t.Helper()
		c, err := e.client.Reach(t.Context(), "target")
		if err != nil {
			t.Fatal(err)
		}
		tunnel.Reset(c)
	}
	newest := 0
	if e.client.Session().Instance == all[1].others.id {
		newest = 1
	}
	reach()
	if requested[newest].Load() != 1 {
		t.Error("the newest session is not the first one")
	}
	all[newest].server.Move()
	all[0].eventually("the edge knows that it leaves", func() bool {
		e.client.mu.Lock()
		defer e.client.mu.Unlock()
		stays, _ := e.client.liveLocked()
		return len(stays) > 0 && stays[0].pub.Instance == all[1-newest].others.id
	})
	reach()
	if requested[1-newest].Load() != 1 {
		t.Error("the replica that leaves is still asked")
	}
}

// Another session is tried if the first one refuses because its cloud or its way is about to go, and for no other reason.
func TestReachTriesTheNextSession(t *testing.T) {
	for _, code := range tunnel.Codes() {
		var requested atomic.Int64
		all := newFleet(t, 2, withReach(func(context.Context, *ReachRequest) (net.Conn, error) {
			requested.Add(1)
			return nil, tunnel.Refusef(code, "no")
		}))
		cfg := all[0].clientConfig("edge1")
		cfg.Dial, cfg.All = all.balanced(), true
		e := all[0].start(cfg, direct)
		all[0].eventually("the edge has both sessions", func() bool { return len(e.client.Sessions()) == 2 })
		if _, err := e.client.Reach(t.Context(), "target"); tunnel.CodeOf(err) != code {
			t.Errorf("%s arrives as %v", code, err)
		}
		want := int64(1)
		if code == tunnel.Draining || code == tunnel.Gone {
			want = 2
		}
		if n := requested.Load(); n != want {
			t.Errorf("%s: %d sessions are tried, want %d", code, n, want)
		}
		e.Stop()
	}
}

// A thousand conns at once, and nothing is left of them.
func TestThousandReaches(t *testing.T) {
	r := newReachRig(t)
	e := r.join("edge1", direct)
	addr := testkit.Serve(t, testkit.Echo)
	r.mustDial("edge1", addr).Close() // so the target is known, and nobody waits for its first answer
	var callers sync.WaitGroup
	var failed atomic.Int64
	for i := range 1000 {
		callers.Go(func() {
			c, err := e.client.Reach(t.Context(), addr) // without a deadline: a busy machine needs its time for all of them
			if err != nil {
				t.Error(err)
				failed.Add(1)
				return
			}
			defer c.Close()
			want := []byte(fmt.Sprint("this is caller ", i))
			go func() {
				c.Write(want)
				c.(interface{ CloseWrite() error }).CloseWrite()
			}()
			if got, err := io.ReadAll(c); err != nil || !bytes.Equal(got, want) {
				failed.Add(1)
			}
		})
	}
	callers.Wait()
	if n := failed.Load(); n != 0 {
		t.Errorf("%d of 1,000 conns have failed", n)
	}
	r.idle(e)
	if n := r.counters.Sessions.Load(); n != 1 {
		t.Errorf("the session was lost %d times", n-1)
	}
}

// A panic of what connects ends the session it happened in, and gives everything back.
func TestPanicInAReach(t *testing.T) {
	r := newRig(t, withReach(func(context.Context, *ReachRequest) (net.Conn, error) { panic("boom") }))
	r.panics = 1
	other := r.join("edge2", direct)
	e := r.join("edge1", direct)
	q := r.dir.Lookup("edge1").Link.(*cloudSession).quota
	if _, err := e.client.Reach(t.Context(), "target"); err == nil {
		t.Error("there is a conn")
	}
	r.eventually("the edge comes back", func() bool { return r.counters.Sessions.Load() == 3 && e.client.Ready() == nil })
	if conns, dials := q.queue.InUse(); conns != 0 || dials != 0 {
		t.Errorf("%d conns and %d dials are left", conns, dials)
	}
	if other.client.Ready() != nil {
		t.Error("another session has ended, too")
	}
	r.idle(e)
}

// Chunks that break the protocol reset the conn and its target. The session goes on.
func TestReachBreaksTheProtocol(t *testing.T) {
	for name, chunks := range map[string][]*pb.Chunk{
		"bytes after fin": {{Data: []byte("a"), Fin: true}, {Data: []byte("b")}},
		"a huge chunk":    {{Data: blob(conn.MaxIncoming + 1)}},
		"a huge message":  {{Data: blob(2 * conn.MaxMessage)}},
	} {
		t.Run(name, func(t *testing.T) {
			r := newReachRig(t)
			s := r.stranger()
			control := s.join("edge1")
			l := testkit.NewTarget(t)
			topic := uuid.NewString()
			c := s.reach(topicKey, topic, targetKey, l.Address())
			if _, err := c.Header(); err != nil {
				t.Fatal(err)
			}
			far := l.Next(t)
			for _, m := range chunks {
				c.Send(m)
			}
			if m := control.want("the control stream says that the conn is over", typeCancel); m.GetTopic() != topic {
				t.Errorf("topic %s is cancelled, not %s", m.GetTopic(), topic)
			}
			got, err := io.ReadAll(far)
			// The reset may overtake the fin, since its sender has broken the protocol. No end is clean before the fin.
			if err == nil && string(got) != "a" {
				t.Errorf("the target gets %q and a clean end", got)
			}
			r.idle()
			if !r.dir.Holds("edge1") {
				t.Error("the session is gone too")
			}
		})
	}
}

// An edge that reads nothing of a conn is told by the control stream that the target has reset it.
func TestReachIsCancelledBehindAStall(t *testing.T) {
	r := newReachRig(t)
	e := r.join("edge1", direct)
	c, far := r.pair("edge1")
	far.SetWriteDeadline(time.Now().Add(300 * time.Millisecond))
	io.Copy(struct{ io.Writer }{far}, endless{}) // until nothing moves
	far.SetLinger(0)
	far.Close()
	r.eventually("the conn is over at the edge, which reads nothing", func() bool {
		return tunnel.IsClosed(c.(*conn.Conn).Done()) && e.client.Session().Conns.Load() == 0
	})
	r.idle(e)
}

// Another replica of the cloud is no node: it asks for nothing.
func TestReachOfAReplica(t *testing.T) {
	all := newFleet(t, 2, withReach(reachDirect))
	s := all[1].links[0].links[0].edgeSession
	if _, refusal := s.reach(t.Context(), "127.0.0.1:1"); refusal == nil || !strings.Contains(refusal.Text, "too old") {
		t.Errorf("a replica gets %v", refusal)
	}
}

// Whatever metadata a Reach has, what is taken from them is valid.
func FuzzReachOf(f *testing.F) {
	f.Add(uuid.NewString(), "endpoint/ns/svc/slice/10.0.0.1 TCP 80", false)
	f.Add("urn:uuid:"+uuid.NewString(), "x", false)
	f.Add(uuid.NewString(), "\x00\xff", true)
	f.Fuzz(func(t *testing.T, topic, target string, twice bool) {
		md := metadata.Pairs(topicKey, topic, targetKey, target)
		if twice {
			md.Append(targetKey, target)
		}
		gotTopic, gotTarget, err := reachOf(metadata.NewIncomingContext(t.Context(), md))
		if err != nil {
			if status.Code(err) != codes.InvalidArgument || gotTopic+gotTarget != "" {
				t.Fatalf("%q %q: %v", gotTopic, gotTarget, err)
			}
			return
		}
		if twice || gotTopic != topic || gotTarget != target || len(topic) != 36 || len(target) > maxTarget || text(target[:min(512, len(target))]) != target[:min(512, len(target))] {
			t.Fatalf("accepted: %q %q", gotTopic, gotTarget)
		}
	})
}

// A refusal arrives as it was given; whatever a cloud says, what the edge takes is printable, short, and has a code.
func FuzzReachRefusal(f *testing.F) {
	f.Add(uint8(1), "text", uint32(9), "denied")
	f.Add(uint8(200), "\xff", uint32(14), "")
	f.Fuzz(func(t *testing.T, code uint8, words string, grpcCode uint32, name string) {
		sent := &tunnel.Refusal{Code: tunnel.Code(code), Text: words}
		got := refusalBy(status.FromProto(status.Convert(refusalStatus(sent)).Proto()).Err())
		want := tunnel.Internal
		if 1 <= code && code <= uint8(tunnel.Internal) {
			want = tunnel.Code(code)
		}
		if got.Code != want || got.Text != text(words) {
			t.Fatalf("%v arrives as %v", sent, got)
		}
		if grpcCode == 0 {
			return
		}
		odd := refusalBy(withFacts(codes.Code(grpcCode), reasonRefused, words, map[string]string{codeFact: name}))
		none := refusalBy(status.Error(codes.Code(grpcCode), words))
		for _, r := range []*tunnel.Refusal{odd, none} {
			if r.Code < tunnel.Denied || r.Code > tunnel.Internal || len(r.Text) > 600 || tunnel.Printable(r.Text) != r.Text {
				t.Fatalf("%d %q arrives as %v", grpcCode, words, r)
			}
		}
	})
}

// Conns of Services have half of the conns of a node, at the node that asks and at the node that has the endpoint. So
// pods that leave conns idle keep no operator out.
func TestShareOfServices(t *testing.T) {
	target := testkit.Serve(t, testkit.Echo)
	r := newRig(t, withReach(func(ctx context.Context, request *ReachRequest) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", request.Target)
	}), func(c *ServerConfig) { c.Limits.Conns = 4 })
	clients := make(map[string]*Client)
	for _, node := range []string{"edge1", "edge2"} {
		c, err := NewClient(r.clientConfig(node), &edgeModule{"tcp", direct}, &edgeModule{"services", direct})
		if err != nil {
			t.Fatal(err)
		}
		testkit.Run(t, c.Run)
		clients[node] = c
		r.eventually("the edge joins", func() bool { return c.Ready() == nil && r.dir.Holds(tunnel.NodeName(node)) })
	}
	var conns []net.Conn
	defer func() {
		for _, c := range conns {
			c.Close()
		}
	}()
	const byPods = "tcp by pods"
	dial := func(node, category string) error {
		request := tunnel.Request{
			Node: tunnel.NodeName(node), Category: category, Network: "tcp", Addr: target, NoWait: true,
		}
		if category == byPods {
			request.Category, request.ByPods = "tcp", true
		}
		c, err := r.dir.Dial(t.Context(), request)
		if err == nil {
			conns = append(conns, c)
		}
		return err
	}
	reach := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond) // nobody ends a conn meanwhile
		defer cancel()
		c, err := clients["edge2"].Reach(ctx, target)
		if err == nil {
			conns = append(conns, c)
		}
		return err
	}
	for range 2 {
		if err := dial("edge1", categoryServices); err != nil {
			t.Fatal(err)
		}
		c, err := clients["edge2"].Reach(t.Context(), target)
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
	}
	wantOverloaded(t, dial("edge1", categoryServices), tunnel.LimitConns)
	wantOverloaded(t, dial("edge1", byPods), tunnel.LimitConns)
	if reach() == nil {
		t.Error("a node may ask for more than half of its conns")
	}
	for _, node := range []string{"edge1", "edge2"} {
		for range 2 {
			if err := dial(node, "tcp"); err != nil {
				t.Errorf("%s, for an operator: %v", node, err)
			}
		}
	}
	for _, c := range conns {
		tunnel.Reset(c)
	}
	conns = nil
	r.eventually("there is room again", func() bool { return dial("edge1", byPods) == nil })
	if c, err := clients["edge2"].Reach(t.Context(), target); err != nil {
		t.Error(err)
	} else {
		conns = append(conns, c)
	}
}

// An edge with sessions to replicas of two configurations asks the one that serves Services, however old the session.
func TestReachPrefersTheReplicaWithServices(t *testing.T) {
	for without := range 2 {
		target := testkit.Serve(t, testkit.Echo)
		var n atomic.Int64
		all := newFleet(t, 2, func(c *ServerConfig) {
			if n.Add(1)-1 != int64(without) {
				c.Reach = func(ctx context.Context, _ *ReachRequest) (net.Conn, error) {
					return reachDirect(ctx, &ReachRequest{Target: target})
				}
			}
		})
		cfg := all[0].clientConfig("edge1")
		cfg.Dial, cfg.All = all.balanced(), true
		e := all[0].start(cfg, direct)
		all[0].eventually("the edge has both sessions", func() bool { return len(e.client.Sessions()) == 2 })
		c, err := e.client.Reach(t.Context(), "target")
		if err != nil {
			t.Fatalf("without Services at replica %d: %v", without, err)
		}
		tunnel.Reset(c)
		cc, err := e.client.Calls(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		e.client.mu.Lock()
		for _, l := range e.client.links {
			if l.calls == cc && l.pub.Instance != all[1-without].others.id {
				t.Errorf("without Services at replica %d, the edge calls it", without)
			}
		}
		e.client.mu.Unlock()
	}
}

// The audit, the tap and the traces have each conn for which an edge asks: who asks, for what, and what became of it.
// Of targets that an edge may not reach, they have the first one.
func TestReachIsTold(t *testing.T) {
	seen, spans := new(testkit.Trail[tunnel.Event]), new(testkit.Trail[*tunnel.Span])
	echo := testkit.Serve(t, testkit.Echo)
	var traced atomic.Int64
	r := newRig(t, withReach(func(ctx context.Context, request *ReachRequest) (net.Conn, error) {
		if request.Trace != nil {
			traced.Add(1)
		}
		request.Node, request.Addr = "edge2", echo
		switch request.Target {
		case "denied":
			return nil, tunnel.Refusef(tunnel.Denied, "no endpoint")
		case "refused":
			return nil, tunnel.Refusef(tunnel.Refused, "nothing listens")
		}
		return direct(ctx, tunnel.Request{Addr: echo})
	}), func(c *ServerConfig) {
		c.ReachSink = tunnel.Sink{Audit: seen.Record, Tracer: &tunnel.Tracer{PerMillion: 1_000_000, Take: spans.Record}}
	})
	e := r.join("edge1", direct)
	c, err := e.client.Reach(t.Context(), "endpoint/shop/web TCP 80")
	if err != nil {
		t.Fatal(err)
	}
	io.WriteString(c, "hello")
	c.(interface{ CloseWrite() error }).CloseWrite()
	if b, err := io.ReadAll(c); err != nil || string(b) != "hello" {
		t.Fatalf("read %q, %v", b, err)
	}
	c.Close()
	testkit.Eventually(t, "an event", func() bool { return len(seen.All()) == 1 })
	got := seen.All()[0]
	if got.Kind != tunnel.EventServices || got.Result != tunnel.ResultOK || got.Node != "edge2" ||
		got.Caller != "node edge1" || got.Remote == "" || got.Target != echo || got.Path != "endpoint/shop/web TCP 80" ||
		got.Sent != 5 || got.Received != 5 || got.Seconds <= 0 {
		t.Errorf("the event is %+v", got)
	}

	for _, target := range []string{"refused", "denied", "denied", "denied"} {
		if _, err := e.client.Reach(t.Context(), target); err == nil {
			t.Errorf("%s: connected", target)
		}
	}
	all := seen.All()
	if len(all) != 3 || all[1].Result != tunnel.Refused.String() || all[2].Result != tunnel.Denied.String() {
		t.Errorf("the events are %+v", all)
	}
	counts := &r.counters.Doors[tunnel.DoorServices]
	if n, _, _ := counts.Durations(); n != 1 || counts.Results(tunnel.Refused) != 1 || counts.Results(tunnel.Denied) != 3 {
		t.Errorf("%d conns, %d refused, %d denied", n, counts.Results(tunnel.Refused), counts.Results(tunnel.Denied))
	}
	if n := traced.Load(); n != 5 {
		t.Errorf("%d conns with a trace, want 5", n)
	}
	testkit.Eventually(t, "a span for each", func() bool { return len(spans.All()) == 5 })
}
