package peers

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"tunnel.example/tunnel/internal/testkit"
	"tunnel.example/tunnel/pkg/stream"
)

// What an edge says it reaches is known to every replica, and goes with it.
func TestReach(t *testing.T) {
	all := newFleet(t, 2)
	cfg := all[0].clientConfig("n1")
	cfg.Reach = "host=n1&cidr=10.88.1.0/24"
	e := all[0].start(cfg, direct)
	long := all[0].clientConfig("n2")
	long.Reach = "host=" + strings.Repeat("x", stream.MaxReach-len("host="))
	all[0].start(long, direct)
	all[0].join("n3", direct) // says nothing
	for _, r := range all {
		testkit.Eventually(t, "the replica knows what both reach", func() bool {
			reach := r.peers.Reach()
			return reach["n1"] == cfg.Reach && reach["n2"] == long.Reach
		})
	}
	e.Stop()
	for _, r := range all {
		testkit.Eventually(t, "the replica has forgotten it", func() bool { return r.peers.Reach()["n1"] == "" })
	}
	cfg.Reach = strings.Repeat("x", stream.MaxReach+1)
	c, err := stream.NewClient(cfg)
	if err != nil {
		t.Fatal(err)
	}
	testkit.Run(t, c.Run)
	testkit.Eventually(t, "a list that is too long is refused", func() bool {
		return status.Code(c.Ready()) == codes.InvalidArgument
	})
}

// Whose edges serve Services is known to every replica.
func TestServesServices(t *testing.T) {
	all := newFleet(t, 2)
	cfg := all[0].clientConfig("n1")
	cfg.Services = true
	e := all[0].start(cfg, direct)
	all[0].join("n2", direct) // is without
	for _, r := range all {
		testkit.Eventually(t, "the replica knows that one edge serves Services", func() bool {
			_, serves := r.peers.ServesServices("n1")
			return serves && r.peers.Holds("n2")
		})
		if connected, serves := r.peers.ServesServices("n2"); !connected || serves {
			t.Errorf("an edge without Services: connected %t, serves them %t", connected, serves)
		}
		if connected, serves := r.peers.ServesServices("n3"); connected || serves {
			t.Errorf("a node without a session: connected %t, serves Services %t", connected, serves)
		}
	}
	e.Stop()
	for _, r := range all {
		testkit.Eventually(t, "the replica knows that it has left", func() bool {
			connected, serves := r.peers.ServesServices("n1")
			return !connected && !serves
		})
	}
}
