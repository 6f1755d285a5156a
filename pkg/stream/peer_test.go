package stream

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/conn"
	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// An edge may say what it likes on its control stream: what the cloud does not know
// is counted and ignored.
func TestEdgeSaysOddThings(t *testing.T) {
	r := newRig(t)
	c := r.stranger().join("edge1")
	ignored := []*pb.StreamMsg{
		{Category: "x", Type: "y"},
		{},
		{Category: strings.Repeat("x", 40<<10), Data: blob(10 << 10)},
	}
	for _, m := range ignored {
		c.send(m)
	}
	for _, topic := range []string{"", "unknown"} { // known, and nobody waits for it
		c.say(typeRefused, topic, &pb.Refused{Code: pb.Code_CODE_DENIED})
	}
	c.say(typeHeartbeat, "", &pb.Heartbeat{Sent: 7, RoundTrip: -1})
	var h pb.Heartbeat
	if m := c.want("the session still answers", typeHeartbeat); proto.Unmarshal(m.GetData(), &h) != nil || h.GetSent() != 7 {
		t.Errorf("the heartbeat comes back as %v", &h)
	}
	if n := r.counters.UnknownMessages.Load(); n != uint64(len(ignored)) {
		t.Errorf("%d unknown messages counted, want %d", n, len(ignored))
	}
	if s := r.dir.Lookup("edge1"); s == nil || s.RTT.Load() != 0 || s.Conns.Load() != 0 {
		t.Error("the session has changed")
	}
}

// What only the cloud may say ends the session of an edge that says it.
func TestEdgeSaysWhatTheCloudMay(t *testing.T) {
	for name, m := range map[string]*pb.StreamMsg{
		"open":            {Category: "tcp", Type: tunnel.TypeOpen, Topic: "t", Addr: "127.0.0.1:22"},
		"open to nobody":  {Category: category, Type: tunnel.TypeOpen, Topic: "t", Addr: "127.0.0.1:22"},
		"connection":      {Category: category, Type: typeConnection, Topic: "t"},
		"hello once more": {Category: category, Type: typeHello},
		"replicas":        {Category: category, Type: typeReplicas},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			c := r.stranger().join("edge1")
			c.send(m)
			if err := c.end(); status.Code(err) != codes.PermissionDenied {
				t.Errorf("the session ends with %v, want PermissionDenied", err)
			}
			r.eventually("the node is gone", func() bool { return !r.dir.Holds("edge1") })
		})
	}
}

// A connection has one control stream at most, so that what waits for a hello is bounded
// by what connections are, and each is asked for its token once.
func TestOneControlStream(t *testing.T) {
	r := newRig(t)
	s := r.stranger()
	first := s.control(bearerOf("edge1")) // says no hello
	r.eventually("the first stream is there", func() bool { return r.auth.asked.Load() == 1 })
	if err := s.control(bearerOf("edge1")).end(); status.Code(err) != codes.AlreadyExists {
		t.Errorf("a second control stream ends with %v, want AlreadyExists", err)
	}
	if err := first.end(); err == nil {
		t.Error("the first goes on")
	}
	if n := r.auth.asked.Load(); n != 1 {
		t.Errorf("the token was looked at %d times", n)
	}
}

// What breaks the protocol ends the session that said it, and no other.
func TestEdgeBreaksTheProtocol(t *testing.T) {
	garbage := []byte("\x08")
	for name, m := range map[string]*pb.StreamMsg{
		"bad heartbeat": {Category: category, Type: typeHeartbeat, Data: garbage},
		"bad refusal":   {Category: category, Type: typeRefused, Data: garbage},
		"bad drain":     {Category: category, Type: typeDrain, Data: garbage},
		"bad proof":     {Category: category, Type: typeCredential, Data: garbage},
		"huge message":  {Category: category, Type: typeHeartbeat, Data: blob(conn.MaxMessage)},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			other := r.join("edge2", direct)
			c := r.stranger().join("edge1")
			c.send(m)
			if err := c.end(); status.Code(err) != codes.InvalidArgument && status.Code(err) != codes.ResourceExhausted {
				t.Errorf("the session ends with %v, want InvalidArgument or ResourceExhausted", err)
			}
			r.eventually("the node is gone", func() bool { return !r.dir.Holds("edge1") })
			if other.client.Ready() != nil || r.counters.Sessions.Load() != 2 {
				t.Error("another session ended with it")
			}
		})
	}
}

