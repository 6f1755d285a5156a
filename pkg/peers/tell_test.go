package peers

import (
	"testing"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/stream"
	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
	"tunnel.example/tunnel/pkg/tunnel"
)

// mute is the link of a session that does nothing.
type mute struct{ tunnel.Link }

func (mute) Send(*tunnel.Message) error { return nil }

// Whatever a session says of itself, the other replicas are told of it, and of the sessions
// beside it.
func TestTellAnything(t *testing.T) {
	all := newFleet(t, 2)
	for node, reach := range map[tunnel.NodeName]string{"n1": "host=x\xff", "n2": "\xe2\x82", "n3": "host=fine"} {
		s := &tunnel.Session{ID: "agent", Node: node, Since: time.Now(), Reach: reach, Agent: true, Link: mute{}}
		all[0].dir.Attach(s)
		defer all[0].dir.Detach(s)
	}
	testkit.Eventually(t, "the other replica knows all of them", func() bool { return len(all[1].peers.Reach()) == 3 })
	if got := all[1].peers.Reach(); got["n1"] != "host=x?" || got["n3"] != "host=fine" {
		t.Errorf("%q", got)
	}
	for _, r := range all {
		if n := r.relays.Panics.Load(); n != 0 {
			t.Errorf("%d panics", n)
		}
	}
}

// Text of any bytes becomes a message that another replica can read. Valid text arrives as
// it is.
func FuzzTell(f *testing.F) {
	f.Add("n1", "host=x\xff", "\x80")
	f.Add("n1", "host=edge1&cidr=10.0.0.0/8", "instance")
	f.Fuzz(func(t *testing.T, node, reach, instance string) {
		h := heldOf(&tunnel.Session{Node: tunnel.NodeName(node), Reach: reach, Instance: instance})
		m := stream.NodesMessage(&pb.Nodes{Held: []*pb.Held{h}, Gone: []string{node}})
		var nodes pb.Nodes
		if err := proto.Unmarshal(m.Data, &nodes); err != nil || len(nodes.GetHeld()) != 1 {
			t.Fatalf("%v: %v", err, &nodes)
		}
		got, valid := nodes.GetHeld()[0], utf8.ValidString(node) && utf8.ValidString(reach) && utf8.ValidString(instance)
		if valid && (got.GetNode() != node || got.GetReach() != reach || got.GetInstance() != instance) {
			t.Errorf("%q, %q, %q arrive as %v", node, reach, instance, got)
		}
		if h.GetReach() != reach {
			t.Error("encoding has changed the message")
		}
	})
}
