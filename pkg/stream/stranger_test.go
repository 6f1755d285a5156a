package stream

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	"tunnel.example/tunnel/pkg/auth"
	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// stranger is an edge whose every message the test writes by hand, on one connection.
type stranger struct {
	t      *testing.T
	ctx    context.Context // of its streams; done when the test ends
	cc     *grpc.ClientConn
	client pb.StreamClient
}

func (r *rig) stranger(show ...tls.Certificate) *stranger {
	r.t.Helper()
	dial := (&net.Dialer{}).DialContext
	if r.net != nil {
		dial = r.net.dial
	}
	address := r.server.Addr().String()
	var first net.Conn // gRPC would dial again when the cloud has closed it
	cc, err := grpc.NewClient("passthrough:///"+address,
		grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{RootCAs: r.ca.Pool(), ServerName: "cloud", Certificates: show})),
		grpc.WithContextDialer(func(ctx context.Context, a string) (_ net.Conn, err error) {
			if first != nil {
				return nil, errors.New("this stranger has had its connection")
			}
			first, err = dial(ctx, "tcp", a)
			return first, err
		}),
		grpc.WithDisableRetry(), grpc.WithIdleTimeout(0))
	if err != nil {
		r.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	r.t.Cleanup(func() {
		cancel()
		cc.Close()
	})
	return &stranger{t: r.t, ctx: ctx, cc: cc, client: pb.NewStreamClient(cc)}
}

// control opens a control stream with an authorization header, "" for none.
func (s *stranger) control(authorization string) *strangerControl {
	s.t.Helper()
	if authorization == "" {
		return s.controlWith()
	}
	return s.controlWith("authorization", authorization)
}

// controlWith opens a control stream with this metadata: keys and values in turn.
func (s *stranger) controlWith(pairs ...string) *strangerControl {
	s.t.Helper()
	stream, err := s.client.TunnelStreaming(metadata.AppendToOutgoingContext(s.ctx, pairs...))
	if err != nil {
		s.t.Fatal(err)
	}
	return &strangerControl{s.t, stream}
}

func bearerOf(node string) string {
	return "Bearer " + auth.EncodeToken(node, auth.Secret("token-"+node))
}

// join makes a session as node.
func (s *stranger) join(node string) *strangerControl {
	s.t.Helper()
	c := s.control(bearerOf(node))
	c.hello(Version)
	c.want("our hello is answered by the cloud's", typeHello)
	return c
}

// joinWith is join with a hello of the test's own.
func (s *stranger) joinWith(node string, hello *pb.Hello) *strangerControl {
	s.t.Helper()
	c := s.control(bearerOf(node))
	c.say(typeHello, "", hello)
	c.want("our hello is answered by the cloud's", typeHello)
	return c
}

// connect opens a Connect with these topics in its metadata.
func (s *stranger) connect(topics ...string) pb.Stream_ConnectClient {
	s.t.Helper()
	ctx := s.ctx
	for _, t := range topics {
		ctx = metadata.AppendToOutgoingContext(ctx, topicKey, t)
	}
	stream, err := s.client.Connect(ctx)
	if err != nil {
		s.t.Fatal(err)
	}
	return stream
}

type strangerControl struct {
	t      *testing.T
	stream pb.Stream_TunnelStreamingClient
}

func (c *strangerControl) send(m *pb.StreamMsg) {
	c.t.Helper()
	if err := c.stream.Send(m); err != nil {
		c.t.Fatalf("sending %s/%s: %v", m.GetCategory(), m.GetType(), err)
	}
}

func (c *strangerControl) say(typ, topic string, data proto.Message) {
	c.t.Helper()
	c.send(&pb.StreamMsg{Category: category, Type: typ, Topic: topic, Data: encode(data)})
}

func (c *strangerControl) hello(version uint32) {
	c.t.Helper()
	c.say(typeHello, "", &pb.Hello{Version: version, Software: "stranger"})
}

// want reads the next message, which must be of that type.
func (c *strangerControl) want(why, typ string) *pb.StreamMsg {
	c.t.Helper()
	m, err := c.stream.Recv()
	if err != nil || m.GetType() != typ {
		c.t.Fatalf("%s: got %v, error %v; want a %s", why, m, err, typ)
	}
	return m
}

// end reads until the session ends and returns why.
func (c *strangerControl) end() error {
	for {
		if _, err := c.stream.Recv(); err != nil {
			return err
		}
	}
}

// sentOpen has the cloud dial through this session, and returns the open request and
// how the dial ended.
func (r *rig) sentOpen(c *strangerControl, node string) (*pb.StreamMsg, <-chan dialled) {
	r.t.Helper()
	result := make(chan dialled, 1)
	go func() {
		conn, err := r.dial(node, "target:1")
		result <- dialled{conn, err}
	}()
	return c.want("the cloud asks to dial", tunnel.TypeOpen), result
}

type dialled struct {
	conn net.Conn
	err  error
}