// A Connect is a conn only on its own session's connection, for a topic that waits.
func TestConnectThatNobodyWaitsFor(t *testing.T) {
	r := newRig(t)
	s1, s2 := r.stranger(), r.stranger()
	c1 := s1.join("edge1")
	s2.join("edge2")
	open, result := r.sentOpen(c1, "edge1")
	for _, c := range []struct {
		name   string
		stream pb.Stream_ConnectClient
		code   codes.Code
		says   string
	}{
		{"a connection without a session", r.stranger().connect(open.GetTopic()), codes.FailedPrecondition, "wrong-session"},
		{"another node's topic", s2.connect(open.GetTopic()), codes.NotFound, "gone"},
		{"an unknown topic", s1.connect("unknown"), codes.NotFound, "gone"},
		{"no topic", s1.connect(), codes.InvalidArgument, "topic"},
		{"two topics", s1.connect(open.GetTopic(), "unknown"), codes.InvalidArgument, "topic"},
	} {
		_, err := c.stream.Recv()
		if status.Code(err) != c.code || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v; want %s and %q", c.name, err, c.code, c.says)
		}
	}
	if n := r.counters.Refusals(tunnel.WrongSession); n != 1 {
		t.Errorf("%d wrong-session counted, want 1", n)
	}
	if len(r.log.lines("end=cloud", "level=WARN", "wrong-session", "remote=127.0.0.1:")) != 1 {
		t.Error("the split session is not in the cloud's log")
	}

	// The right one still works, once.
	conn := s1.connect(open.GetTopic())
	d := <-result
	if d.err != nil {
		t.Fatalf("the dial: %v", d.err)
	}
	if _, err := s1.connect(open.GetTopic()).Recv(); status.Code(err) != codes.NotFound {
		t.Errorf("a second Connect of the same topic: %v, want gone", err)
	}
	if err := conn.Send(&pb.Chunk{Data: []byte("hi"), Fin: true}); err != nil {
		t.Fatal(err)
	}
	if got := testkit.ReadAll(t, d.conn); string(got) != "hi" {
		t.Errorf("read %q", got)
	}
	d.conn.Close()
	if _, err := conn.Recv(); err != nil { // fin
		t.Errorf("the end: %v", err)
	}
	if _, err := conn.Recv(); !errors.Is(err, io.EOF) {
		t.Errorf("the status is %v, want OK", err)
	}
	r.idle()
}

// A connection holds one session; a second is refused and costs the connection.
func TestTwoSessionsOnOneConnection(t *testing.T) {
	r := newRig(t)
	s := r.stranger()
	first := s.join("edge1")
	second := s.control(bearerOf("edge2"))
	if err := second.end(); status.Code(err) != codes.AlreadyExists {
		t.Errorf("the second session: %v, want a refusal", err)
	}
	if r.dir.Holds("edge2") {
		t.Error("the second node has a session")
	}
	if err := first.end(); err == nil {
		t.Error("the first goes on beside a peer that does such things")
	}
	r.eventually("nothing is left", func() bool { return r.dir.Len() == 0 })
}

// A conn whose chunks break the protocol is reset; its session goes on.
func TestConnBreaksTheProtocol(t *testing.T) {
	for name, chunks := range map[string][]*pb.Chunk{
		"bytes after fin": {{Data: []byte("a"), Fin: true}, {Data: []byte("b")}},
		"a huge chunk":    {{Data: blob(conn.MaxIncoming + 1)}},
		"a huge message":  {{Data: blob(2 * conn.MaxMessage)}},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			s := r.stranger()
			c := s.join("edge1")
			open, result := r.sentOpen(c, "edge1")
			conn := s.connect(open.GetTopic())
			d := <-result
			if d.err != nil {
				t.Fatal(d.err)
			}
			for _, m := range chunks {
				conn.Send(m)
			}
			go io.Copy(io.Discard, d.conn)
			if m := c.want("the control stream says that the conn is over", typeCancel); m.GetTopic() != open.GetTopic() {
				t.Errorf("topic %s is cancelled, not %s", m.GetTopic(), open.GetTopic())
			}
			if _, err := conn.Recv(); status.Code(err) != codes.Aborted && status.Code(err) != codes.Internal && status.Code(err) != codes.ResourceExhausted {
				t.Errorf("the conn ends with %v, want a reset", err)
			}
			r.idle()
			if !r.dir.Holds("edge1") {
				t.Error("the session is gone too")
			}
		})
	}
}

