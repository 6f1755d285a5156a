package egress

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/konnectivity"
	"tunnel.example/tunnel/pkg/tunnel"
)

// rig is a front door on two unix sockets. Its nodes dial from this machine.
type rig struct {
	grpc, connect string // paths of the sockets
	nodes         *nodes
	door          *FrontDoor
}

// nodes are the dialer, the directory and the source of a front door. Every node dials from this machine.
type nodes struct {
	mu    sync.Mutex
	reach map[tunnel.NodeName]konnectivity.Identifiers // of connected nodes
	// dialled are the nodes that were dialled, in order; with " waits" if the dial may wait.
	dialled []tunnel.NodeName
	byPods  int // how many dials were for conns that any pod can cause
	refuse  map[tunnel.NodeName]error
	fault   bool          // dials panic
	hang    chan struct{} // if set, a dial waits for the end of its context, and then closes hang
	changed chan struct{}
	unknown bool   // identifiers are not known yet
	target  string // dialled instead of every address; "": the address itself
}

func (n *nodes) Holds(node tunnel.NodeName) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	_, ok := n.reach[node]
	return ok
}

func (n *nodes) Connected() []tunnel.NodeName { return nil }

func (n *nodes) Identifiers() map[tunnel.NodeName]konnectivity.Identifiers {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.reach
}

func (n *nodes) Known() bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return !n.unknown
}

func (n *nodes) Changed() <-chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.changed
}

func (n *nodes) Dial(ctx context.Context, r tunnel.Request) (net.Conn, error) {
	n.mu.Lock()
	if !r.NoWait {
		n.dialled = append(n.dialled, r.Node+" waits")
	} else {
		n.dialled = append(n.dialled, r.Node)
	}
	if r.ByPods {
		n.byPods++
	}
	refusal, hang, fault := n.refuse[r.Node], n.hang, n.fault
	n.mu.Unlock()
	if r.Category != "egress" || r.Network != "tcp" {
		return nil, errors.New("asked for " + r.Category + "/" + r.Network)
	}
	if fault {
		panic("a fault in a dial")
	}
	if refusal != nil {
		return nil, refusal
	}
	if hang != nil {
		<-ctx.Done()
		close(hang)
		return nil, tunnel.Refusef(tunnel.Gone, "the caller has gone")
	}
	c, err := new(net.Dialer).DialContext(ctx, "tcp", cmp.Or(n.target, r.Addr))
	if err != nil {
		return nil, tunnel.Refusef(tunnel.Refused, "dialling %s: %v", r.Addr, err)
	}
	return c, nil
}

func newRig(t *testing.T) *rig {
	t.Helper()
	dir := t.TempDir()
	r := &rig{
		grpc: filepath.Join(dir, "grpc"), connect: filepath.Join(dir, "connect"),
		nodes: &nodes{reach: map[tunnel.NodeName]konnectivity.Identifiers{}, refuse: map[tunnel.NodeName]error{},
			changed: make(chan struct{})},
	}
	door, err := New(Config{GRPC: []string{"unix://" + r.grpc}, HTTPConnect: []string{"unix://" + r.connect},
		Identifiers: r.nodes, KonnectivityMetrics: true}, r.nodes, r.nodes, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	door.grace, r.door = time.Second, door
	testkit.Run(t, door.Run)
	testkit.Eventually(t, "the front door is ready", func() bool { return door.Ready() == nil })
	return r
}

// client is one stream of ProxyService.
type client struct {
	t      *testing.T
	stream grpc.ClientStream
	cancel func()
}

func (r *rig) client(t *testing.T) *client {
	t.Helper()
	cc, err := grpc.NewClient("unix://"+r.grpc, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(konnectivity.NewCodec())))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cc.Close() })
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(cancel)
	stream, err := cc.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, "/ProxyService/Proxy")
	if err != nil {
		t.Fatal(err)
	}
	return &client{t, stream, cancel}
}

func (c *client) send(p konnectivity.Packet) {
	c.t.Helper()
	if err := c.stream.SendMsg(&p); err != nil {
		c.t.Fatalf("sending %v: %v", p.Type, err)
	}
}

// want receives a packet, which must have type typ.
func (c *client) want(typ konnectivity.PacketType, why string) konnectivity.Packet {
	c.t.Helper()
	var p konnectivity.Packet
	if err := c.stream.RecvMsg(&p); err != nil {
		c.t.Fatalf("waiting for %v, since %s: %v", typ, why, err)
	}
	if p.Type != typ {
		c.t.Fatalf("got %v %q, want %v, since %s", p.Type, p.Err, typ, why)
	}
	return p
}

// dial opens a conn, and returns its id.
func (c *client) dial(addr string) int64 {
	c.t.Helper()
	c.send(konnectivity.Packet{Type: konnectivity.PacketDialReq, Protocol: "tcp", Address: addr, Random: 7})
	rsp := c.want(konnectivity.PacketDialRsp, "a dial was asked for")
	if rsp.Err != "" || rsp.Random != 7 || rsp.ConnID == 0 {
		c.t.Fatalf("dial response %+v", rsp)
	}
	return rsp.ConnID
}

// data returns the bytes until the close response.
func (c *client) data(id int64) []byte {
	c.t.Helper()
	var all []byte
	for {
		var p konnectivity.Packet
		if err := c.stream.RecvMsg(&p); err != nil {
			c.t.Fatalf("after %d bytes: %v", len(all), err)
		}
		if p.ConnID != id {
			c.t.Fatalf("%v of connection %d, not %d", p.Type, p.ConnID, id)
		}
		switch p.Type {
		case konnectivity.PacketData:
			all = append(all, p.Data...)
			p.Free()
		case konnectivity.PacketCloseRsp:
			return all
		default:
			c.t.Fatalf("unexpected %v", p.Type)
		}
	}
}

// ended waits for the end of the stream.
func (c *client) ended() error {
	for {
		var p konnectivity.Packet
		if err := c.stream.RecvMsg(&p); err != nil {
			return err
		}
		p.Free()
	}
}
