package peers

import (
	"context"
	"io"
	"net"
	"testing"

	"tunnel.example/tunnel/pkg/tunnel"
)

// A replica reaches the API of each other replica, and no node may have the name that leads there. A replica
// without an API refuses, and its session lives on.
func TestAPI(t *testing.T) {
	all := newFleet(t, 2)
	a, b := all[0], all[1]
	others := a.peers.Others()
	if len(others) != 1 || others[0].ID != b.peers.ID() || others[0].Software != "test" || others[0].Since.IsZero() {
		t.Fatalf("the others are %+v", others)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if _, err := others[0].Dial(ctx); err == nil || tunnel.CodeOf(err) != tunnel.NoSuchNode {
		t.Errorf("a replica without an API: %v; want a refusal with code no-such-node", err)
	}
	if now := a.peers.Others(); len(now) != 1 || now[0].link != others[0].link {
		t.Errorf("the session has ended: %+v", now)
	}
	if ownNode.MayJoin() == nil {
		t.Errorf("a node may have the name %s, which leads to a replica", ownNode)
	}
}

// The conn to another replica's API carries bytes both ways.
func TestAPIServes(t *testing.T) {
	p := newPlaces(t, 2)
	p.api = func(context.Context) (net.Conn, error) {
		ours, theirs := net.Pipe()
		go func() {
			defer theirs.Close()
			var request [4]byte
			if _, err := io.ReadFull(theirs, request[:]); err == nil {
				theirs.Write(append([]byte("got "), request[:]...))
			}
		}()
		return ours, nil
	}
	all := p.fleet(t, p.names)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, err := all[0].peers.Others()[0].Dial(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err = c.Write([]byte("ping")); err != nil {
		t.Fatal(err)
	}
	if answer, err := io.ReadAll(c); err != nil || string(answer) != "got ping" {
		t.Errorf("%q, %v", answer, err)
	}
	if _, err = all[0].peers.Dial(ctx, tunnel.Request{Node: "edge1", Category: categoryAPI, Network: "tcp"}); err == nil {
		t.Error("a request for a node reaches the API")
	}
}