// An edge that sends and never reads its control stream loses its session when
// hundreds of answers wait for it. Its neighbours do not notice.
func TestEdgeThatDoesNotRead(t *testing.T) {
	r := newRig(t, func(c *ServerConfig) { c.Limits.Conns = 1 }) // for which 260 messages may wait
	other := r.join("edge2", direct)
	c := r.stranger().join("edge1")
	r.cloudEnd("edge1").quota.messages.steady.SetLimit(rate.Inf) // or the edge would be ended for that
	flood := make(chan struct{})
	go func() {
		defer close(flood)
		beat := &pb.StreamMsg{Category: category, Type: typeHeartbeat, Data: encode(&pb.Heartbeat{Sent: 1 << 60, RoundTrip: 1 << 60})}
		for c.stream.Send(beat) == nil {
		}
	}()
	r.eventually("the session ends", func() bool { return !r.dir.Holds("edge1") })
	<-flood
	if len(r.log.lines("session ended", "node=edge1", "does not read its control stream")) != 1 {
		t.Error("the log does not say why")
	}
	near, far := r.pair("edge2")
	go near.Write([]byte("x"))
	if _, err := far.Read(make([]byte, 1)); err != nil || other.client.Ready() != nil || r.counters.Sessions.Load() != 2 {
		t.Errorf("another node noticed: %v", err)
	}
}

// Every code that an edge gives as a reason reaches the caller, with its text; one
// from the future is internal.
func TestRefusalsTravel(t *testing.T) {
	r := newRig(t)
	var mu sync.Mutex
	var next error
	e := r.join("edge1", func(context.Context, tunnel.Request) (net.Conn, error) {
		mu.Lock()
		defer mu.Unlock()
		return nil, next
	})
	refuse := func(err error) error {
		mu.Lock()
		next = err
		mu.Unlock()
		_, err = r.dial("edge1", "target:1")
		return err
	}
	for _, code := range tunnel.Codes() {
		err := refuse(tunnel.Refusef(code, "because of %s", code))
		if err == nil || tunnel.CodeOf(err) != code || err.Error() != code.String()+": because of "+code.String() {
			t.Errorf("%s arrives as %v", code, err)
		}
		if r.counters.Refusals(code) != 1 || r.edges.Refusals(code) != 1 {
			t.Errorf("%s is counted %d times at the cloud and %d at the edge, want once", code, r.counters.Refusals(code), r.edges.Refusals(code))
		}
	}
	if err := refuse(errors.New("odd \xff text")); tunnel.CodeOf(err) != tunnel.Internal || err.Error() != "internal: odd ? text" {
		t.Errorf("an error without a code arrives as %v", err)
	}
	if err := refuse(tunnel.Refusef(200, "x")); tunnel.CodeOf(err) != tunnel.Internal {
		t.Errorf("a code from the future arrives as %v", err)
	}
	if err := refuse(tunnel.Refusef(tunnel.Denied, "%s", strings.Repeat("é", 1<<20))); tunnel.CodeOf(err) != tunnel.Denied || len(err.Error()) > 600 {
		t.Errorf("a text of 2 MiB arrives as %d bytes", len(err.Error()))
	}
	r.idle(e)
	if s := e.client.Session(); r.counters.Sessions.Load() != 1 || s == nil {
		t.Error("one of them has ended the session")
	}
}

