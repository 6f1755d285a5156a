package hostile

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/services/servicesv1"
	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/test/rig"
)

const (
	mib = 1 << 20
	// flood is how many messages an attacker sends in a second, or streams it opens: many
	// times what it may (1,000 of either, and a few for each open).
	flood = 12000
	// message is what the cloud takes in of one message at most, and so what a session
	// holds that says too much.
	message = 65 << 10
	// window is what a conn may have in flight, and a session beside it.
	window = mib
)

// TestHostileEdge is an edge with a good token that breaks the protocol.
func TestHostileEdge(t *testing.T) {
	kube := newAPIServer(t)
	told := kube.addServices()
	l := newLab(t, kube, "[mode.cloud.services]\nnamespaces = [\"shop\"]\n")
	l.wantItems(t, told)
	l.endure(edgeAttacks())
}

func edgeAttacks() []attack {
	flooded, messages := []string{"ResourceExhausted"}, limited("messages")
	return append([]attack{
		{name: "opens", offend: says(flood, "tcp", "open"), answers: []string{"PermissionDenied"}, holds: 2 * message},
		{name: "a second hello", offend: says(1, "stream", "hello"), answers: []string{"PermissionDenied"},
			holds: 2 * message},
		{name: "cancels of unknown topics", offend: says(flood, "stream", "cancel"), answers: flooded, counter: messages,
			holds: 2 * message},
		{name: "asking for connections", offend: says(1, "stream", "connection"), answers: []string{"PermissionDenied"},
			holds: 2 * message},
		{name: "what replicas say", offend: says(flood, "stream", "nodes"), answers: flooded, counter: messages,
			holds: 2 * message},
		{name: "what clouds say", offend: says(1, "stream", "replicas"), answers: []string{"PermissionDenied"},
			holds: 2 * message},
		{name: "refusals of unknown topics", offend: says(flood, "stream", "refused"), answers: flooded, counter: messages,
			holds: 2 * message},
		{name: "words that nobody knows", offend: says(flood, "no-such-module", "shout"), answers: flooded,
			counter: "tunnel_unknown_messages_total", holds: 2 * message},
		{name: "long words that nobody knows", offend: says(200, strings.Repeat("m", 30<<10), strings.Repeat("t", 30<<10)),
			answers: []string{"endured"}, counter: "tunnel_unknown_messages_total", holds: 2 * message},
		{name: "new credentials", offend: newCredentials, answers: flooded, counter: messages, holds: 2 * message},
		{name: "a module's name of 1 MB", offend: says(1, strings.Repeat("m", mib), "open"),
			answers: []string{"ResourceExhausted"}, counter: limited("message"), holds: 2 * message},
		{name: "a type of 1 MB", offend: says(1, "stream", strings.Repeat("t", mib)), answers: []string{"ResourceExhausted"},
			counter: limited("message"), holds: 2 * message},
		{name: "a hello of 1 MB", offend: longHello, answers: []string{"ResourceExhausted", "InvalidArgument"},
			counter: "tunnel_joins_refused_total", holds: 2 * message},
		{name: "a hello that does not come", offend: noHello, answers: []string{"AlreadyExists", "Unavailable"},
			counter: "tunnel_joins_refused_total", holds: 2 * message},
		{name: "a control stream that is not read", offend: neverReads, answers: append(flooded, "Unavailable"),
			counter: messages, holds: 2 * 4000 * 512},
		{name: "conns of unknown topics", offend: unknownConns, answers: []string{"endured", "NotFound"}, holds: 2 * mib},
		{name: "the conns of another node", offend: stolenConn, alone: true, answers: []string{"NotFound"}, holds: 2 * mib},
		{name: "bytes after the end of a conn", offend: bytesAfterFin, answers: []string{"Aborted"}, holds: 2 * mib},
		{name: "a chunk of 1 MB", offend: longChunk, answers: []string{"Aborted", "ResourceExhausted"}, holds: 2 * mib},
		{name: "conns that are not read", offend: unreadConns, alone: true, answers: []string{"endured"},
			holds: unread * 5 * window, after: time.Second},
	}, serviceAttacks()...)
}

// evil is an edge whose messages the test writes.
type evil struct {
	pb.StreamClient
	watches servicesv1.ServicesClient
	node    string
	control pb.Stream_TunnelStreamingClient
}

// dial connects as an attacker does, without a session.
func (v *victim) dial(ctx context.Context, node string) *evil {
	cc, err := grpc.NewClient("passthrough:///"+v.Addr["grpc"],
		grpc.WithTransportCredentials(credentials.NewTLS(v.edgeTLS())),
		grpc.WithContextDialer(func(_ context.Context, a string) (net.Conn, error) { return attackerDial(ctx, a) }),
		grpc.WithDisableRetry(), grpc.WithIdleTimeout(0), grpc.WithInitialWindowSize(64<<10),
		grpc.WithInitialConnWindowSize(64<<10))
	if err != nil {
		panic(err)
	}
	context.AfterFunc(ctx, func() { cc.Close() })
	return &evil{StreamClient: pb.NewStreamClient(cc), watches: servicesv1.NewServicesClient(cc), node: node}
}

