package egress

import (
	"io"
	"net"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/konnectivity"
)

// A panic in a dial ends that caller's stream or connection only, and is counted.
func TestPanicInADial(t *testing.T) {
	r := newRig(t)
	addr := testkit.Serve(t, testkit.Echo)
	other := r.client(t)
	id := other.dial(addr)
	fault := func(is bool) {
		r.nodes.mu.Lock()
		defer r.nodes.mu.Unlock()
		r.nodes.fault = is
	}
	fault(true)
	c := r.client(t)
	c.send(konnectivity.Packet{Type: konnectivity.PacketDialReq, Protocol: "tcp", Address: addr, Random: 7})
	if err := c.ended(); status.Code(err) != codes.Internal {
		t.Errorf("over gRPC: %v", err)
	}
	conn, err := net.Dial("unix", r.connect)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	io.WriteString(conn, "CONNECT "+addr+" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
	if b, err := io.ReadAll(conn); len(b) != 0 {
		t.Errorf("over HTTP CONNECT: %q, %v", b, err)
	}
	fault(false)
	other.send(konnectivity.Packet{Type: konnectivity.PacketData, ConnID: id, Data: []byte("still here")})
	if p := other.want(konnectivity.PacketData, "another conn goes on"); string(p.Data) != "still here" {
		t.Errorf("%q", p.Data)
	}
	other.send(konnectivity.Packet{Type: konnectivity.PacketCloseReq, ConnID: id})
	other.data(id)
	if n := r.door.cfg.Counters.Panics.Load(); n != 2 {
		t.Errorf("%d panics counted, want 2", n)
	}
}
