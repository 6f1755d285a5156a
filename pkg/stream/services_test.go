package stream

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/pkg/conn"
	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// talk is a service of one stream.
var talk = grpc.ServiceDesc{
	ServiceName: "test.Talk",
	Streams:     []grpc.StreamDesc{{StreamName: "Talk", ServerStreams: true, ClientStreams: true}},
}

// talks has a server serve talk.
func talks(handler func(from *tunnel.Session, stream grpc.ServerStream) error) func(*ServerConfig) {
	return func(c *ServerConfig) { c.Services = []SessionService{{&talk, handler}} }
}

// talkBack sends every message back.
func talkBack(from *tunnel.Session, stream grpc.ServerStream) error {
	for {
		var m pb.StreamMsg
		if err := stream.RecvMsg(&m); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		m.Node = string(from.Node)
		if err := stream.SendMsg(&m); err != nil {
			return err
		}
	}
}

// talkOver opens a stream of talk.
func talkOver(ctx context.Context, t *testing.T, cc grpc.ClientConnInterface) grpc.ClientStream {
	t.Helper()
	stream, err := cc.NewStream(ctx, &talk.Streams[0], "/test.Talk/Talk")
	if err != nil {
		t.Fatal(err)
	}
	return stream
}

// talk opens a stream of talk over a live session of the edge.
func (e *edge) talk(t *testing.T) grpc.ClientStream {
	t.Helper()
	cc, err := e.client.Calls(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return talkOver(t.Context(), t, cc)
}

// asks sends a message, and returns the answer.
func asks(stream grpc.ClientStream) (*pb.StreamMsg, error) {
	m := new(pb.StreamMsg)
	if err := stream.SendMsg(&pb.StreamMsg{Data: blob(60 << 10)}); err != nil && !errors.Is(err, io.EOF) {
		return m, err
	}
	return m, stream.RecvMsg(m)
}

// A service is served on the connection of a session, to the node of the session. Each call ends when its session
// ends, and Calls finds the next session.
func TestSessionService(t *testing.T) {
	returned := make(chan error, 1)
	r := newRig(t, talks(func(from *tunnel.Session, stream grpc.ServerStream) error {
		err := talkBack(from, stream)
		<-stream.Context().Done()
		returned <- err
		return err
	}))
	e := r.join("edge1", direct)
	for name, end := range map[string]func(){
		"the cloud ends the session": func() { r.dir.Lookup("edge1").Close(errors.New("cut by the test")) },
		"the edge ends the session":  func() { e.client.Session().Close(errors.New("cut by the test")) },
		"the connection is cut":      func() { e.client.Session().Link.(*edgeSession).own.Close() },
	} {
		session, at := e.client.Session(), r.dir.Lookup("edge1")
		stream := e.talk(t)
		m, err := asks(stream)
		if err != nil || m.GetNode() != "edge1" || len(m.GetData()) != 60<<10 {
			t.Fatalf("the answer is for %q and has %d bytes: %v", m.GetNode(), len(m.GetData()), err)
		}
		end()
		if err := stream.RecvMsg(m); status.Code(err) != codes.Unavailable && status.Code(err) != codes.Canceled {
			t.Errorf("%s: the call ends with %v", name, err)
		}
		if err := <-returned; err == nil {
			t.Errorf("%s: the handler sees a clean end", name)
		}
		r.eventually("the edge has another session", func() bool {
			s, now := e.client.Session(), r.dir.Lookup("edge1")
			return s != nil && s != session && now != nil && now != at
		})
	}
	c, far := r.pair("edge1")
	c.Close()
	far.Close()
}

// Calls waits until there is a session.
func TestCallsWait(t *testing.T) {
	r := newRig(t, talks(talkBack))
	c, err := NewClient(r.clientConfig("edge1"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := c.Calls(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("without a session: %v", err)
	}
	e := r.start(r.clientConfig("edge1"), direct)
	if _, err := asks(e.talk(t)); err != nil {
		t.Error(err)
	}
}

// Neither strangers nor other replicas get an answer of a service, and a cloud without services goes on.
func TestServiceIsForSessions(t *testing.T) {
	r := newRig(t, talks(talkBack))
	s := r.stranger()
	if _, err := asks(talkOver(t.Context(), t, s.cc)); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("a stranger gets %v", err)
	}
	if _, err := asks(talkOver(t.Context(), t, s.cc)); status.Code(err) != codes.Unavailable {
		t.Errorf("a second call of a stranger gets %v", err)
	}
	all := newFleet(t, 2, talks(talkBack))
	if _, err := asks(talkOver(t.Context(), t, all[1].links[0].links[0].calls)); status.Code(err) != codes.Unimplemented {
		t.Errorf("a replica gets %v", err)
	}
	old := newRig(t)
	e := old.join("edge1", direct)
	if _, err := asks(e.talk(t)); status.Code(err) != codes.Unimplemented {
		t.Errorf("a cloud without the service answers %v", err)
	}
	if n := old.counters.Sessions.Load(); n != 1 || e.client.Ready() != nil {
		t.Error("the session has ended")
	}
}

// A session has a few calls at once, whatever they do, and they are none of its conns.
func TestCallsLimit(t *testing.T) {
	r := newRig(t, talks(func(from *tunnel.Session, stream grpc.ServerStream) error {
		if err := stream.SendMsg(&pb.StreamMsg{Type: "first"}); err != nil {
			return err
		}
		for stream.SendMsg(&pb.StreamMsg{Data: blob(60 << 10)}) == nil { // until the edge's window is full
		}
		return nil
	}))
	e := r.join("edge1", direct)
	var streams []grpc.ClientStream
	var first func()
	for range maxCalls {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		if first == nil {
			first = cancel
		}
		cc, err := e.client.Calls(ctx)
		if err != nil {
			t.Fatal(err)
		}
		stream := talkOver(ctx, t, cc)
		var m pb.StreamMsg
		if err := stream.RecvMsg(&m); err != nil || m.GetType() != "first" {
			t.Fatalf("%v: %v", &m, err)
		}
		streams = append(streams, stream)
	}
	if _, err := asks(e.talk(t)); status.Code(err) != codes.ResourceExhausted || !strings.Contains(err.Error(), "at once") {
		t.Errorf("one call more: %v", err)
	}
	if n := r.dir.Lookup("edge1").Conns.Load(); n != 0 {
		t.Errorf("%d conns are counted", n)
	}
	c, far := r.pair("edge1")
	staysOpen(t, c, far)
	tunnel.Reset(c)
	first()
	r.eventually("there is room for another call", func() bool {
		var m pb.StreamMsg
		return e.talk(t).RecvMsg(&m) == nil
	})
	e.Stop() // the stalled calls do not keep the edge, and neither do they keep the cloud
	r.running.Stop()
	for _, s := range streams {
		if err := s.RecvMsg(new(pb.StreamMsg)); err == nil {
			for err == nil { // what has come before the end
				err = s.RecvMsg(new(pb.StreamMsg))
			}
		}
	}
}

// A cloud that stops does not wait for calls. If it did, it would wait for an hour, and Stop fails the test after a
// minute.
func TestCallsWhileTheCloudStops(t *testing.T) {
	r := newRig(t, talks(talkBack), func(c *ServerConfig) { c.Grace = time.Hour })
	e := r.join("edge1", direct)
	stream := e.talk(t)
	if _, err := asks(stream); err != nil {
		t.Fatal(err)
	}
	r.running.Stop()
	if err := stream.RecvMsg(new(pb.StreamMsg)); err == nil {
		t.Error("the call goes on")
	}
}

// A message that is too long ends its call at the side that gets it, and a handler that panics ends the session.
func TestOddCalls(t *testing.T) {
	r := newRig(t, talks(func(from *tunnel.Session, stream grpc.ServerStream) error {
		var m pb.StreamMsg
		err := stream.RecvMsg(&m)
		switch m.GetType() {
		case "long":
			return stream.SendMsg(&pb.StreamMsg{Data: blob(conn.MaxMessage + 1)})
		case "panic":
			panic("boom")
		}
		return err
	}))
	r.panics = 1
	e := r.join("edge1", direct)
	say := func(m *pb.StreamMsg) error {
		stream := e.talk(t)
		stream.SendMsg(m)
		return stream.RecvMsg(new(pb.StreamMsg))
	}
	if err := say(&pb.StreamMsg{Data: blob(conn.MaxMessage + 1)}); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("the edge says too much: %v", err)
	}
	if err := say(&pb.StreamMsg{Type: "long"}); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("the cloud says too much: %v", err)
	}
	if n := r.counters.Sessions.Load(); n != 1 {
		t.Errorf("the session was lost %d times", n-1)
	}
	if err := say(&pb.StreamMsg{Type: "panic"}); err == nil {
		t.Error("a panic is no error")
	}
	r.eventually("the edge comes back", func() bool { return r.counters.Sessions.Load() == 2 && e.client.Ready() == nil })
}
