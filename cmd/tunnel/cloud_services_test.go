package main

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/inventory"
	"tunnel.example/tunnel/pkg/services"
	pb "tunnel.example/tunnel/pkg/services/servicesv1"
	"tunnel.example/tunnel/pkg/stream"
	"tunnel.example/tunnel/pkg/tunnel"
	"tunnel.example/tunnel/pkg/udp"
)

// servicesCloud wires a cloud with [mode.cloud.services], and tells it one endpoint of each node.
func servicesCloud(t *testing.T, keys string, endpoints map[string]string) *cloudWiring {
	t.Helper()
	metricFiles(t)
	if err := os.WriteFile("cloud.toml", []byte(plainCloud+"[mode.cloud.services]\n"+keys), 0o600); err != nil {
		t.Fatal(err)
	}
	c, err := conf.LoadCloud("cloud.toml", conf.Env{HostName: "cloud"})
	if err != nil {
		t.Fatal(err)
	}
	w, err := wireCloud(c, slog.New(slog.DiscardHandler), place{})
	if err != nil {
		t.Fatal(err)
	}
	w.services.Set(services.ServicePath("shop", "web"), nil)
	for node, addr := range endpoints {
		ip, port, _ := strings.Cut(addr, ":")
		value, err := proto.Marshal(&services.Endpoint{
			Address: ip, Node: node, Ports: []*services.Port{
				{Protocol: "TCP", Port: portNumber(t, port)}, {Protocol: "UDP", Port: portNumber(t, port)},
			},
		})
		if err != nil {
			t.Fatal(err)
		}
		w.services.Set(services.EndpointPath("shop", "web", "web-a", ip), value)
		w.services.Set(services.NodePath(node), nil)
	}
	w.services.Synced()
	w.services.NodesKnown()
	return w
}

// dialFunc is a tunnel.Dialer.
type dialFunc func(tunnel.Request) (net.Conn, error)

func (f dialFunc) Dial(_ context.Context, r tunnel.Request) (net.Conn, error) { return f(r) }

func portNumber(t *testing.T, port string) uint32 {
	t.Helper()
	n, err := net.LookupPort("tcp", port)
	if err != nil {
		t.Fatal(err)
	}
	return uint32(n)
}

// reachRequest returns a request of edge1 for a conn to target.
func reachRequest(target string) *stream.ReachRequest {
	return &stream.ReachRequest{From: &tunnel.Session{Node: "edge1"}, Target: target}
}

// An edge reaches endpoints on edge nodes through their sessions, and others only if the configuration says so.
func TestReachService(t *testing.T) {
	const onEdge2 = "endpoint/shop/web/web-a/10.88.2.5 TCP 8080"
	w := servicesCloud(t, "", map[string]string{"edge2": "10.88.2.5:8080", "edge3": "10.88.3.5:8080"})
	if _, err := w.reachService(t.Context(), reachRequest(onEdge2)); tunnel.CodeOf(err) != tunnel.Denied {
		t.Errorf("a node that never had a session: %v", err)
	}
	here, there := net.Pipe()
	defer there.Close()
	var asked tunnel.Request
	var trace tunnel.TraceContext
	w.directory.Attach(&tunnel.Session{Node: "edge3"}) // its edge serves no Services
	dialer := dialFunc(func(r tunnel.Request) (net.Conn, error) {
		asked = r
		return here, nil
	})
	w.directory.Attach(&tunnel.Session{Node: "edge2", Services: true, Dialer: dialer})
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1) // one error is sent
	go func() { ended <- joinedNodes{w}.Run(ctx) }()
	testkit.Eventually(t, "the cloud connects through the node", func() bool {
		reach := reachRequest(onEdge2)
		reach.Trace = &trace
		c, err := w.reachService(t.Context(), reach)
		told := reach.Node == "edge2" && reach.Addr == "10.88.2.5:8080"
		return err == nil && c == here && told
	})
	if asked.Addr != "10.88.2.5:8080" || asked.Category != "services" || asked.Caller != "node edge1" ||
		asked.Trace != &trace {
		t.Errorf("the node is asked for %+v", asked)
	}
	const onEdge3 = "endpoint/shop/web/web-a/10.88.3.5 TCP 8080"
	if _, err := w.reachService(t.Context(), reachRequest(onEdge3)); tunnel.CodeOf(err) != tunnel.Denied {
		t.Errorf("a node with a session and without Services: %v", err)
	}
	// The edge starts again without Services; or an operator has its node forgotten.
	w.directory.Attach(&tunnel.Session{Node: "edge2", Dialer: dialer})
	denied := func() bool {
		_, err := w.reachService(t.Context(), reachRequest(onEdge2))
		return tunnel.CodeOf(err) == tunnel.Denied
	}
	testkit.Eventually(t, "the node no longer serves Services", denied)
	w.services.Joined("edge2")
	w.forgotten("edge2")
	if !denied() {
		t.Error("a node that was forgotten still serves Services")
	}
	stop()
	<-ended
}