// What a caller may write as an address costs the dial and not the session.
func TestOddTargets(t *testing.T) {
	r := newRig(t)
	r.join("edge1", direct)
	for name, c := range map[string]struct {
		request tunnel.Request
		code    tunnel.Code
		says    string
	}{
		"not UTF-8":          {tunnel.Request{Node: "edge1", Category: "tcp", Network: "tcp", Addr: "\xff:1"}, tunnel.Unreachable, "not an address"},
		"too long":           {tunnel.Request{Node: "edge1", Category: "tcp", Network: "tcp", Addr: strings.Repeat("a", 100<<10)}, tunnel.Unreachable, "not an address"},
		"caller not UTF-8":   {tunnel.Request{Node: "edge1", Category: "tcp", Network: "tcp", Addr: "127.0.0.1:1", Caller: "\xff"}, tunnel.Refused, "refused"},
		"a module it lacks":  {tunnel.Request{Node: "edge1", Category: "gopher", Network: "tcp", Addr: "127.0.0.1:1"}, tunnel.Internal, `no module "gopher"`},
		"the session's own":  {tunnel.Request{Node: "edge1", Category: category, Network: "tcp", Addr: "127.0.0.1:1"}, tunnel.Internal, "no module"},
		"a node that is not": {tunnel.Request{Node: "edge9", Category: "tcp", Network: "tcp", Addr: "127.0.0.1:1"}, tunnel.NoSuchNode, "edge9 is not connected"},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		_, err := r.dir.Dial(ctx, c.request)
		cancel()
		if err == nil || tunnel.CodeOf(err) != c.code || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v; want %s and %q", name, err, c.code, c.says)
		}
	}
	if n := r.counters.Sessions.Load(); n != 1 {
		t.Errorf("the session was lost %d times", n-1)
	}
	r.idle()
}

// A session has as many conns as it may and not one more, which waits for as long as its
// caller does. One that ends makes room at once, also while the edge still tidies up.
func TestConnLimit(t *testing.T) {
	r := newRig(t, func(c *ServerConfig) { c.Limits.Conns = 2 })
	e := r.join("edge1", direct)
	a, _ := r.pair("edge1")
	b, _ := r.pair("edge1")
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err := r.dir.Dial(ctx, tunnel.Request{Node: "edge1", Category: "tcp", Network: "tcp", Addr: "127.0.0.1:1"})
	if err == nil || tunnel.CodeOf(err) != tunnel.Overloaded || !strings.Contains(err.Error(), "2 conns") || r.counters.LimitedBy(tunnel.LimitConns) != 1 {
		t.Errorf("the third conn: %v, want overloaded, and a count of it", err)
	}
	time.AfterFunc(100*time.Millisecond, func() { b.Close() })
	tunnel.Reset(r.mustDial("edge1", testkit.NewTarget(t).Address()))
	for range 100 {
		r.eventually("the cloud has room", func() bool { return r.dir.Lookup("edge1").Conns.Load() < 2 })
		c, far := r.pair("edge1")
		tunnel.Reset(c)
		far.Close()
	}
	a.Close()
	r.idle(e)
}

// A panic in a module ends the session it happened in. The process lives, another
// session does not notice, and the edge comes back.
func TestPanic(t *testing.T) {
	r := newRig(t)
	r.panics = 1
	other := r.join("edge2", direct)
	e := r.join("edge1", func(_ context.Context, q tunnel.Request) (net.Conn, error) {
		if q.Addr == "boom:1" {
			panic("boom")
		}
		return direct(context.Background(), q)
	})
	c, _ := r.pair("edge1")
	first := r.dir.Lookup("edge1")
	if _, err := r.dial("edge1", "boom:1"); err == nil || tunnel.CodeOf(err) != tunnel.Gone {
		t.Errorf("the dial that panics: %v, want gone", err)
	}
	_, err := c.Read(make([]byte, 1))
	wantErr(t, "a conn of that session", err, syscall.ECONNRESET)
	if len(r.log.lines("level=ERROR", "panic", "boom", "stack=")) != 1 {
		t.Error("the panic is not in the log")
	}
	r.eventually("the edge comes back", func() bool {
		s := r.dir.Lookup("edge1")
		return s != nil && s != first && e.client.Ready() == nil
	})
	if other.client.Ready() != nil || r.counters.Sessions.Load() != 3 {
		t.Error("another session ended with it")
	}
}

