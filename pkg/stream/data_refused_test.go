package stream

import (
	"context"
	"net"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/protobuf/proto"

	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// requestedNow returns how many requests for data connections await an answer.
func (s *cloudSession) requestedNow() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.requested
}

// dialRefused has the cloud dial through the session c, and refuses the dial.
func (r *rig) dialRefused(c *strangerControl) {
	r.t.Helper()
	open, result := r.sentOpen(c, "edge1")
	c.say(typeRefused, open.GetTopic(), &pb.Refused{Code: pb.Code_CODE_REFUSED})
	<-result
}

// next returns the ticket of the cloud's next request for a data connection, or "" if the cloud sends a
// heartbeat back first, which the caller has sent.
func (c *strangerControl) next() (ticket string) {
	c.t.Helper()
	c.say(typeHeartbeat, "", &pb.Heartbeat{Sent: 1})
	for {
		m, err := c.stream.Recv()
		switch {
		case err != nil:
			c.t.Fatal(err)
		case m.GetType() == typeConnection:
			ticket = m.GetTopic()
		case m.GetType() == typeHeartbeat:
			return ticket
		}
	}
}

// An edge that refuses a request for a data connection is asked again, soon if it is at its limit. The
// refused request does not count against those that the edge may have.
func TestDataConnectionRefused(t *testing.T) {
	for code, pause := range map[pb.Code]time.Duration{
		pb.Code_CODE_OVERLOADED: requestPauseFull, pb.Code_CODE_INTERNAL: requestPause, pb.Code_CODE_DRAINING: requestPause,
	} {
		onFakeClock(t, func(t *testing.T, r *rig) {
			c := r.stranger().joinWith("edge1", &pb.Hello{Version: Version, Connections: 1})
			cs := r.cloudEnd("edge1")
			r.dialRefused(c)
			ticket := c.next()
			for round := range 5 { // the session may have one data connection, so one request at a time
				if ticket == "" {
					t.Fatalf("%s: round %d: the cloud does not ask for a data connection", code, round)
				}
				c.say(typeRefused, ticket, &pb.Refused{Code: code})
				c.say(typeRefused, ticket, &pb.Refused{Code: code}) // once more, which changes nothing
				time.Sleep(pause - 2*time.Millisecond)
				if n := cs.requestedNow(); n != 0 {
					t.Fatalf("%s: %d requests are pending after the refusal", code, n)
				}
				r.dialRefused(c)
				if c.next() != "" {
					t.Fatalf("%s: the cloud asks again within %s", code, pause)
				}
				time.Sleep(4 * time.Millisecond)
				r.dialRefused(c)
				ticket = c.next()
			}
			if n := r.counters.UnknownMessages.Load(); n != 0 {
				t.Errorf("%d messages count as unknown", n)
			}
		})
	}
}

// An edge of an older release says nothing when it opens no data connection. The request is forgotten
// after a while, and until then the cloud asks no more often than the edge may have data connections.
func TestDataConnectionRefusedByAnOldEdge(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		c := r.stranger().joinWith("edge1", &pb.Hello{Version: Version, Connections: 3})
		cs := r.cloudEnd("edge1")
		requests := func() bool {
			t.Helper()
			r.dialRefused(c)
			return c.next() != ""
		}
		if !requests() || requests() {
			t.Error("the cloud does not wait for the answer to its request")
		}
		time.Sleep(requestPause)
		if !requests() || cs.requestedNow() != 2 { // half of the three data connections, rounded up, as no conn was short
			t.Errorf("%d requests are pending after %s; want 2", cs.requestedNow(), requestPause)
		}
		time.Sleep(2 * requestPause)
		if requests() {
			t.Error("the cloud asks for more data connections than the edge may have")
		}
		time.Sleep(requestTimeout)
		if n := cs.requestedNow(); n != 0 {
			t.Errorf("%d requests are pending after %s", n, requestTimeout)
		}
		if !requests() {
			t.Error("the cloud does not ask again")
		}
	})
}

// A ticket is of one session: the edge of another one cannot refuse its request.
func TestDataConnectionRefusedByAnother(t *testing.T) {
	r := newRig(t)
	c := r.stranger().joinWith("edge1", &pb.Hello{Version: Version, Connections: 1})
	other := r.stranger().joinWith("edge2", &pb.Hello{Version: Version, Connections: 1})
	r.dialRefused(c)
	ticket := c.next()
	other.say(typeRefused, ticket, &pb.Refused{Code: pb.Code_CODE_INTERNAL})
	other.next() // the cloud has read the refusal
	if n, m := r.cloudEnd("edge1").requestedNow(), r.cloudEnd("edge2").requestedNow(); ticket == "" || n != 1 || m != 0 {
		t.Errorf("ticket %q: %d requests of edge1 and %d of edge2 are pending; want 1 and 0", ticket, n, m)
	}
}