// The cloud itself dials endpoints that are on no edge node, but never a metadata service.
func TestReachServiceInCluster(t *testing.T) {
	w := servicesCloud(t, "allow = [\"cluster\"]\n", map[string]string{
		"worker1": "192.0.2.1:8080", "worker2": "100.100.100.200:80",
	})
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := w.reachService(gone, reachRequest("endpoint/shop/web/web-a/192.0.2.1 TCP 8080"))
	if tunnel.CodeOf(err) != tunnel.Gone || !strings.Contains(err.Error(), "dialling 192.0.2.1:8080") {
		t.Errorf("the caller has gone: %v", err)
	}
	_, err = w.reachService(t.Context(), reachRequest("endpoint/shop/web/web-a/100.100.100.200 TCP 80"))
	if tunnel.CodeOf(err) != tunnel.Denied {
		t.Errorf("a metadata service: %v", err)
	}
	_, err = w.reachService(t.Context(), reachRequest("endpoint/shop/web/web-a/100.100.100.200 UDP 80"))
	if tunnel.CodeOf(err) != tunnel.Denied {
		t.Errorf("a metadata service, by UDP: %v", err)
	}
	c, err := w.reachService(t.Context(), reachRequest("endpoint/shop/web/web-a/192.0.2.1 UDP 8080"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	// A flow that names another target than the one that the edge may reach: a frame of kind 1, see docs/protocol.md.
	before := w.udp.Dropped(udp.DropDenied)
	payload := append([]byte{1<<3 | 2, 11}, "127.0.0.1:9"...)
	if _, err = c.Write(append([]byte{1, 0, 0, 0, 1, 0, 0, byte(len(payload))}, payload...)); err != nil {
		t.Fatal(err)
	}
	if n := w.udp.Dropped(udp.DropDenied) - before; n != 1 || w.udp.Opened.Load() != 0 {
		t.Errorf("%d datagrams are denied, and %d flows are opened", n, w.udp.Opened.Load())
	}
}

// An edge watches over gRPC, as the server of sessions calls the handler.
func TestWatchServices(t *testing.T) {
	w := servicesCloud(t, "", map[string]string{"edge2": "10.88.2.5:8080"})
	ln := bufconn.Listen(1 << 20)
	server := grpc.NewServer()
	server.RegisterService(&grpc.ServiceDesc{
		ServiceName: pb.Services_ServiceDesc.ServiceName, HandlerType: (*any)(nil),
		Streams: []grpc.StreamDesc{{
			StreamName: "Watch", ServerStreams: true, ClientStreams: true,
			Handler: func(_ any, stream grpc.ServerStream) error {
				return w.watchServices(&tunnel.Session{Node: "edge1"}, stream)
			},
		}},
	}, nil)
	ended := make(chan error, 1) // one error is sent
	go func() { ended <- server.Serve(ln) }()
	conn, err := grpc.NewClient("passthrough:cloud", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return ln.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		conn.Close()
		server.Stop()
		<-ended
	}()
	stream, err := pb.NewServicesClient(conn).Watch(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err = stream.Send(new(pb.Next)); err != nil {
		t.Fatal(err)
	}
	batch, err := stream.Recv()
	if err != nil {
		t.Fatal(err)
	}
	changes, state := new(pb.Changes), services.NewState()
	if err = proto.Unmarshal(batch.GetChanges(), changes); err != nil {
		t.Fatal(err)
	}
	if _, err = state.Apply(changes); err != nil || batch.GetMore() || state.Len() != 3 {
		t.Errorf("%d items, more: %v, %v", state.Len(), batch.GetMore(), err)
	}
}

// endedSession is a cloud whose session with node has just ended. Connected was read before and still lists the node.
type endedSession struct {
	everywhere
	node tunnel.NodeName
}

func (e endedSession) Connected() []tunnel.NodeName {
	return append([]tunnel.NodeName{e.node}, e.everywhere.Connected()...)
}

// A node whose session ends at any moment serves Services while it is away.
func TestServicesOfANodeThatLeaves(t *testing.T) {
	w := servicesCloud(t, "", map[string]string{"edge2": "10.88.2.5:8080", "edge3": "10.88.3.5:8080"})
	w.services.Joined("edge2")
	w.reach = endedSession{w.reach, "edge2"}
	w.directory.Attach(&tunnel.Session{Node: "edge3", Services: true, Dialer: dialFunc(
		func(tunnel.Request) (net.Conn, error) { return nil, errors.New("the node is asked") },
	)})
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1) // one error is sent
	go func() { ended <- joinedNodes{w}.Run(ctx) }()
	code := func(node string) tunnel.Code {
		_, err := w.reachService(t.Context(), reachRequest("endpoint/shop/web/web-a/10.88."+node+".5 TCP 8080"))
		return tunnel.CodeOf(err)
	}
	testkit.Eventually(t, "joinedNodes has looked at both nodes", func() bool { return code("3") != tunnel.Denied })
	if got := code("2"); got != tunnel.NoSuchNode {
		t.Errorf("the node that has left just now: %v", got)
	}
	stop()
	<-ended
}

// After a restart of the cloud, nodes that have not come back serve Services as before.
func TestServicesAfterARestart(t *testing.T) {
	w := servicesCloud(t, "", map[string]string{"edge2": "10.88.2.5:8080", "edge3": "10.88.3.5:8080"})
	w.inventory = inventory.New("", w.log)
	w.inventory.Attached(&tunnel.Session{Node: "edge2", Services: true})
	w.inventory.Attached(&tunnel.Session{Node: "edge3"})
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1) // one error is sent
	go func() { ended <- joinedNodes{w}.Run(ctx) }()
	for node, want := range map[string]tunnel.Code{"2": tunnel.NoSuchNode, "3": tunnel.Denied} {
		target := "endpoint/shop/web/web-a/10.88." + node + ".5 TCP 8080"
		testkit.Eventually(t, "the cloud knows whose edge serves Services", func() bool {
			_, err := w.reachService(t.Context(), reachRequest(target))
			return tunnel.CodeOf(err) == want
		})
	}
	stop()
	<-ended
}