// open opens the control stream of a node, with its token.
func (v *victim) open(ctx context.Context, e *evil) (err error) {
	ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+auth.EncodeToken(e.node, v.token(e.node)))
	e.control, err = e.TunnelStreaming(ctx)
	return err
}

// join makes a session of an edge with these capabilities.
func (v *victim) join(ctx context.Context, node string, capabilities ...string) (*evil, error) {
	e := v.dial(ctx, node)
	if err := v.open(ctx, e); err != nil {
		return nil, err
	}
	if err := e.say("stream", "hello", "", &pb.Hello{Version: 1, Software: "evil",
		Capabilities: capabilities}); err != nil {
		return nil, e.end()
	}
	if _, err := e.control.Recv(); err != nil {
		return nil, err
	}
	return e, nil
}

// say sends a message. io.EOF says that the session has ended: see end.
func (e *evil) say(category, typ, topic string, data proto.Message) error {
	m := &pb.StreamMsg{Node: rig.Node, Category: category, Type: typ, Topic: topic, Addr: "127.0.0.1:22"}
	if data != nil {
		m.Data, _ = proto.Marshal(data)
	}
	return e.control.Send(m)
}

// end returns with what the session ends.
func (e *evil) end() error {
	for {
		if _, err := e.control.Recv(); err != nil {
			return err
		}
	}
}

// want waits for a message of a type.
func (e *evil) want(typ string) (*pb.StreamMsg, error) {
	for {
		m, err := e.control.Recv()
		if err != nil || m.GetType() == typ {
			return m, err
		}
	}
}

// tooOften is the answer to an attacker whose node has joined too often. The attack has not begun, so the answer does
// not count.
const tooOften = "joined too often"

// code says what an attack was answered with.
func code(err error) string {
	if err == nil {
		return "endured"
	}
	if status.Code(err) == codes.ResourceExhausted && strings.Contains(err.Error(), "has joined more than") {
		return tooOften
	}
	if status.Code(err) == codes.Unknown {
		return err.Error()
	}
	return status.Code(err).String()
}

// session returns an attack of an edge that has joined. It ends with ctx, or when the
// session does.
func session(
	attack func(ctx context.Context, v *victim, e *evil) error,
) func(ctx context.Context, v *victim, as string) string {
	return func(ctx context.Context, v *victim, as string) string {
		sctx, cancel := context.WithCancel(ctx)
		defer cancel()
		e, err := v.join(sctx, as)
		if err == nil {
			err = attack(sctx, v, e)
		}
		if errors.Is(err, io.EOF) {
			err = e.end()
		}
		if ctx.Err() != nil && (err == nil || errors.Is(err, ctx.Err()) || status.Code(err) == codes.Canceled) {
			return "endured"
		}
		return code(err)
	}
}

// says says the same for as long as the session lives.
func says(perSecond int, category, typ string) func(ctx context.Context, v *victim, as string) string {
	return session(func(ctx context.Context, _ *victim, e *evil) error {
		heard := make(chan error, 1)
		go func() { heard <- e.end() }()
		n := 0
		err := pace(ctx, perSecond, func() error {
			n++
			return e.say(category, typ, fmt.Sprintf("topic-%d", n), nil)
		})
		if errors.Is(err, io.EOF) {
			return <-heard
		}
		return err
	})
}

// newCredentials presents tokens, all wrong, in place of the one that it has joined with.
func newCredentials(ctx context.Context, v *victim, as string) string {
	return session(func(ctx context.Context, _ *victim, e *evil) error {
		wrong := &pb.Credential{AccessToken: auth.EncodeToken(rig.Node, auth.NewToken())}
		return pace(ctx, flood, func() error { return e.say("stream", "credential", "", wrong) })
	})(ctx, v, as)
}

// longHello joins with more than fits a message, and with an instance that fits it alone.
func longHello(ctx context.Context, v *victim, as string) string {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	e := v.dial(ctx, as)
	if err := v.open(ctx, e); err != nil {
		return code(err)
	}
	size := mib
	if as == "evil1" {
		size = 60 << 10
	}
	e.say("stream", "hello", "", &pb.Hello{Version: 1, Instance: strings.Repeat("i", size)})
	return code(e.end())
}

// noHello opens control streams on one connection and says nothing on them.
func noHello(ctx context.Context, v *victim, as string) string {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	e := v.dial(ctx, as)
	ends := make(chan error, 100)
	for range cap(ends) {
		if err := v.open(ctx, e); err != nil {
			return code(err)
		}
		one := &evil{control: e.control}
		go func() { ends <- one.end() }()
	}
	for range cap(ends) {
		if err := <-ends; status.Code(err) != codes.AlreadyExists && status.Code(err) != codes.Unavailable {
			return code(err)
		}
	}
	return "AlreadyExists"
}

