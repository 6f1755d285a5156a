package peers

import (
	"context"
	"net"
	"slices"
	"testing"
	"time"
)

// A replica that leaves takes no edges, so another replica may not leave because of it. It stays among the replicas
// that have joined: an operator still sees it, and tunnel_replicas counts it.
func TestReplicaThatLeavesTakesNoEdges(t *testing.T) {
	all := newFleet(t, 2)
	stays := all[1]
	if stays.server.Alone() || stays.peers.Replicas() != 1 {
		t.Fatal("the other replica does not count before it leaves")
	}
	left := make(chan struct{})
	go func() {
		defer close(left)
		all[0].server.Leave(t.Context())
	}()
	stays.eventually("no other replica takes edges", stays.server.Alone)
	if n := stays.peers.Replicas(); n != 0 {
		t.Errorf("konnectivity agents are told of %d other replicas, want 0", n)
	}
	if others := stays.peers.Others(); len(others) != 1 || !others[0].Leaving || len(stays.peers.Joined()) != 1 {
		t.Errorf("the replica that leaves is not listed as such: %+v", others)
	}
	if all[0].server.Alone() {
		t.Error("the replica that stays does not count at the one that leaves")
	}
	<-left
}

// secondJoins counts the joins that the replicas have refused because they have a session of the edge.
func (all fleet) secondJoins() (n int) {
	for _, a := range all {
		n += len(a.text.Lines("has a session of this process already"))
	}
	return n
}

// settled fails the test if an edge goes on dialling replicas with which it has a session.
func (all fleet) settled(t *testing.T, when string) {
	t.Helper()
	before := all.secondJoins()
	time.Sleep(4 * time.Second) // an edge that misses a replica dials several times meanwhile
	if n := all.secondJoins() - before; n > 1 {
		t.Errorf("%s: %d second joins were refused, want at most the one that was under way", when, n)
	}
}

// Edges that keep a session with every replica do not look for a replica that has left and goes on running.
func TestEdgeDoesNotMissAReplicaThatHasLeft(t *testing.T) {
	all := newFleet(t, 3)
	stay := all[1:]
	start := func(node string) {
		cfg := all[0].clientConfig(node)
		anyOf, anyThatStays := all.balanced(), stay.balanced()
		cfg.All = true
		cfg.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
			if c, err := anyOf(ctx, network, address); err == nil {
				return c, nil
			}
			return anyThatStays(ctx, network, address) // a balancer also sees that nothing listens
		}
		all[0].start(cfg, direct)
	}
	start("edge1")
	for _, a := range all {
		within(t, 3*patience, "each replica holds edge1", func() bool { return a.dir.Holds("edge1") })
	}
	before := all.secondJoins()
	all[0].server.Leave(t.Context())
	all[0].eventually("its session of edge1 has ended", func() bool { return !all[0].dir.Holds("edge1") })
	if n := all.secondJoins() - before; n > 1 {
		t.Errorf("while a replica leaves: %d second joins were refused, want at most 1", n)
	}
	all.settled(t, "after a replica has left")

	start("edge2")
	for _, a := range stay {
		within(t, 3*patience, "each replica that stays holds edge2", func() bool { return a.dir.Holds("edge2") })
	}
	all.settled(t, "after another edge has joined")
	if slices.ContainsFunc(stay, func(a *replicaRig) bool { return a.counters.Sessions.Load() != 2 }) {
		t.Error("the edges have had more than one session with a replica that stays")
	}
}

// An edge that looks for a replica stops when the replica leaves.
func TestEdgeStopsLookingForAReplicaThatLeaves(t *testing.T) {
	all := newFleet(t, 2)
	cfg := all[1].clientConfig("edge1")
	cfg.All = true
	all[1].start(cfg, direct) // finds only the second replica, ever
	within(t, 3*patience, "the edge looks for the first replica", func() bool { return all.secondJoins() > 0 })
	left := make(chan struct{})
	go func() {
		defer close(left)
		all[0].server.Leave(t.Context())
	}()
	all[1].eventually("no other replica takes edges", all[1].server.Alone)
	all.settled(t, "after the replica has begun to leave")
	<-left
}