// An edge that is told to stop lets its conns finish and takes no new ones.
func TestEdgeDrains(t *testing.T) {
	r := newRig(t)
	e := r.join("edge1", direct)
	c, far := r.pair("edge1")
	e.Cancel()
	r.eventually("the cloud knows", func() bool {
		_, err := r.dial("edge1", "127.0.0.1:1")
		return tunnel.CodeOf(err) == tunnel.Draining
	})
	for range 3 {
		go c.Write([]byte("still here"))
		if _, err := io.ReadFull(far, make([]byte, 10)); err != nil {
			t.Fatalf("the live conn: %v", err)
		}
	}
	select {
	case <-e.Done():
		t.Fatal("the edge stops before its conn has ended")
	default:
	}
	far.Close()
	testkit.ReadAll(t, c)
	c.Close()
	e.Stop() // fails unless Run returns nil
	r.eventually("the node is gone, and the log says so plainly", func() bool {
		return !r.dir.Holds("edge1") && len(r.log.lines("end=cloud", "level=INFO", "session ended: the edge has stopped")) == 1
	})
	if l := r.log.lines("end=cloud", "err="); len(l) != 0 {
		t.Errorf("a clean stop leaves an error in the cloud's log: %s", l)
	}
}

// An edge without conns that stops says so first: the cloud's log has no error.
func TestIdleEdgeStops(t *testing.T) {
	r := newRig(t)
	var took []time.Duration // a busy machine may be slow to stop some, but not most
	for i := range 20 {
		e := r.join("edge1", direct)
		start := time.Now()
		e.Stop()
		took = append(took, time.Since(start))
		r.eventually("the log says so plainly", func() bool {
			return len(r.log.lines("end=cloud", "session ended: the edge has stopped")) == i+1
		})
	}
	if l := r.log.lines("end=cloud", "err="); len(l) != 0 {
		t.Errorf("a clean stop leaves an error in the cloud's log: %s", l)
	}
	slices.Sort(took)
	if median := took[len(took)/2]; median > time.Second {
		t.Errorf("the median of the stops is %s", median)
	}
	if l := r.log.lines("end=edge", "session ended", errStopping.Error()); len(l) != 20 {
		t.Errorf("the edge says so %d times", len(l))
	}
}

// A panic while somebody joins costs that connection; one in a conn's handler costs
// the session. The process lives.
func TestPanicInAHandler(t *testing.T) {
	r := newRig(t)
	r.panics = 2
	r.join("edge2", direct)
	r.auth.panics.Store(true)
	if err := r.stranger().control(bearerOf("edge1")).end(); status.Code(err) != codes.Internal {
		t.Errorf("joining: %v, want internal", err)
	}
	r.auth.panics.Store(false)

	s := r.stranger()
	control := s.join("edge1")
	p := &pending{result: make(chan opened)}
	close(p.result) // the handler sends on it
	cs := r.dir.Lookup("edge1").Link.(*cloudSession)
	if refusal := cs.add("topic", p); refusal != nil {
		t.Fatal(refusal)
	}
	if _, err := s.connect("topic").Recv(); status.Code(err) != codes.Internal {
		t.Errorf("the conn: %v, want internal", err)
	}
	if err := control.end(); err == nil {
		t.Error("the session goes on")
	}
	r.eventually("the node is gone, another one is not", func() bool { return !r.dir.Holds("edge1") && r.dir.Holds("edge2") })
	if len(r.log.lines("level=ERROR", "panic", "boom", "stack=")) != 1 || len(r.log.lines("level=ERROR", "panic", "closed channel", "stack=")) != 1 {
		t.Error("the panics are not in the log")
	}
}

// badStream is a stream that panics.
type badStream struct{}

func (badStream) SendMsg(any) error { panic("boom") }
func (badStream) RecvMsg(any) error { panic("boom") }