// neverReads has the cloud answer heartbeats that it does not read.
func neverReads(ctx context.Context, v *victim, as string) string {
	return session(func(ctx context.Context, _ *victim, e *evil) error {
		n := int64(0)
		return pace(ctx, flood, func() error {
			n++
			return e.say("stream", "heartbeat", "", &pb.Heartbeat{Sent: 1<<62 + n})
		})
	})(ctx, v, as)
}

func connect(ctx context.Context, e *evil, topic string) (pb.Stream_ConnectClient, error) {
	return e.Connect(metadata.AppendToOutgoingContext(ctx, "topic", topic))
}

// unknownConns connects topics that nobody has asked for.
func unknownConns(ctx context.Context, v *victim, as string) string {
	return session(func(ctx context.Context, _ *victim, e *evil) error {
		n := 0
		return pace(ctx, 400, func() error {
			n++
			c, err := connect(ctx, e, fmt.Sprintf("topic-%d", n))
			if err == nil {
				_, err = c.Recv()
			}
			if status.Code(err) == codes.NotFound && n < 500 {
				return nil
			}
			return err
		})
	})(ctx, v, as)
}

// asked returns a caller of the TCP front door to a node, and the topic by which the node
// is asked to connect it.
func (v *victim) asked(ctx context.Context, e *evil) (net.Conn, string, error) {
	caller, err := (&net.Dialer{Timeout: hangs}).DialContext(ctx, "tcp", v.Addr[e.node])
	if err != nil {
		return nil, "", err
	}
	caller.SetDeadline(time.Now().Add(hangs))
	context.AfterFunc(ctx, func() { caller.Close() })
	m, err := e.want("open")
	return caller, m.GetTopic(), err
}

// stolenConn answers what another node was asked, by conns and by refusals. The other one
// is asked and answers as if nothing were.
func stolenConn(ctx context.Context, v *victim, _ string) string {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	thief, err := v.join(ctx, "evil0")
	if err != nil {
		return code(err)
	}
	owner, err := v.join(ctx, "evil1")
	if err != nil {
		return code(err)
	}
	caller, topic, err := v.asked(ctx, owner)
	if err != nil {
		return code(err)
	}
	stolen, err := connect(ctx, thief, topic)
	if err != nil {
		return code(err)
	}
	stolen.Send(&pb.Chunk{Data: []byte("thief")})
	_, answer := stolen.Recv()
	thief.say("stream", "refused", topic, &pb.Refused{Code: pb.Code_CODE_DENIED})
	own, err := connect(ctx, owner, topic)
	if err != nil {
		return code(err)
	}
	if err := own.Send(&pb.Chunk{Data: []byte("owner")}); err != nil {
		return code(err)
	}
	got := make([]byte, 5)
	if _, err := io.ReadFull(caller, got); err != nil || string(got) != "owner" {
		return fmt.Sprintf("the caller gets %q, %v", got, err)
	}
	return code(answer)
}

// bytesAfterFin goes on sending after the end.
func bytesAfterFin(ctx context.Context, v *victim, as string) string {
	return session(func(ctx context.Context, v *victim, e *evil) error {
		_, topic, err := v.asked(ctx, e)
		if err != nil {
			return err
		}
		c, err := connect(ctx, e, topic)
		if err != nil {
			return err
		}
		c.Send(&pb.Chunk{Fin: true})
		for range 100 {
			c.Send(&pb.Chunk{Data: []byte("more")})
		}
		for err == nil {
			_, err = c.Recv()
		}
		return err
	})(ctx, v, as)
}

// longChunk sends more in one chunk than fits.
func longChunk(ctx context.Context, v *victim, as string) string {
	return session(func(ctx context.Context, v *victim, e *evil) error {
		_, topic, err := v.asked(ctx, e)
		if err != nil {
			return err
		}
		c, err := connect(ctx, e, topic)
		if err != nil {
			return err
		}
		c.Send(&pb.Chunk{Data: make([]byte, mib)})
		for err == nil {
			_, err = c.Recv()
		}
		return err
	})(ctx, v, as)
}

// unread is how many conns are not read, by the edge and by as many callers.
const unread = 8

// unreadConns stuffs conns both ways that nobody reads.
func unreadConns(ctx context.Context, v *victim, as string) string {
	return session(func(ctx context.Context, v *victim, e *evil) error {
		for range unread {
			caller, topic, err := v.asked(ctx, e)
			if err != nil {
				return err
			}
			c, err := connect(ctx, e, topic)
			if err != nil {
				return err
			}
			go io.Copy(caller, zeros{})
			go func() {
				for c.Send(&pb.Chunk{Data: make([]byte, 16<<10)}) == nil { // until it is stuck, and then until the end
				}
			}()
		}
		<-ctx.Done()
		return nil
	})(ctx, v, as)
}

// zeros is read without end.
type zeros struct{}

func (zeros) Read(p []byte) (int, error) { return len(p), nil }