// An edge that had no room for a data connection has one soon after it has room.
func TestDataConnectionSoonAfterTheLimit(t *testing.T) {
	onFakeClock(t, func(t *testing.T, r *rig) {
		cfg := r.clientConfig("edge1")
		cfg.Connections = 2
		e := r.start(cfg, func(context.Context, tunnel.Request) (net.Conn, error) {
			near, far := net.Pipe()
			near.Close()
			return far, nil
		})
		r.eventually("node joins", func() bool { return r.dir.Holds("edge1") && e.client.Ready() == nil })
		cs, es := r.cloudEnd("edge1"), e.client.Session().Link.(*edgeSession)
		opening := func(n int) {
			es.mu.Lock()
			defer es.mu.Unlock()
			es.opening += n
		}
		call := func() {
			t.Helper()
			c, err := r.dial("edge1", "target:1")
			if err != nil {
				t.Fatal(err)
			}
			c.Close()
		}
		opening(2) // as if two data connections were still ending
		call()
		time.Sleep(requestPauseFull / 2)
		if n := cs.requestedNow(); n != 0 || cs.dataConns() != 0 {
			t.Errorf("%d requests are pending, and there are %d data connections; want none", n, cs.dataConns())
		}
		opening(-2)
		time.Sleep(requestPauseFull)
		call()
		time.Sleep(requestPauseFull)
		if n := cs.dataConns(); n != 1 {
			t.Errorf("there are %d data connections, want 1", n)
		}
	})
}

// scriptedCloud is a cloud that asks an edge for a data connection with each ticket that the test sends, and
// tells what the edge says of tickets. Everything else it ignores, as a cloud of an older release does.
type scriptedCloud struct {
	pb.UnimplementedStreamServer
	tickets chan string
	refused chan *pb.StreamMsg
}

func (c scriptedCloud) TunnelStreaming(stream pb.Stream_TunnelStreamingServer) error {
	if _, err := stream.Recv(); err != nil {
		return err
	}
	hello := encode(&pb.Hello{Version: Version, Session: "s", MaxConns: 10})
	if err := stream.Send(&pb.StreamMsg{Category: category, Type: typeHello, Data: hello}); err != nil {
		return err
	}
	go func() {
		for {
			select {
			case ticket := <-c.tickets:
				stream.Send(&pb.StreamMsg{Category: category, Type: typeConnection, Topic: ticket})
			case <-stream.Context().Done():
				return
			}
		}
	}()
	for {
		m, err := stream.Recv()
		switch {
		case err != nil:
			return err
		case m.GetType() == typeRefused:
			c.refused <- m
		}
	}
}

// An edge answers each request for a data connection that it does not open, with the ticket as the topic. The
// cloud has no ALPN for data connections, so an attempt to open one fails.
func TestEdgeRefusesDataConnections(t *testing.T) {
	r := newRig(t)
	cloud := scriptedCloud{tickets: make(chan string), refused: make(chan *pb.StreamMsg)}
	server := grpc.NewServer(grpc.Creds(credentials.NewTLS(r.server.cfg.TLS)))
	pb.RegisterStreamServer(server, cloud)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve(ln) }()
	t.Cleanup(func() {
		server.Stop()
		<-served
	})
	cfg := r.clientConfig("edge1")
	cfg.Address, cfg.Connections = ln.Addr().String(), 2
	e := r.start(cfg, direct)
	r.eventually("the edge joins", func() bool { return e.client.Ready() == nil })
	es := e.client.Session().Link.(*edgeSession)
	locked := func(change func()) func() {
		return func() {
			es.mu.Lock()
			defer es.mu.Unlock()
			change()
		}
	}
	for _, c := range []struct {
		name   string
		change func()
		code   pb.Code
		text   string
	}{
		{"it cannot open one", func() {}, pb.Code_CODE_INTERNAL, "the edge could not open the data connection"},
		{"at its limit", locked(func() { es.opening = 2 }), pb.Code_CODE_OVERLOADED, "the edge has 2 data connections"},
		{"after failures", locked(func() { es.opening, es.noMoreUntil = 0, time.Now().Add(time.Hour) }),
			pb.Code_CODE_INTERNAL, "the edge could not open the last data connections"},
		{"a narrow link", func() { es.pacer.narrowUntil.Store(new(time.Now().Add(time.Hour))) },
			pb.Code_CODE_INTERNAL, "the link is narrow"},
		{"about to stop", locked(func() { es.leaving = true }), pb.Code_CODE_DRAINING, "the edge is about to disconnect"},
	} {
		c.change()
		cloud.tickets <- c.name
		var m *pb.StreamMsg
		select {
		case m = <-cloud.refused:
		case <-time.After(patience):
			t.Fatalf("%s: the edge does not answer", c.name)
		}
		var refused pb.Refused
		if err := proto.Unmarshal(m.GetData(), &refused); err != nil {
			t.Fatal(err)
		}
		if m.GetCategory() != category || m.GetTopic() != c.name ||
			refused.GetCode() != c.code || refused.GetText() != c.text {
			t.Errorf("%s: the edge says %s/%s %q %v", c.name, m.GetCategory(), m.GetType(), m.GetTopic(), &refused)
		}
	}
	if es.reason() != nil {
		t.Errorf("the session has ended: %v", es.reason())
	}
}