// A panic in a goroutine of a conn resets that conn, and who waits in it is freed.
func TestPanicInAConn(t *testing.T) {
	for name, use := range map[string]func(c net.Conn) error{
		"sender": func(c net.Conn) error {
			c.Write([]byte("x"))
			<-c.(*conn.Conn).Done()
			_, err := c.Write([]byte("x"))
			return err
		},
		"receiver": func(c net.Conn) error {
			_, err := c.Read(make([]byte, 1))
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			var log journal
			counters := new(tunnel.Counters)
			gone := make(chan struct{})
			c := conn.OverStream(badStream{}, nil, conn.Config{
				Blocks: new(conn.Blocks), Counters: counters, Log: log.logger(),
				Ended: func(error) {}, Gone: func() { close(gone) },
			})
			wantErr(t, "its user", use(c), syscall.ECONNRESET)
			<-gone
			if counters.Panics.Load() != 1 || len(log.lines("level=ERROR", "panic", "boom", "stack=")) != 1 {
				t.Errorf("%d panics counted; log: %s", counters.Panics.Load(), log.lines())
			}
		})
	}
}

// A cloud that is told to stop lets conns finish too, and lets nobody join.
func TestCloudDrains(t *testing.T) {
	r := newRig(t, func(c *ServerConfig) { c.Grace = time.Minute }) // in which a busy machine sends the newcomer away
	e := r.join("edge1", direct)
	c, far := r.pair("edge1")
	r.running.Cancel()
	r.eventually("the edge is told", func() bool { return len(r.log.lines("end=edge", "cloud is about to stop")) == 1 })
	late := r.start(r.clientConfig("edge2"), direct)
	r.eventually("a newcomer is sent away", func() bool {
		return late.client.Ready() != nil && strings.Contains(late.client.Ready().Error(), "this replica is stopping")
	})
	if r.server.Ready() == nil {
		t.Error("the cloud is ready while it stops")
	}
	go c.Write([]byte("still here"))
	if _, err := io.ReadFull(far, make([]byte, 10)); err != nil {
		t.Fatalf("the live conn: %v", err)
	}
	c.Close()
	testkit.ReadAll(t, far)
	far.Close()
	r.running.Stop()
	r.eventually("the edge has no session", func() bool { return e.client.Ready() != nil })
	if r.dir.Len() != 0 {
		t.Error("the directory still holds a node")
	}
}

// Sessions and conns that come and go leave nothing behind: no goroutine, no
// descriptor.
func TestNothingIsLeftBehind(t *testing.T) {
	r := newRig(t)
	round := func(i int) {
		node := "edge" + string(rune('a'+i%26))
		e := r.start(r.clientConfig(node), direct)
		r.eventually("node joins", func() bool { return e.client.Ready() == nil && r.dir.Holds(tunnel.NodeName(node)) })
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		for j := range 6 {
			c, err := r.dial(node, l.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			far, err := l.Accept()
			if err != nil {
				t.Fatal(err)
			}
			go c.Write([]byte("x"))
			io.ReadFull(far, make([]byte, 1))
			switch j % 3 {
			case 0:
				c.Close()
				far.Close()
			case 1:
				tunnel.Reset(c)
				far.Close()
			case 2: // the session's end closes it
				defer far.Close()
			}
		}
		l.Close()
		if i%2 == 0 {
			s := r.dir.Lookup(tunnel.NodeName(node))
			s.Close(errors.New("cut by the test"))
			e.Stop()
		} else {
			e.client.Session().Close(errors.New("cut by the test"))
			e.Stop()
		}
	}
	round(0)
	settled := func() (goroutines, descriptors int) {
		r.eventually("no session is left", func() bool { return r.dir.Len() == 0 })
		return runtime.NumGoroutine(), countDescriptors(t)
	}
	goroutines, descriptors := settled()
	for i := range 50 {
		round(i)
	}
	within(t, time.Minute, "goroutines and descriptors are back where they were", func() bool {
		g, d := settled()
		return g <= goroutines && d <= descriptors
	})
}

func countDescriptors(t *testing.T) int {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Skip("no /proc to count descriptors in")
	}
	return len(fds)
}
